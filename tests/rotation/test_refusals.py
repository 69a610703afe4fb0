"""Wrong arguments of the public functions of the rotation. The message names each."""

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, permute_rope_layout, rope_tables_2d
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors, check_rotation
from tests.support.dtypes import F16, F32


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def rotary_dim_of(
    xs, cos, sin, *, outs=None, position_ids=None, cu_seqlens=None, rotary_dim=None, inverse=False, layout="bhsd"
):
    """The rotary dim that the check of a right call returns."""
    tensors = RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens)
    return check_rotation(RotationOptions(rotary_dim, False, inverse, layout), tensors)


WEIGHT = zeros(8)
OUTS = (zeros(2, 3, 4, 8), zeros(2, 1, 4, 8))
IDS = torch.zeros(4, dtype=torch.int64)
ENDS = torch.tensor([0, 4], dtype=torch.int32)
REFUSALS = [
    (TypeError, "x", {"x": None}, "Tensor.*NoneType"),
    (TypeError, "cos", {"cos": 1.0}, "Tensor.*float"),
    (TypeError, "x", {"x": zeros(2, 3, 4, 8).int()}, "float16, bfloat16 or float32.*int32"),
    (TypeError, "cos", {"cos": zeros(4, 4, dtype=F16)}, "x's dtype float32.*float16"),
    (TypeError, "sin", {"sin": zeros(4, 4, dtype=F16)}, "cos's dtype"),
    (TypeError, "interleaved", {"interleaved": 1}, "bool"),
    (TypeError, "inverse", {"inverse": None}, "bool"),
    (TypeError, "layout", {"layout": None}, "str.*NoneType"),
    (TypeError, "rotary_dim", {"rotary_dim": 8.0}, "int.*float"),
    (TypeError, "position_ids", {"position_ids": [0, 1, 2, 3]}, "Tensor.*list"),
    (TypeError, "position_ids", {"position_ids": IDS.float()}, "int32 or int64.*float32"),
    (TypeError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": [0, 4]}, "Tensor.*list"),
    (TypeError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS.long()}, "int32.*int64"),
    (TypeError, "out", {"out": 0}, "Tensor.*int"),
    (TypeError, "out", {"out": zeros(2, 3, 4, 8, dtype=F16)}, "float32.*float16"),
    (ValueError, "x", {"x": zeros(3, 4, 8)}, r"\(B, H, N, D\).*3 dimensions"),
    (ValueError, "x", {"layout": "thd", "cu_seqlens": ENDS}, r"\(T, H, D\).*4 dimensions"),
    (ValueError, "x", {"x": zeros(2, 3, 4, 1)}, "head dim of at least 2"),
    (ValueError, "layout", {"layout": "hbsd"}, "'bhsd', 'bshd', 'sbhd' or 'thd'.*'hbsd'"),
    (ValueError, "cos", {"cos": zeros(3, 4), "sin": zeros(3, 4)}, "x's 4 positions.*3 rows"),
    (ValueError, "cos", {"cos": zeros(4, 4).requires_grad_()}, "gradient"),
    (ValueError, "cos", {"cos": zeros(3, 4, 4), "sin": zeros(3, 4, 4)}, "leading 1 or B = 2"),
    (ValueError, "cos", {"cos": zeros(4, 9), "sin": zeros(4, 9)}, "D = 8.*9"),
    (ValueError, "cos", {"rotary_dim": 6}, "6 or rotary_dim / 2 = 3 columns.*4"),
    (ValueError, "sin", {"sin": zeros(4, 3)}, "cos's shape"),
    (ValueError, "rotary_dim", {"rotary_dim": 10}, "between 2 and D = 8.*10"),
    (ValueError, "rotary_dim", {"rotary_dim": 6, "position_ids": zeros(2, 2, 4).int()}, "multiple of 4.*6"),
    (ValueError, "position_ids", {"position_ids": IDS[:3]}, r"N = 4.*\(3,\)"),
    (ValueError, "position_ids", {"position_ids": zeros(3, 4).int()}, r"B = 2, but has \(3, 4\)"),
    (ValueError, "position_ids", {"position_ids": zeros(2, 3, 4).int()}, r"\(B, 2, N\)"),
    (ValueError, "position_ids", {"position_ids": IDS, "cu_seqlens": ENDS}, "None where cu_seqlens"),
    (ValueError, "cu_seqlens", {"cu_seqlens": ENDS}, "'thd'.*'bhsd'"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd"}, "given.*None"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS[:0]}, r"\(0,\)"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS[None]}, r"\(1, 2\)"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 6)}, r"D = 8, but has \(2, 3, 4, 6\)"),
    (ValueError, "out", {"out": zeros(2, 1, 4, 8).expand(2, 3, 4, 8)}, "expanded"),
    (ValueError, "out", {"x": zeros(2, 3, 4, 8).requires_grad_(), "out": zeros(2, 3, 4, 8)}, "x requires a gradient"),
    (ValueError, "cos", {"cos": zeros(4, 4).to("meta")}, "x's device cpu.*meta"),
    (ValueError, "sin", {"sin": zeros(4, 4).to("meta")}, "x's device cpu.*meta"),
    (ValueError, "position_ids", {"position_ids": IDS.to("meta")}, "x's device cpu.*meta"),
    (ValueError, "position_ids", {"position_ids": zeros(1, 1, 2, 4).int()}, r"\(1, 1, 2, 4\)"),
    (ValueError, "position_ids", {"position_ids": zeros(3, 2, 4).int()}, r"B = 2, but has \(3, 2, 4\)"),
    (ValueError, "position_ids", {"position_ids": zeros(2, 2, 3).int()}, r"N = 4.*\(2, 2, 3\)"),
    (ValueError, "position_ids", {"position_ids": IDS[0]}, r"N = 4.*\(\)"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS.to("meta")}, "x's device cpu"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": zeros(4).int()[::2]}, r"\(2,\).*2"),
    (ValueError, "position_ids", {"position_ids": zeros(5).int()}, r"N = 4.*\(5,\)"),
    (ValueError, "position_ids", {"position_ids": zeros(1, 1, 4).int()}, r"N = 4.*\(1, 1, 4\)"),
    (ValueError, "position_ids", {"position_ids": zeros(1, 2, 4, 4).int()}, r"N = 4.*\(1, 2, 4, 4\)"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS[0]}, r"sequences\+1,\).*\(\)"),
    (ValueError, "out", {"out": zeros(2, 3, 5, 8)}, r"N = 4, D = 8, but has \(2, 3, 5, 8\)"),
    (ValueError, "out", {"out": zeros(1, 3, 4, 8).expand(2, 3, 4, 8)}, "expanded"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 8).to("meta")}, "x's device cpu.*meta"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 8).requires_grad_()}, "out requires a gradient"),
    (ValueError, "x", {"x": zeros(3, 4, 8), "layout": "bshd"}, r"\(B, N, H, D\).*3 dimensions"),
    (ValueError, "x", {"x": zeros(3, 4, 8), "layout": "sbhd"}, r"\(N, B, H, D\).*3 dimensions"),
    (ValueError, "cos", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS, "cos": zeros(2, 4, 4),
                         "sin": zeros(2, 4, 4)}, "leading 1 or B = 1"),
    (ValueError, "rotary_dim", {"x": zeros(2, 3, 4, 16), "rotary_dim": 10, "position_ids": zeros(2, 2, 4).int()},
     "multiple of 4.*10"),
    (ValueError, "rotary_dim", {"rotary_dim": 12, "position_ids": zeros(2, 2, 4).int()}, "between 2 and D = 8.*12"),
    (ValueError, "cos", {"position_ids": zeros(2, 2, 4).int(), "cos": zeros(4, 5), "sin": zeros(4, 5)},
     "D = 4 columns.*5"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "name", "changes", "pattern"), REFUSALS)
