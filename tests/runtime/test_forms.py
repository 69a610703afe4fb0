"""The checker of tensors, asked directly."""

import pytest
import torch

from fused_rope_attn.runtime.forms import Form, Forms

F16, F32 = torch.float16, torch.float32
TABLE = Forms(q="B HQ NQ D", k="B 1 NK D", v="B HKV NK D")


def tensors(layout="bhsd", **options):
    """q (2, 4, 5, 8), k (2, 1, 7, 8) and v (2, 3, 7, 8) in a layout."""
    shapes = ((2, 4, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8))
    orders = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 1, 3)}
    return tuple(torch.zeros([shape[i] for i in orders[layout]], **options) for shape in shapes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "thd"])
def test_sizes_are_returned_in_the_order_of_the_table(layout):
    given = tensors(layout)
    batch = 1 if layout == "thd" else 2
    assert TABLE.check(layout, given) == (batch, 4, 5, 8, 7, 3)
    assert TABLE.check(layout, given[:1]) == (batch, 4, 5, 8)
    parameters = tuple(map(torch.nn.Parameter, given))
    assert TABLE.check(layout, parameters) == (batch, 4, 5, 8, 7, 3)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_each_size_is_compared(index, axis):
    given = list(tensors())
    given[index] = torch.cat((given[index], given[index]), axis)
    if (index, axis) in ((0, 1), (0, 2), (2, 1)):  # HQ, NQ and HKV are sizes of one tensor
        assert len(TABLE.check("bhsd", tuple(given))) == 6
        return
    with pytest.raises(ValueError, match=r"^[qkv] must have shape \(B, .*, but has \("):
        TABLE.check("bhsd", tuple(given))


def test_axes_do_not_move_from_one_tensor_to_the_next():
    """Twelve sizes that are equal, but not four a tensor."""
    x = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match=r"^q must have shape \(B, HQ, NQ, D\), but has 3 dimensions: \(1, 1, 1\)$"):
        TABLE.check("bhsd", (x, x[None, None], x[None]))


@pytest.mark.parametrize(
    ("index", "change", "error", "message"),
    [
        (0, lambda x: None, TypeError, "q must be a torch.Tensor, but is NoneType"),
        (2, lambda x: [1.0], TypeError, "v must be a torch.Tensor, but is list"),
        (0, lambda x: x.int(), TypeError, "q must be float16, bfloat16 or float32, but is int32"),
        (1, lambda x: x.half(), TypeError, "k must have q's dtype float32, but is float16"),
        (2, lambda x: x.to("meta"), ValueError, "v must be on q's device cpu, but is on meta"),
        (1, lambda x: x.to_sparse(), TypeError, "k must be a dense tensor"),
        (2, lambda x: torch.nested.nested_tensor([x[0], x[1]]), NotImplementedError, "v must not be a nested tensor"),
        (1, lambda x: x[..., 0], ValueError, "k must have shape (B, 1, NK, D), but has 3 dimensions: (2, 1, 7)"),
    ],
)
def test_other_faults(index, change, error, message):
    given = list(tensors())
    given[index] = change(given[index])
    with pytest.raises(error) as caught:
        TABLE.check("bhsd", tuple(given))
    assert str(caught.value).startswith(message)


def test_a_table_may_allow_a_second_dtype():
    table = Forms({"k": F16}, q="B HQ NQ D", k="B 1 NK D")
    q, k, _ = tensors()
    assert table.check("bhsd", (q, k.half())) == table.check("bhsd", (q, k)) == (2, 4, 5, 8, 7)
    with pytest.raises(TypeError, match="^k must have q's dtype float32 or float16, but is float64$"):
        table.check("bhsd", (q, k.double()))


def test_forms_of_one_tensor():
    q, form = tensors()[0], Form("N | B 2 N", F16, None)
    for shape in ((5,), (3, 2, 5)):
        for dtype in (F16, F32):
            form.check("x", torch.zeros(shape, dtype=dtype), "q", q, {"B": 3, "N": 5})
        form.check("x", torch.zeros(shape), "q", q, {})  # any sizes
    for x, error, message in (
        (torch.zeros(4), ValueError, "x must have shape (N,) or (B, 2, N) with N = 5, B = 3, but has (4,)"),
        (torch.zeros(3, 1, 5), ValueError, "x must have shape (N,) or (B, 2, N) with N = 5, B = 3, but has (3, 1, 5)"),
        (torch.zeros(5).double(), TypeError, "x must be float16 or float32, but is float64"),
        (torch.zeros(5, device="meta"), ValueError, "x must be on q's device cpu, but is on meta"),
        ([0.0], TypeError, "x must be a torch.Tensor, but is list"),
    ):
        with pytest.raises(error) as caught:
            form.check("x", x, "q", q, {"B": 3, "N": 5})
        assert str(caught.value) == message
