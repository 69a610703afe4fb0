"""dk through the norm of k, in the epilogue of the sm_90 backward: a block has all of its rows there, and reads k once.

Behind it dk would be read and written once more. Up to head dim 128 a warpgroup owns whole rows; beyond, two of them
own half of each, and exchange their sums over the columns through shared memory.
"""

from fused_rope_attn.attention.hopper.barriers import wait_at_named_barrier
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, KEYS
from fused_rope_attn.attention.norm_gradient_kernel import Pairing, store_weight_sums
from fused_rope_attn.kernels.norm import unnorm_sums, unnorm_with
from fused_rope_attn.kernels.rotation import load_pairs, pair_norm_weights
from fused_rope_attn.kernels.tiles import Origin, RowFormat, head_rows
from fused_rope_attn.runtime.triton_compat import gl, jit

# The hardware's barrier of both warpgroups; Triton counts those of its partitions from 0.
BOTH = gl.constexpr(8)
TWO_WARPGROUPS = gl.constexpr(256)  # threads


@jit
def allocate_exchange():
    """``KeyNorm.exchange``: three sums of each row, of either warpgroup."""
    return gl.allocate_shared_memory(gl.float32, [3 * CONSUMERS, KEYS, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@jit
def load_raw_keys(key_norm, keys, num_rows, gradients, PAIRS: gl.constexpr, WHOLE: gl.constexpr,
                  COLUMNS: gl.constexpr, FIRST_PAIR: gl.constexpr):  # fmt: skip
    """Pairs of the rows of k as the caller gave them, float32, in the layouts of ``load_pairs``."""
    origin = Origin(batch=keys.batch.to(gl.int64), head=keys.head.to(gl.int64), row=keys.start_n)
    row_format = RowFormat(D=gradients.D, BLOCK_D=COLUMNS, USE_INT64_OFFSETS=gradients.USE_INT64_OFFSETS)
    rows = head_rows(key_norm.raw_ptr, key_norm.raw_strides, origin, num_rows, row_format)
    offs = gl.arange(0, KEYS, gl.SliceLayout(1, PAIRS))
    pairing = Pairing(R=gradients.R, INTERLEAVED=gradients.INTERLEAVED)
    return load_pairs(rows, offs, pairing, CHECK_ROWS=True, PAIR_LAYOUT=PAIRS, TILE_LAYOUT=WHOLE, FIRST_PAIR=FIRST_PAIR)


@jit
def whole_row_sums(sums, exchange, WARPGROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """``unnorm_sums`` of whole rows from those of this warpgroup's columns; both warpgroups come here."""
    for i in gl.static_range(3):
        exchange.index(3 * WARPGROUP + i).store(sums[i])
    wait_at_named_barrier(BOTH, TWO_WARPGROUPS)
    theirs = 3 * (1 - WARPGROUP)
    return (
        sums[0] + exchange.index(theirs).load(LAYOUT),
        sums[1] + exchange.index(theirs + 1).load(LAYOUT),
        sums[2] + exchange.index(theirs + 2).load(LAYOUT),
    )


@jit
def unnorm_keys(raw1, raw2, dk1, dk2, num_rows, rotation, key_norm, WARPGROUP: gl.constexpr, FIRST_PAIR: gl.constexpr):
    """dk of normed keys, pairs (KEYS, columns / 2) float32, becomes that of the keys raw1 and raw2; only the first
    num_rows of them exist. The weights' gradient goes to ``key_norm.sums_ptr``."""
    PAIRS: gl.constexpr = dk1.type.layout
    COLUMNS: gl.constexpr = 2 * dk1.shape[1]
    norm = key_norm.norm
    weight1, weight2 = pair_norm_weights(norm, rotation.R, rotation.INTERLEAVED, COLUMNS, PAIRS, FIRST_PAIR)
    exists = (gl.arange(0, KEYS, gl.SliceLayout(1, PAIRS)) < num_rows)[:, None]
    dk1, dk2 = gl.where(exists, dk1, 0.0), gl.where(exists, dk2, 0.0)
    sums = unnorm_sums(raw1, raw2, dk1, dk2, weight1, weight2)
    sums_ptr = key_norm.sums_ptr
    if key_norm.exchange is not None:
        sums = whole_row_sums(sums, key_norm.exchange, WARPGROUP, PAIRS)
    else:
        sums_ptr += WARPGROUP * norm.D
    dk1, dk2, dweight1, dweight2 = unnorm_with(raw1, raw2, dk1, dk2, weight1, weight2, sums, norm)
    store_weight_sums(
        sums_ptr, dweight1, dweight2, norm, rotation.R, rotation.INTERLEAVED, PAIRS, FIRST_PAIR
    )  # fmt: skip
    return dk1, dk2
