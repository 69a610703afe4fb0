"""Wrong arguments of `apply_rope` and `apply_rope_qk`. The message names each.

Types, dtypes and shapes are those of ``Forms``, which ``tests/runtime/test_checks.py`` and random calls test; tables
and norms are checked as those of attention.
"""

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors, check_rotation
from tests.support.dtypes import F16, F32


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def rotary_dim_of(xs, cos, sin, *, position_ids=None, cu_seqlens=None, rotary_dim=None, layout="bhsd"):
    """The rotary dim that the check of a right call returns."""
    tensors = RotationTensors(xs, None, cos, sin, position_ids, cu_seqlens)
    return check_rotation(RotationOptions(rotary_dim, False, True, layout), tensors)


WEIGHT = zeros(8)
OUTS = (zeros(2, 3, 4, 8), zeros(2, 1, 4, 8))
ENDS = torch.tensor([0, 4], dtype=torch.int32)
PACKED = {"x": zeros(4, 3, 8), "layout": "thd"}
# fmt: off
OF_ONE = [
    (ValueError, "x", {"x": zeros(2, 3, 4, 1)}, "head dim of at least 2"),
    (ValueError, "cos", {"cos sin": zeros(3, 4)}, "x's 4 positions.*3 rows"),
    (ValueError, "cos", PACKED | {"cu_seqlens": ENDS, "cos sin": zeros(2, 4, 4)}, "leading 1 or B = 1"),
    (ValueError, "cos", {"position_ids": ints(2, 2, 4), "cos sin": zeros(4, 5)}, "D = 4 columns.*5"),
    (ValueError, "rotary_dim", {"rotary_dim": 10}, "between 2 and D = 8.*10"),
    (ValueError, "rotary_dim", {"rotary_dim": 6, "position_ids": ints(2, 2, 4)}, "multiple of 4.*6"),
    (ValueError, "position_ids", {"position_ids": ints(2, 3, 4)}, r"\(B, 2, N\)"),
    (ValueError, "position_ids", {"position_ids": ints(4), "cu_seqlens": ENDS}, "None where cu_seqlens"),
    (ValueError, "cu_seqlens", {"cu_seqlens": ENDS}, "'thd'.*'bhsd'"),
    (ValueError, "cu_seqlens", PACKED, "given.*None"),
    (ValueError, "cu_seqlens", PACKED | {"cu_seqlens": ENDS[:0]}, r"\(0,\)"),
    (ValueError, "cu_seqlens", PACKED | {"cu_seqlens": ints(4)[::2]}, r"\(2,\).*2"),
    (ValueError, "out", {"out": zeros(2, 1, 4, 8).expand(2, 3, 4, 8)}, "expanded"),
    (ValueError, "out", {"x": zeros(2, 3, 4, 8).requires_grad_(), "out": zeros(2, 3, 4, 8)}, "x requires a gradient"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 8).requires_grad_()}, "out requires a gradient"),
]
OF_SEVERAL = [
    (TypeError, "out", {"out": zeros(2, 1, 4, 8)}, "tuple of 2 tensors.*Tensor"),
    (ValueError, "out", {"out": (zeros(2, 3, 4, 8),)}, "2 tensors, for q, k, but holds 1"),
    (ValueError, "q_norm", {"k_norm": WEIGHT}, "given where k_norm is.*None"),
    (ValueError, "k_norm", {"q_norm": WEIGHT}, "given where q_norm is.*None"),
    (ValueError, "out", {"q_norm": WEIGHT, "k_norm": zeros(8).requires_grad_(), "out": OUTS}, "k_norm requires a"),
]
# fmt: on


@pytest.mark.parametrize(
    ("function", "error", "name", "changes", "pattern"),
    [(apply_rope, *row) for row in OF_ONE] + [(apply_rope_qk, *row) for row in OF_SEVERAL],
)
def test_refusals(function, error, name, changes, pattern):
    """Two names with a space mean both arguments."""
    tensors = {"x": zeros(2, 3, 4, 8)} if function is apply_rope else {"q": OUTS[0], "k": OUTS[1]}
    given = tensors | {"cos": zeros(4, 4), "sin": zeros(4, 4)}
    given |= {name: x for names, x in changes.items() for name in names.split()}
    with pytest.raises(error, match=f"^{name} .*{pattern}"):
        function(**given)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "thd"])
def test_each_axis_is_found_in_every_layout(layout):
    """B = 3, H = 7, N = 5 and D = 16: tables of 10 columns hold each angle twice for no other D."""
    x = zeros(*({"b": 3, "h": 7, "s": 5, "t": 5, "d": 16}[axis] for axis in layout))
    ends = torch.tensor([0, 5], dtype=torch.int32) if layout == "thd" else None

    def rotary_dim(*table):
        return rotary_dim_of([x], zeros(*table), zeros(*table), layout=layout, cu_seqlens=ends)

    assert rotary_dim(5, 10) == 10 and rotary_dim(5, 8) == 16
    wrong = {(5, 17): "D = 16"}
    if layout != "thd":
        assert rotary_dim(3, 5, 10) == 10
        wrong |= {(2, 5, 8): "B = 3", (5, 5, 8): "B = 3", (7, 5, 8): "B = 3", (4, 8): "5 positions"}
    for table, pattern in wrong.items():
        with pytest.raises(ValueError, match=f"^cos .*{pattern}"):
            rotary_dim(*table)


def test_axes_of_one_entry_may_be_expanded():
    """Their stride says nothing, nor does that of an axis of none."""
    cos, sin, x, out = zeros(1, 4) + 1, zeros(1, 4), zeros(1, 1, 1, 8) + 1, zeros(1, 8)
    apply_rope(x, cos, sin, out=out.as_strided((1, 1, 1, 8), (0, 0, 0, 1)))
    assert torch.equal(out, x[0, 0])
    assert apply_rope(zeros(0, 3, 1, 8), cos, sin, out=zeros(1, 1, 1, 8).expand(0, 3, 1, 8)).numel() == 0


def test_the_narrowest_rotations():
    """Two ids of a token take a multiple of four columns; tokens with ids need no rows of their own."""
    for head_dim in (2, 3):
        assert rotary_dim_of([zeros(1, 1, 1, head_dim)], zeros(1, 1), zeros(1, 1)) == 2
    for head_dim, rotary_dim in ((16, 12), (16, 4), (8, 8)):
        table, x = zeros(2, rotary_dim // 4), [zeros(1, 1, 3, head_dim)]
        assert rotary_dim_of(x, table, table, rotary_dim=rotary_dim, position_ids=ints(1, 2, 3)) == rotary_dim
    assert rotary_dim_of([zeros(1, 1, 3, 16)], zeros(2, 8), zeros(2, 8), position_ids=ints(1, 3)) == 16
    nothing = [zeros(1, 1, 0, 8)]
    assert rotary_dim_of(nothing, table[:0], table[:0], rotary_dim=4, position_ids=ints(0)) == 4


def test_norms_of_any_dtype_that_fits():
    """Whole numbers are numbers too, and without gradients a leaf may have ``out``."""
    q, k = zeros(1, 2, 4, 8, dtype=F16), zeros(1, 1, 4, 8, dtype=F16)
    outs = torch.empty_like(q), torch.empty_like(k)
    weights = {"q_norm": zeros(8).requires_grad_(), "k_norm": zeros(8, dtype=F16)}
    with torch.no_grad():
        apply_rope_qk(q, k, zeros(4, 4), zeros(4, 4), **weights, norm_eps=0, norm_offset=1, out=outs)
    assert not any(out.any() for out in outs)
