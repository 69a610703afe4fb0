"""`reference.rotate`, by which everything else is defined: a complex product, its transpose, its rounding."""

import pytest
import torch

from fused_rope_attn import apply_rope, rope_tables
from fused_rope_attn.rotation import reference
from tests.support.loop_attention import complex_rotation, normal, tables


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotate_is_a_complex_product(rotary_dim, interleaved):
    x = normal(2, 3, 5, 8)
    cos, sin = tables(5, rotary_dim, unit=False)
    out = reference.rotate(x, cos, sin, interleaved=interleaved)
    for b in range(2):
        for h in range(3):
            for n in range(5):
                expected = complex_rotation(x[b, h, n], cos[n], sin[n], interleaved)
                torch.testing.assert_close(out[b, h, n], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_rotation_is_the_transpose(interleaved):
    x, y = normal(4, 8, seed=1), normal(4, 8, seed=2)
    cos, sin = tables(4, 6, unit=False)
    forward = reference.rotate(x, cos, sin, interleaved=interleaved)
    backward = reference.rotate(y, cos, sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum())
    unit_cos, unit_sin = tables(4, 6)
    there = reference.rotate(x, unit_cos, unit_sin, interleaved=interleaved)
    back = reference.rotate(there, unit_cos, unit_sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
def test_rotation_is_rounded_once(table_dtype):
    x = normal(64, 32, dtype=torch.float16)
    cos, sin = (t.to(table_dtype) for t in tables(64, 32))
    wide = reference.rotate(x.double(), cos.double(), sin.double())
    error = (reference.rotate(x, cos, sin).double() - wide).abs()
    # Half a unit in the last place, and float32's own error where the two products cancel.
    assert bool((error <= wide.abs() * 2**-11 + 2**-20).all())
    assert reference.rotate(x, cos, sin).dtype == torch.float16


def test_rotate_is_float64_where_a_table_is():
    x = normal(4, 8, dtype=torch.float32)
    cos, sin = tables(4, 8)
    torch.testing.assert_close(
        reference.rotate(x, cos, sin), reference.rotate(x.double(), cos, sin).float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_normalise_tables_gives_views(interleaved):
    half, _ = tables(9, 6)
    full = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
    for given in (half, full, half[None], full[None], full.expand(3, 9, 6)):
        cos, sin = reference.normalise_tables(given, given, 6, interleaved)
        assert cos.shape == sin.shape == (given.shape[0] if given.ndim == 3 else 1, 9, 3)
        assert torch.equal(cos, half.expand_as(cos))
        assert cos.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        again, _ = reference.normalise_tables(cos, sin, 6, interleaved)
        assert torch.equal(again, cos)


def test_the_rotation_is_the_reference_of_attention_too():
    """`reference.rotation` without positions is `reference.rotate`, by which the attention is defined."""
    x, (cos, sin) = normal(2, 3, 9, 16), rope_tables(9, 12)
    assert torch.equal(reference.rotation(x, cos, sin, rotary_dim=12), reference.rotate(x, cos, sin))


@pytest.mark.parametrize("batch, batch_of_tables", [(0, 0), (0, 1), (2, 2)])
def test_positions_of_a_batch_with_tables_of_its_own(batch, batch_of_tables):
    """An empty batch has tables without an entry."""
    x, ids = torch.randn(batch, 3, 5, 8), torch.randint(0, 7, (batch, 5))
    cos, sin = torch.randn(batch_of_tables, 7, 4), torch.randn(batch_of_tables, 7, 4)
    rotated = apply_rope(x, cos, sin, position_ids=ids)
    assert rotated.shape == x.shape
    for b in range(batch):
        assert torch.equal(rotated[b], apply_rope(x[b : b + 1], cos[b][ids[b]], sin[b][ids[b]])[0])
