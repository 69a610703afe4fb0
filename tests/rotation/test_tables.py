"""`rope_tables` and `rope_tables_2d`: every angle that they hold, and their refusals."""

import math

import pytest
import torch

from fused_rope_attn import apply_rope, rope_tables, rope_tables_2d
from tests.support.dtypes import F32
from tests.support.marks import ignore_overflow
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow


def test_rope_tables_2d():
    height, width, dim = 3, 5, 12
    cos, sin = rope_tables_2d(height, width, dim, base=100.0)
    assert cos.shape == sin.shape == (15, 6) and cos.dtype == sin.dtype == F32
    for token in range(15):
        for pair in range(6):
            position = token // width if pair < 3 else token % width
            angle = position * 100.0 ** (-2 * (pair % 3) / (dim / 2))
            assert abs(float(cos[token, pair]) - math.cos(angle)) < 1e-6
            assert abs(float(sin[token, pair]) - math.sin(angle)) < 1e-6
    assert rope_tables_2d(0, 5, 4)[0].shape == (0, 2)
    # Interleaved, it is what two ids for every token give.
    x = normal(1, 2, 15, 12).float()
    line = rope_tables(5, 6, base=100.0)
    ids = torch.stack((torch.arange(15) // width, torch.arange(15) % width))[None]
    two = apply_rope(x, *line, rotary_dim=12, interleaved=True, position_ids=ids)
    assert_close(apply_rope(x, cos, sin, interleaved=True), two.double(), 1e-6)


def test_rope_tables():
    cos, sin = rope_tables(7, 6)
    assert cos.shape == sin.shape == (7, 3) and cos.dtype == sin.dtype == torch.float32
    for position in range(7):
        for i in range(3):
            angle = torch.tensor(position / 10000.0 ** (2 * i / 6), dtype=torch.float64)
            torch.testing.assert_close(cos[position, i], angle.cos().float(), rtol=0, atol=1e-7)
            torch.testing.assert_close(sin[position, i], angle.sin().float(), rtol=0, atol=1e-7)
    far, _ = rope_tables(1, 2, positions=torch.tensor([131071]))
    torch.testing.assert_close(far[0, 0], torch.tensor(131071.0, dtype=torch.float64).cos().float())
    again, _ = rope_tables(7, 6, positions=torch.arange(7), device="cpu")
    assert torch.equal(again, cos)
    slow, _ = rope_tables(7, 6, base=1e6)
    assert not torch.equal(slow, cos)
    assert rope_tables(0, 4)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("error", "name", "arguments", "options"),
    [
        (TypeError, "seq_len", (7.0, 6), {}),
        (TypeError, "rotary_dim", (7, True), {}),
        (ValueError, "seq_len", (-1, 6), {}),
        (ValueError, "rotary_dim", (7, 5), {}),
        (ValueError, "rotary_dim", (7, 0), {}),
        (ValueError, "base", (7, 6), {"base": 0.0}),
        (ValueError, "base", (7, 6), {"base": float("nan")}),
        (ValueError, "positions", (7, 6), {"positions": torch.arange(6)}),
    ],
)
def test_rope_tables_refuses(error, name, arguments, options):
    with pytest.raises(error, match=f"^{name} "):
        rope_tables(*arguments, **options)
