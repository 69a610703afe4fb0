"""Wrong arguments of the public functions of the rotation. The message names each.

Types, dtypes and shapes are those of ``Forms``, which ``tests/runtime/test_checks.py`` and random calls test.
"""

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, permute_rope_layout, rope_tables, rope_tables_2d
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors, check_rotation
from tests.support.dtypes import F16, F32


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def rotary_dim_of(xs, cos, sin, *, outs=None, position_ids=None, cu_seqlens=None, rotary_dim=None, layout="bhsd"):
    """The rotary dim that the check of a right call returns."""
    tensors = RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens)
    return check_rotation(RotationOptions(rotary_dim, False, True, layout), tensors)


WEIGHT = zeros(8)
OUTS = (zeros(2, 3, 4, 8), zeros(2, 1, 4, 8))
ENDS = torch.tensor([0, 4], dtype=torch.int32)
PACKED = {"x": zeros(4, 3, 8), "layout": "thd"}
# fmt: off
OF_ONE = [
    (TypeError, "cos", {"cos": zeros(4, 4, dtype=F16)}, "x's dtype float32.*float16"),
    (TypeError, "sin", {"sin": zeros(4, 4, dtype=F16)}, "cos's dtype"),
    (TypeError, "interleaved", {"interleaved": 1}, "bool"),
    (TypeError, "inverse", {"inverse": None}, "bool"),
    (ValueError, "x", {"x": zeros(3, 4, 8), "layout": "bshd"}, r"\(B, N, H, D\).*3 dimensions"),
    (ValueError, "x", {"layout": "thd", "cu_seqlens": ENDS}, r"\(T, H, D\).*4 dimensions"),
    (ValueError, "x", {"x": zeros(2, 3, 4, 1)}, "head dim of at least 2"),
    (ValueError, "layout", {"layout": "hbsd"}, "'bhsd', 'bshd', 'sbhd' or 'thd'.*'hbsd'"),
    (ValueError, "cos", {"cos sin": zeros(3, 4)}, "x's 4 positions.*3 rows"),
    (ValueError, "cos", {"cos": zeros(4, 4).requires_grad_()}, "gradient"),
    (ValueError, "cos", {"cos sin": zeros(3, 4, 4)}, "leading 1 or B = 2"),
    (ValueError, "cos", PACKED | {"cu_seqlens": ENDS, "cos sin": zeros(2, 4, 4)}, "leading 1 or B = 1"),
    (ValueError, "cos", {"cos sin": zeros(4, 9)}, "D = 8.*9"),
    (ValueError, "cos", {"position_ids": ints(2, 2, 4), "cos sin": zeros(4, 5)}, "D = 4 columns.*5"),
    (ValueError, "cos", {"rotary_dim": 6}, "6 or rotary_dim / 2 = 3 columns.*4"),
    (ValueError, "cos", {"cos": zeros(4, 4).to("meta")}, "x's device cpu.*meta"),
    (ValueError, "sin", {"sin": zeros(4, 3)}, "cos's shape"),
    (ValueError, "rotary_dim", {"rotary_dim": 10}, "between 2 and D = 8.*10"),
    (ValueError, "rotary_dim", {"rotary_dim": 6, "position_ids": ints(2, 2, 4)}, "multiple of 4.*6"),
    (ValueError, "position_ids", {"position_ids": ints(2, 3, 4)}, r"\(B, 2, N\)"),
    (ValueError, "position_ids", {"position_ids": ints(2, 2, 3)}, r"N = 4.*\(2, 2, 3\)"),
    (ValueError, "position_ids", {"position_ids": ints(4), "cu_seqlens": ENDS}, "None where cu_seqlens"),
    (ValueError, "cu_seqlens", {"cu_seqlens": ENDS}, "'thd'.*'bhsd'"),
    (ValueError, "cu_seqlens", PACKED, "given.*None"),
    (ValueError, "cu_seqlens", PACKED | {"cu_seqlens": ENDS[:0]}, r"\(0,\)"),
    (ValueError, "cu_seqlens", PACKED | {"cu_seqlens": ENDS[None]}, r"\(1, 2\)"),
    (ValueError, "cu_seqlens", PACKED | {"cu_seqlens": ints(4)[::2]}, r"\(2,\).*2"),
    (ValueError, "out", {"out": zeros(2, 1, 4, 8).expand(2, 3, 4, 8)}, "expanded"),
    (ValueError, "out", {"x": zeros(2, 3, 4, 8).requires_grad_(), "out": zeros(2, 3, 4, 8)}, "x requires a gradient"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 8).requires_grad_()}, "out requires a gradient"),
]
OF_SEVERAL = [
    (TypeError, "out", {"out": zeros(2, 1, 4, 8)}, "tuple of 2 tensors.*Tensor"),
    (ValueError, "out", {"out": (zeros(2, 3, 4, 8),)}, "2 tensors, for q, k, but holds 1"),
    (ValueError, "k", {"k": zeros(2, 1, 4, 10)}, r"D = 8 of q, but has \(2, 1, 4, 10\)"),
    (ValueError, "q_norm", {"k_norm": WEIGHT}, "given where k_norm is.*None"),
    (ValueError, "k_norm", {"q_norm": WEIGHT}, "given where q_norm is.*None"),
    (ValueError, "q_norm", {"q_norm": WEIGHT[:6], "k_norm": WEIGHT}, r"D = 8, but has \(6,\)"),
    (ValueError, "norm_eps", {"norm_eps": float("nan")}, "finite.*nan"),
    (ValueError, "norm_eps", {"norm_eps": -1e-6}, "at least 0.*-1e-06"),
    (ValueError, "norm_offset", {"norm_offset": -float("inf")}, "finite.*-inf"),
    (ValueError, "out", {"q_norm": WEIGHT, "k_norm": zeros(8).requires_grad_(), "out": OUTS}, "k_norm requires a"),
]
OTHERS = [
    (ValueError, "seq_len must be at least 0, but is -1", lambda: rope_tables(-1, 6)),
    (ValueError, "rotary_dim must be even and positive, but is 5", lambda: rope_tables(7, 5)),
    (ValueError, "rotary_dim must be even and positive, but is 0", lambda: rope_tables(7, 0)),
    (ValueError, r"positions must have shape \(7,\), but has \(6,\)", lambda: rope_tables(7, 6, positions=ints(6))),
    (ValueError, "width must be at least 0, but is -1", lambda: rope_tables_2d(3, -1, 4)),
    (ValueError, "rotary_dim must be a multiple of 4 and positive, but is 6", lambda: rope_tables_2d(3, 5, 6)),
    (ValueError, "base must be finite and positive, but is -1.0", lambda: rope_tables_2d(3, 5, 4, base=-1.0)),
    (TypeError, "base must be a float, but is str '1e4'", lambda: RotaryEmbedding(32, base="1e4")),
    (ValueError, "rotary_dim must be even and positive, but is 7", lambda: RotaryEmbedding(7)),
    (TypeError, "interleaved must be a bool, but is int", lambda: RotaryEmbedding(8, interleaved=1)),
    (TypeError, "seq_len must be an int", lambda: RotaryEmbedding(8)(zeros(1, 1, 4, 8), seq_len=4.0)),
    (TypeError, "x must be a torch.Tensor", lambda: permute_rope_layout([1.0])),
    (ValueError, "head_dim", lambda: permute_rope_layout(zeros(8), 3)),
    (ValueError, "rotary_dim", lambda: permute_rope_layout(zeros(8), 4, rotary_dim=6)),
    (ValueError, "rotary_dim", lambda: permute_rope_layout(zeros(8), 4, rotary_dim=3)),
    (ValueError, "dim", lambda: permute_rope_layout(zeros(8), dim=1)),
]
LARGE = [  # layout, and shapes
    ("sbhd", (900, 300, 600, 512), {"position_ids": (300, 900)}),
    ("bhsd", (300, 600, 900, 512), {"position_ids": (1, 900)}),
    ("sbhd", (900, 300, 600, 512), {"position_ids": (300, 2, 900), "tables": (9, 128)}),
    ("bhsd", (300, 600, 900, 512), {"position_ids": (1, 2, 900), "tables": (9, 128), "rotary_dim": 512}),
    ("bhsd", (300, 600, 900, 512), {"tables": (300, 900, 256)}),
    ("thd", (900, 600, 512), {"cu_seqlens": (300,), "tables": (9, 256)}),
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


@pytest.mark.parametrize(("error", "message", "call"), OTHERS)
def test_tables_module_and_layouts_refuse(error, message, call):
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize(("layout", "shape", "shapes"), LARGE)
def test_large_tensors_of_every_layout_pass(layout, shape, shapes):
    """Sizes are compared as numbers: none of these is an object that Python keeps only once."""
    names = {"position_ids", "cu_seqlens"} & {*shapes}
    given = {name: torch.empty(shapes[name], dtype=torch.int32, device="meta") for name in names}
    table = torch.empty(shapes.get("tables", (900, 256)), device="meta")
    x, out = (torch.empty(shape, device="meta") for _ in range(2))
    fewer = x.narrow(shape.index(600), 0, 1)
    options = {"rotary_dim": shapes.get("rotary_dim"), "layout": layout, "outs": [out, torch.empty_like(fewer)]}
    assert rotary_dim_of([x, fewer], table, table.clone(), **options, **given) == 512


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
        table, x = zeros(9, rotary_dim // 4), [zeros(1, 1, 3, head_dim)]
        assert rotary_dim_of(x, table, table, rotary_dim=rotary_dim, position_ids=ints(1, 2, 3)) == rotary_dim
    nothing = [zeros(1, 1, 0, 8)]
    assert rotary_dim_of(nothing, table[:0], table[:0], rotary_dim=4, position_ids=ints(0)) == 4


@pytest.mark.parametrize("eps", [0, 0.0, 1e-5])
def test_norms_of_any_dtype_that_fits(eps):
    """Whole numbers are numbers too, and without gradients a leaf may have ``out``."""
    q, k = zeros(1, 2, 4, 8, dtype=F16), zeros(1, 1, 4, 8, dtype=F16)
    outs = torch.empty_like(q), torch.empty_like(k)
    weights = {"q_norm": zeros(8).requires_grad_(), "k_norm": zeros(8, dtype=F16)}
    with torch.no_grad():
        apply_rope_qk(q, k, zeros(4, 4), zeros(4, 4), **weights, norm_eps=eps, norm_offset=1, out=outs)
    assert not any(out.any() for out in outs)
