# mypy: ignore-errors
"""A remedy against what LLVM and ptxas do to registers: empty inline assembly that they must not look through."""

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
