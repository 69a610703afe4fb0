# mypy: ignore-errors
"""Two remedies against what LLVM and ptxas do to registers: empty inline assembly that they must not look through."""

from fused_rope_attn.runtime.triton_compat import gl, jit


@jit
def opaque(x):
    """Return x, an int32 scalar, as a value that the optimiser knows nothing of, and so cannot compute with early.

    LLVM hoists address arithmetic out of a loop, or to the beginning of a block. Here that costs registers: addresses
    of the operands of all products, or of all rows that a warp rotates, stay in registers or are spilled, although one
    addition would make each of them where it is used. Triton 3.9 suffers most, because it makes an operand's address in
    32 bits, in which LLVM and ptxas find no common base.

    It costs no instruction, because ptxas drops the copy. "Not pure" keeps LLVM from moving it.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def pin(row_sum):
    """Keep the computation of row_sum (64, 4) before the waits that follow.

    ptxas moves the wait for a product up, past arithmetic that could run concurrently with the product. It does not
    move it past a store, not even past this one, which never happens because row_sum is not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred negative; .reg .u32 nowhere; mov.u32 nowhere, 0; setp.lt.f32 negative, $1, 0f00000000; "
        "@negative st.volatile.shared.u32 [nowhere], nowhere; mov.u32 $0, 0; }",
        "=r,f",
        [row_sum],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
