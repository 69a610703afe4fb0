"""Wrong arguments of `apply_rope` and `apply_rope_qk`. The message names each.

Types, dtypes and shapes are those of ``Forms``, which ``tests/runtime/test_checks.py`` and random calls test; tables
and norms are checked as those of attention. Random calls have every width of tables in every layout.
"""

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk
from tests.support.dtypes import F16, F32


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


WEIGHT = zeros(8)
OUTS = (zeros(2, 3, 4, 8), zeros(2, 1, 4, 8))
ENDS = torch.tensor([0, 4], dtype=torch.int32)
PACKED = {"x": zeros(4, 3, 8), "layout": "thd"}
OF_ONE = [
    (ValueError, "x", {"x": zeros(2, 3, 4, 1)}, "head dim of at least 2"),
    (ValueError, "cos", {"cos sin": zeros(3, 4)}, "x's 4 positions.*3 rows"),
    (ValueError, "cos", PACKED | {"cu_seqlens": ENDS, "cos sin": zeros(2, 4, 4)}, "leading 1 or B = 1"),
    (ValueError, "cos", {"position_ids": ints(2, 2, 4), "cos sin": zeros(4, 5)}, "D = 4 columns.*5"),
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
]  # fmt: skip
OF_SEVERAL = [
    (TypeError, "out", {"out": zeros(2, 1, 4, 8)}, "tuple of 2 tensors.*Tensor"),
    (ValueError, "out", {"out": (zeros(2, 3, 4, 8),)}, "2 tensors, for q, k, but holds 1"),
    (ValueError, "q_norm", {"k_norm": WEIGHT}, "given where k_norm is.*None"),
    (ValueError, "k_norm", {"q_norm": WEIGHT}, "given where q_norm is.*None"),
    (ValueError, "out", {"q_norm": WEIGHT, "k_norm": zeros(8).requires_grad_(), "out": OUTS}, "k_norm requires a"),
]  # fmt: skip


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


def test_axes_of_one_entry_may_be_expanded():
    """Their stride says nothing, nor does that of an axis of none."""
    cos, sin, x, out = zeros(1, 4) + 1, zeros(1, 4), zeros(1, 1, 1, 8) + 1, zeros(1, 8)
    apply_rope(x, cos, sin, out=out.as_strided((1, 1, 1, 8), (0, 0, 0, 1)))
    assert torch.equal(out, x[0, 0])
    assert apply_rope(zeros(0, 3, 1, 8), cos, sin, out=zeros(1, 1, 1, 8).expand(0, 3, 1, 8)).numel() == 0


def test_norms_of_any_dtype_that_fits():
    q, k = zeros(1, 2, 4, 8, dtype=F16), zeros(1, 1, 4, 8, dtype=F16)
    outs = torch.empty_like(q), torch.empty_like(k)
    weights = {"q_norm": zeros(8).requires_grad_(), "k_norm": zeros(8, dtype=F16)}
    with torch.no_grad():
        apply_rope_qk(q, k, zeros(4, 4), zeros(4, 4), **weights, norm_eps=0, norm_offset=1, out=outs)
    assert not any(out.any() for out in outs)
