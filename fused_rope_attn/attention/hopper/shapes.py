"""The sizes that the sm_90 kernels share: warpgroups and the rows that they own. Nothing here varies with a call.

Both directions give a block two warpgroups that multiply. Each of them owns as many rows as one wgmma has (its M): of
queries in the forward, of keys in the backward.
"""

from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime.triton_compat import gl

# Warps of a warpgroup: all warps but the loading one come in fours.
WARPGROUP_WARPS = gl.constexpr(4)
# Warpgroups of a block that multiply, and so consume what the loading warp brings.
CONSUMERS = gl.constexpr(2)
# Rows of one wgmma: the query rows of a warpgroup in the forward, its key rows in the backward.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)

# Query rows of the forward's tile: those of both warpgroups.
FORWARD_BLOCK_M = gl.constexpr(128)
# Query rows that the backward takes at a time, and key rows of its tile: those of both warpgroups.
BACKWARD_BLOCK_M = gl.constexpr(64)
BACKWARD_BLOCK_N = gl.constexpr(128)


def padded_rows(len_q: int, sequences: int | None) -> int:
    """Rows for each head in buffers of the backward's tiles: NQ up to whole tiles.

    Packed sequences begin at ``kernels.lengths.padded_row`` each and have whole tiles to themselves.
    """
    return tile_count(len_q, sequences, BACKWARD_BLOCK_M.value) * BACKWARD_BLOCK_M.value


def rotated_shape(
    batch: int, heads: int, len_q: int, sequences: int | None, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of the rotated queries that the backward reads: like q, packed sequences in ``padded_rows``."""
    return (batch, heads, len_q if sequences is None else padded_rows(len_q, sequences), head_dim)
