"""The rotation's configurations, and the tile shapes that its launcher makes of them."""

from fused_rope_attn.attention.configs import ARCHS
from fused_rope_attn.rotation.ops import TABLE, RotationConfig, tile_shape
from fused_rope_attn.runtime.rows import find_row
from tests.support.marks import interpreted


def choose(arch, size, norms=False):
    return find_row(TABLE, arch=arch, most_bytes=size, norms=norms)


@interpreted
def test_the_configurations_serve_every_architecture():
    for arch in (*ARCHS, "interpreter", "sm_75"):
        small, normed, large = TABLE[:1] * 3 if arch == "interpreter" else TABLE[1:]
        for size in (0, 1 << 10, 4 << 20):
            assert choose(arch, size) == choose(arch, size, True) == small
        for size in ((4 << 20) + 1, 1 << 34):
            assert choose(arch, size) == large and choose(arch, size, True) == normed
    config = RotationConfig(1 << 14, 1 << 12, 4)
    assert tile_shape(config, 256, 96, heads_inner=True) == (4, 16)
    assert tile_shape(config, 256, 96, heads_inner=False) == (16, 4)
    assert tile_shape(config, 256, 3, heads_inner=True) == (16, 4)
    assert tile_shape(config, 256, 1, heads_inner=False) == (64, 1)
    assert tile_shape(config, 1 << 16, 8, heads_inner=True) == (1, 1)