def test_refusals(error, name, changes, pattern):
    arguments = {"x": zeros(2, 3, 4, 8), "cos": zeros(4, 4), "sin": zeros(4, 4)} | changes
    with pytest.raises(error, match=f"^{name} .*{pattern}"):
        apply_rope(**arguments)


@pytest.mark.parametrize(
    ("error", "name", "changes", "pattern"),
    [
        (TypeError, "k", {"k": None}, "Tensor.*NoneType"),
        (TypeError, "k", {"k": zeros(2, 1, 4, 8, dtype=F16)}, "q's dtype float32.*float16"),
        (TypeError, "v", {"v": zeros(2, 1, 4, 8, dtype=F16)}, "q's dtype float32.*float16"),
        (TypeError, "out", {"out": zeros(2, 1, 4, 8)}, "tuple of 2 tensors.*Tensor"),
        (TypeError, r"out\[1\]", {"out": (zeros(2, 3, 4, 8), None)}, "Tensor.*NoneType"),
        (ValueError, "out", {"out": (zeros(2, 3, 4, 8),)}, "2 tensors, for q, k, but holds 1"),
        (ValueError, "k", {"k": zeros(2, 1, 5, 8)}, r"N = 4 of q, but has \(2, 1, 5, 8\)"),
        (ValueError, "k", {"k": zeros(2, 1, 4, 10)}, r"D = 8 of q, but has \(2, 1, 4, 10\)"),
        (ValueError, "v", {"v": zeros(1, 1, 4, 8)}, r"B = 2 of q, but has \(1, 1, 4, 8\)"),
        (ValueError, "k", {"k": zeros(1, 4, 8)}, "3 dimensions"),
        (ValueError, "k", {"k": zeros(2, 1, 4, 8).to("meta")}, "q's device cpu.*meta"),
        (ValueError, "q_norm", {"k_norm": WEIGHT}, "given where k_norm is.*None"),
        (ValueError, "k_norm", {"q_norm": WEIGHT}, "given where q_norm is.*None"),
        (TypeError, "q_norm", {"q_norm": [1.0] * 8, "k_norm": WEIGHT}, "Tensor.*list"),
        (TypeError, "k_norm", {"q_norm": WEIGHT, "k_norm": WEIGHT.half()}, "must be float32, but is float16"),
        (ValueError, "k_norm", {"q_norm": WEIGHT, "k_norm": WEIGHT.to("meta")}, "q's device cpu.*meta"),
        (ValueError, "q_norm", {"q_norm": WEIGHT[:6], "k_norm": WEIGHT}, r"D = 8, but has \(6,\)"),
        (ValueError, "k_norm", {"q_norm": WEIGHT, "k_norm": WEIGHT[None]}, r"D = 8, but has \(1, 8\)"),
        (TypeError, "norm_eps", {"norm_eps": "1e-6"}, "float.*str"),
        (TypeError, "norm_eps", {"norm_eps": True}, "float.*bool"),
        (ValueError, "norm_eps", {"norm_eps": float("nan")}, "finite.*nan"),
        (ValueError, "norm_eps", {"norm_eps": -1e-6}, "at least 0.*-1e-06"),
        (TypeError, "norm_offset", {"norm_offset": None}, "float.*NoneType"),
        (ValueError, "norm_offset", {"norm_offset": float("inf")}, "finite.*inf"),
        (ValueError, "norm_offset", {"norm_offset": -float("inf")}, "finite.*-inf"),
        (ValueError, "out", {"q_norm": WEIGHT, "k_norm": zeros(8).requires_grad_(), "out": OUTS}, "k_norm requires a"),
    ],
)
def test_refusals_of_pairs(error, name, changes, pattern):
    arguments = {"q": zeros(2, 3, 4, 8), "k": zeros(2, 1, 4, 8), "cos": zeros(4, 4), "sin": zeros(4, 4)} | changes
    with pytest.raises(error, match=f"^{name} .*{pattern}"):
        apply_rope_qk(**arguments)


