"""A number of which the compiler does not know where it comes from, so that it computes nothing from it beforehand.

What a loop's iterations have in common LLVM computes in front of the loop, and what a block of instructions contains
it may compute at the block's beginning. Here that costs registers: addresses of the operands of all products, or of
all rows that a warp rotates, wait in them or are spilled, where one addition would make each of them where it is used.
Triton 3.9 suffers most, because it makes an operand's address in 32 bits, to which LLVM and ptxas see no common base.
"""

from fused_rope_attn.runtime.triton_compat import gl, jit


@jit
def opaque(x):
    """x, an int32 scalar, as if it were new at every call: what follows from it is computed behind the call.

    It costs no instruction: ptxas drops the copy. "Not pure" keeps LLVM from moving it.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
