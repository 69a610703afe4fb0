# mypy: ignore-errors
"""Co-RoPE's distances in device code: the length of every key's step, the mileage that steps add up to, and the angles.

A distance is a fixed-point number with FRACTION_BITS fractional bits, because sums of steps are then exact in any
order: the backward pass visits the keys from the first to the diagonal, and finds the distances that the forward pass
found from the diagonal to the first. Angles are counted in revolutions (1 is a full circle), so that an angle is
reduced by dropping whole numbers.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import Mask, Window, visible
from fused_rope_attn.kernels.records import record

FRACTION_BITS = tl.constexpr(23)  # a tile's 128 keys then stay below 2**31; a step's rounding is 6e-8
ONE = tl.constexpr(float(1 << 23))
TWO_PI = tl.constexpr(6.283185307179586)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a float32 to the nearest integer


@record
class Frequencies:
    """The tables of ``launch.frequency_tables``."""

    multiples_ptr: tl.tensor
    revolutions_ptr: tl.tensor


@record
class Distances:
    """Distances ``whole + rest + local`` of a tile: whole steps (rows,) int32 and the rest in [0, 1) (rows,) float32 of
    a row's mileage after the tile, and steps (rows, keys) float32 within the tile."""

    whole: tl.tensor
    rest: tl.tensor
    local: tl.tensor


@triton.jit
def causal_pairs(offs_m, offs_n, N):
    """Return whether (query, key) pairs of a sequence of N see each other, (len(offs_m), len(offs_n))."""
    mask = Mask(num_keys=N, first_key=None, window=Window(left=None, right=0, HIDES_PAIRS=True), READS_LENGTHS=False)
    return visible(mask, offs_m[:, None], offs_n[None, :])


@triton.jit
def steps(q_leader, k, positions_q, positions_k, N, qk_scale, PRECISION: tl.constexpr):
    """z (rows, keys) float32, 0 beyond the diagonal and past the end, and z in fixed point."""
    x = tl.dot(q_leader, tl.trans(k), input_precision=PRECISION)
    z = 1.0 / (1.0 + tl.math.exp2(-x * qk_scale))
    z = tl.where(causal_pairs(positions_q, positions_k, N), z, 0.0)
    return z, (z * ONE + 0.5).to(tl.int32)


@triton.jit
def sum_steps(fixed):
    """Return the sum ``(rows,)`` of a tile's steps (rows, keys), and for each key the sum of those after it, float32.

    Both passes use these, so that with tiles of one size they find the same angles to the last bit.
    """
    total = tl.sum(fixed, 1)
    return total, (total[:, None] - tl.cumsum(fixed, 1)).to(tl.float32) / ONE


@triton.jit
def split_mileage(mileage):
    """int64 fixed point -> whole steps (int32) and the rest in [0, 1)."""
    whole = mileage >> FRACTION_BITS
    return whole.to(tl.int32), (mileage - (whole << FRACTION_BITS)).to(tl.float32) / ONE


@triton.jit
def cosine_sine(revolutions):
    """Return cos and sin of an angle of up to a few dozen revolutions.

    Reduced to |r| <= 1/2 they are within 5e-7: least maximum error fits in r**2 (own fit, float64).
    """
    # Two additions round faster than a conversion to an integer and back.
    r = revolutions - ((revolutions + ROUND) - ROUND)
    u = r * r
    cos = 6.529609897139805 * u - 25.968312914335307
    cos = cos * u + 60.167831622680204
    cos = cos * u - 85.45016553629576
    cos = cos * u + 64.93911898307789
    cos = cos * u - 19.73920453207721
    cos = cos * u + 0.9999999891722234
    sin = 3.1996934822934513 * u - 14.868610852650487
    sin = sin * u + 42.016165777547236
    sin = sin * u - 76.70155116966916
    sin = sin * u + 81.60502462209978
    sin = sin * u - 41.341697068941265
    sin = sin * u + 6.283185272722304
    return cos, sin * r


@triton.jit
def revolutions_per_step(pairs, revolutions_ptr, D: tl.constexpr):
    """The angle of one step at the frequencies of some pairs, in revolutions, float32; 0 from D/2 on."""
    return tl.load(revolutions_ptr + pairs, mask=pairs < D // 2, other=0.0)


@triton.jit
def distance_phases(pairs, distances, frequencies, D: tl.constexpr):
    """cos and sin (rows, pairs, keys) float32 of ``distances`` at the frequencies of some pairs.

    A row's whole steps are reduced to one revolution once a row, by integer multiplication modulo one revolution, so
    that the angle stays exact for any N.
    """
    revolutions_ptr = frequencies.revolutions_ptr
    high = revolutions_per_step(pairs, revolutions_ptr, D)
    low = revolutions_per_step(pairs, revolutions_ptr + D // 2, D)
    multiples = tl.load(frequencies.multiples_ptr + pairs, mask=pairs < D // 2, other=0)
    phase = tl.mul(distances.whole[:, None], multiples[None, :], sanitize_overflow=False)  # modulo 2**32
    phase = phase.to(tl.float32) * 2.3283064365386963e-10  # 2**-32
    phase += distances.whole.to(tl.float32)[:, None] * low[None, :] + distances.rest[:, None] * high[None, :]
    revolutions = phase[:, :, None] + distances.local[:, None, :] * high[None, :, None]
    return cosine_sine(revolutions)