@pytest.mark.parametrize(
    ("layout", "shape", "changes"),
    [
        ("bhsd", (300, 600, 900, 512), {}),
        ("bshd", (300, 900, 600, 512), {}),
        ("sbhd", (900, 300, 600, 512), {}),
        ("sbhd", (900, 300, 600, 512), {"position_ids": (300, 900)}),
        ("bhsd", (300, 600, 900, 512), {"position_ids": (1, 900)}),
        ("sbhd", (900, 300, 600, 512), {"position_ids": (300, 2, 900), "tables": (9, 128)}),
        ("bhsd", (300, 600, 900, 512), {"position_ids": (1, 2, 900), "tables": (9, 128), "rotary_dim": 512}),
        ("bhsd", (300, 600, 900, 512), {"position_ids": (900,), "tables": (9, 256)}),
        ("bhsd", (300, 600, 900, 512), {"tables": (300, 900, 256)}),
        ("thd", (900, 600, 512), {"cu_seqlens": (300,), "tables": (9, 256)}),
        ("thd", (900, 600, 512), {"cu_seqlens": (1,), "tables": (9, 256)}),
        ("thd", (900, 600, 512), {"position_ids": (1, 900), "tables": (9, 256)}),
    ],
)
def test_large_tensors_of_every_layout_pass(layout, shape, changes):
    """Sizes are compared as numbers: none of these is an object that Python keeps only once."""
    given = {
        name: torch.empty(changes[name], dtype=torch.int32, device="meta")
        for name in ("position_ids", "cu_seqlens")
        if name in changes
    }
    table = torch.empty(changes.get("tables", (900, 256)), device="meta")
    x, out = (torch.empty(shape, device="meta") for _ in range(2))
    heads = shape.index(600)
    fewer = x.narrow(heads, 0, 1)
    rotary_dim = changes.get("rotary_dim")
    outs = [out, torch.empty_like(fewer)]
    options = {"rotary_dim": rotary_dim, "inverse": True, "layout": layout}
    assert rotary_dim_of([x, fewer], table, table.clone(), outs=outs, **options, **given) == 512


