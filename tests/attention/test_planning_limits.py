"""The limits of the sm_90 backend: an explicit choice names them, and "auto" gives them as its reason."""

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from fused_rope_attn.attention import planning
from tests.support.dtypes import BF16, F32
from tests.support.internals import backend_of, plan_of
from tests.support.planning import HOPPER, call, kinds


def odd_strides(x):
    return torch.empty(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device=x.device)[..., :-1]


def columns_apart(x):
    return torch.empty(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype, device=x.device)[..., ::2]


def expanded(x):
    return torch.empty(1, *x.shape[1:], dtype=x.dtype, device=x.device).expand(x.shape)


def refusals():
    """(what is changed, error, pattern): what the sm_90 kernels do not serve, and the portable ones do."""
    return [
        ({"dtype": F32}, NotImplementedError, "^q must be float16 or bfloat16 for backend='hopper', but is .*float32"),
        ({"head_dim": 264}, NotImplementedError, "^q must have a head dim .* from 16 to .*hopper.* but has 264"),
        ({"strategy": "inline"}, NotImplementedError, "^strategy must be .*'prepass' .*hopper.* but is 'inline'"),
        ({"len_k": 0}, NotImplementedError, "^k must have at least one position .*hopper.* but has 0"),
    ]


@pytest.mark.parametrize(("changes", "error", "pattern"), refusals(), ids=lambda x: str(x)[:30])
def test_refusals(arch, changes, error, pattern):
    given = call(**changes)
    for function in (plan, rope_attention):
        with pytest.raises(error, match=pattern):
            function(**given, backend="hopper")
    chosen = plan(**given)  # "auto" takes something else and says why
    assert chosen.backend in ("triton", "reference")
    assert ("hopper" in chosen.reason and "but" in chosen.reason) or chosen.backend == "reference"


def test_refusals_of_what_no_kernel_serves(arch):
    for changes, pattern in (({"head_dim": 20}, "multiple of 8 .*20"), ({"dtype": torch.float64}, "float64")):
        with pytest.raises(NotImplementedError, match=f"^q .*{pattern}"):
            plan(**call(**changes), backend="hopper")
        assert plan(**call(**changes)).backend == "reference"


def test_the_portable_kernels_dtypes_are_listed(arch):
    with pytest.raises(NotImplementedError, match="^q must be float16, bfloat16 or float32 for the Triton kernels, "):
        plan(**call(dtype=torch.float64), backend="triton")


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("sequences", [None, 1])
def test_nothing_stands_in_the_way_of_a_plain_call(sequences, head_dim):
    assert planning.obstacle("hopper", planning.Problem(BF16, head_dim, sequences=sequences), "sm_90") is None


def test_what_needs_no_addresses_is_refused_at_once(arch):
    """Before the operator, which a traced graph runs much later."""
    with pytest.raises(NotImplementedError, match="^k must have at least one position"):
        backend_of(call(len_k=0), backend="hopper")
    with pytest.raises(NotImplementedError, match="^k must have at least one position"):
        plan_of(call(len_k=0, backend="hopper"))  # a call of the operator itself
    assert backend_of(call(len_k=1), backend="hopper") == ("hopper", "")
    assert backend_of(call(len_k=0), backend="auto") == ("auto", "")


@pytest.mark.parametrize("name", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "cpu", "interpreter"])
def test_other_machines(arch, name):
    arch(name)
    given = call()
    for function in (plan, rope_attention):
        with pytest.raises(RuntimeError, match=f"^backend='hopper' needs an sm_90 GPU .* but q is on {name}"):
            function(**given, backend="hopper")
    if name != "cpu":
        chosen = plan(**given)
        assert chosen.backend == "triton" and "sm_90" in chosen.reason and name in chosen.reason


@pytest.mark.parametrize("layout", [odd_strides, columns_apart, expanded])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_layouts_do_not_change_the_plan(arch, name, layout):
    """Rows that kernels cannot read are copied before the call."""
    given = call(batch=2)
    expected = plan(**given, backend="hopper")
    given[name] = layout(given[name])
    assert plan(**given, backend="hopper") == expected


def test_a_size_of_one_has_no_stride(arch):
    given = call(batch=1, heads=(1, 1))
    v = given["v"]
    given["v"] = torch.empty_strided(v.shape, (3, 5, v.stride(2), 1), dtype=BF16, device="meta")
    assert kinds(plan(**given, backend="hopper")) == HOPPER


def test_plan_under_autocast_goes_by_the_dtype_that_kernels_get(arch):
    given = call(200, where="cpu", dtype=F32, batch=2, backend="hopper")
    with torch.autocast("cpu", BF16):
        assert kinds(plan(**given)) == HOPPER
    with pytest.raises(NotImplementedError, match="^q must be float16 or bfloat16"):
        plan(**given)