@pytest.mark.parametrize(
    ("layout", "shape"), [("bhsd", (3, 7, 5, 16)), ("bshd", (3, 5, 7, 16)), ("sbhd", (5, 3, 7, 16))]
)
def test_each_axis_is_found_in_every_layout(layout, shape):
    """B = 3, H = 7, N = 5 and D = 16: tables of 10 columns hold each angle twice for no other D."""

    def rotary_dim(*table):
        return rotary_dim_of([zeros(*shape)], zeros(*table), zeros(*table), layout=layout)

    assert rotary_dim(3, 5, 10) == 10 and rotary_dim(5, 8) == 16
    for table, pattern in (
        ((2, 5, 8), "B = 3"),
        ((5, 5, 8), "B = 3"),
        ((7, 5, 8), "B = 3"),
        ((4, 8), "5 positions"),
        ((5, 17), "D = 16"),
    ):
        with pytest.raises(ValueError, match=f"^cos .*{pattern}"):
            rotary_dim(*table)


def test_packed_tokens_have_their_axes_too():
    x, ends, ids = zeros(5, 7, 16), torch.tensor([0, 5], dtype=torch.int32), torch.arange(5)
    for where in ({"cu_seqlens": ends}, {"position_ids": ids}):
        table = zeros(5, 10)
        assert rotary_dim_of([x], table, table, layout="thd", **where) == 10
        with pytest.raises(ValueError, match="^cos .*D = 16"):
            rotary_dim_of([x], zeros(5, 17), zeros(5, 17), layout="thd", **where)


def test_axes_of_one_entry_may_be_expanded():
    """Their stride says nothing, nor does that of an axis of none."""
    cos, sin = zeros(1, 4) + 1, zeros(1, 4)
    out = zeros(1, 8).as_strided((1, 1, 1, 8), (0, 0, 0, 1))
    x = zeros(1, 1, 1, 8) + 1
    assert torch.equal(apply_rope(x, cos, sin, out=out), x) and torch.equal(out, x)
    none = zeros(1, 1, 1, 8).expand(0, 1, 1, 8)
    assert apply_rope(x[:0], cos, sin, out=none).numel() == 0
    shared = none.expand(0, 3, 1, 8)  # between no elements
    assert apply_rope(zeros(0, 3, 1, 8), cos, sin, out=shared).shape == (0, 3, 1, 8)


def test_two_ids_of_every_token_take_a_multiple_of_four_columns():
    for head_dim, rotary_dim in ((16, 12), (16, 4), (8, 8)):
        table, ids = zeros(9, rotary_dim // 4), torch.zeros(1, 2, 3, dtype=torch.int32)
        x = [zeros(1, 1, 3, head_dim)]
        assert rotary_dim_of(x, table, table, rotary_dim=rotary_dim, position_ids=ids) == rotary_dim
    # Tokens with ids need no rows of their own.
    nothing = [zeros(1, 1, 0, 8)]
    assert rotary_dim_of(nothing, table[:0], table[:0], rotary_dim=4, position_ids=ids[0, 0, :0]) == 4


@pytest.mark.parametrize("head_dim", [2, 3])
def test_the_narrowest_heads(head_dim):
    x, table = zeros(1, 1, 1, head_dim), zeros(1, 1)
    assert rotary_dim_of([x], table, table) == 2


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (TypeError, "height", lambda: rope_tables_2d(3.0, 5, 4)),
        (ValueError, "width", lambda: rope_tables_2d(3, -1, 4)),
        (ValueError, "rotary_dim", lambda: rope_tables_2d(3, 5, 6)),
        (ValueError, "base must be finite and positive, but is -1.0", lambda: rope_tables_2d(3, 5, 4, base=-1.0)),
        (ValueError, "base must be finite and positive, but is inf", lambda: RotaryEmbedding(4, base=float("inf"))),
        (TypeError, "base must be a float, but is str '1e4'", lambda: RotaryEmbedding(32, base="1e4")),
        (TypeError, "base must be a float, but is bool True", lambda: rope_tables_2d(3, 5, 4, base=True)),
        (ValueError, "rotary_dim", lambda: RotaryEmbedding(7)),
        (TypeError, "max_seq_len", lambda: RotaryEmbedding(8, "many")),
        (TypeError, "interleaved", lambda: RotaryEmbedding(8, interleaved=1)),
        (TypeError, "seq_len", lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 4, 8), seq_len=4.0)),
        (ValueError, "layout", lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 4, 8), layout="hbsd")),
        (TypeError, "x", lambda: RotaryEmbedding(8)([1.0])),
        (TypeError, "x", lambda: permute_rope_layout([1.0])),
        (TypeError, "head_dim", lambda: permute_rope_layout(torch.zeros(8), 4.0)),
        (ValueError, "head_dim", lambda: permute_rope_layout(torch.zeros(8), 3)),
        (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=6)),
        (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=3)),
        (ValueError, "dim", lambda: permute_rope_layout(torch.zeros(8), dim=1)),
    ],
)
def test_tables_module_and_layouts_refuse(error, name, call):
    with pytest.raises(error, match=f"^{name}( |$)"):
        call()


@pytest.mark.parametrize("eps", [0, 0.0, 1e-5])
def test_norms_of_any_dtype_that_fits(eps):
    """Whole numbers are numbers too, and there is no gradient to ask for."""
    q, k = zeros(1, 2, 4, 8, dtype=F16), zeros(1, 1, 4, 8, dtype=F16)
    outs = torch.empty_like(q), torch.empty_like(k)
    weights = {"q_norm": zeros(8).requires_grad_(), "k_norm": zeros(8, dtype=F16)}
    with torch.no_grad():
        apply_rope_qk(q, k, zeros(4, 4), zeros(4, 4), **weights, norm_eps=eps, norm_offset=1, out=outs)
    assert not any(out.any() for out in outs)
