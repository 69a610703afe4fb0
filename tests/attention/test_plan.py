"""`plan` of every function against the kernels that really run, and explicit choices, which run or say why not."""

import math
import os
import subprocess
import sys

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import apply_rope, plan, rope_attention, rope_attention_with_kvcache
from tests.support.dtypes import F32, F64
from tests.support.marks import interpreted
from tests.support.operators import SMALL, Record
from verification.testing import Case, LatentCase, make_inputs, make_latent_inputs


@interpreted
@pytest.mark.parametrize(
    "choice", [{}, {"backend": "triton"}, {"strategy": "inline"}, {"strategy": "prepass", "window": (3, 0)}], ids=str
)
def test_plan_explains_and_launches_nothing(choice):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    with Record() as record:
        chosen = plan(q, k, v, cos, sin, True, **choice)
    assert record.operators == []
    assert isinstance(chosen, package.Plan) and chosen.reason
    if not choice:
        assert chosen.backend == "reference" and chosen.strategy is None and "CPU" in chosen.reason
        return
    assert chosen.backend == "triton" and chosen.backward is not None
    assert chosen.forward.strategy == chosen.strategy == choice.get("strategy", "inline")
    with Record() as record:
        rope_attention(q, k, v, cos, sin, True, **choice)
    assert any("attention_forward" in operator for operator in record.operators)


def calls():
    """Return arguments of a call of every function of attention by its name, (positional, keywords), all tiny."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    rows = make_latent_inputs(LatentCase(1, 2, 7, 7, dtype=F32))[:7]
    ends = torch.tensor([0, 7], dtype=torch.int32)
    lengths = (ends, ends, 7, 7)
    return {
        "rope_attention": ((q, k, v, cos, sin), {}),
        "rope_attention_varlen": ((*(x[0, :, :7].transpose(0, 1) for x in (q, k, v)), cos, sin, *lengths), {}),
        "rope_attention_mla": (rows, {}),
        "rope_attention_mla_varlen": ((*(x[0].transpose(0, 1) for x in rows[:5]), *rows[5:], *lengths), {}),
        "rope_attention_with_kvcache": ((q, k, v, cos, sin), {"cache_seqlens": ends[1:].repeat(2)}),
    }


@interpreted
@pytest.mark.parametrize("name", calls())
def test_one_plan_for_every_function(name):
    """The plan of a call that is known too, and the call after the plan runs."""
    function, (positional, options) = getattr(package, name), calls()[name]
    function(*positional, **options, backend="triton")
    with Record() as record:
        found = plan(function, *positional, **options, backend="triton")
    assert all(x.startswith(("aten.transpose", "aten.unsqueeze")) for x in record.operators)
    assert found.backend == "triton" and found.forward is not None
    own = getattr(package, name.replace("rope_attention", "plan"))
    for planned in (lambda *given, **named: plan(function, *given, **named), own):
        assert planned(*positional, **options, backend="triton") == found
    assert own(*positional, **options).backend == "reference"
    assert isinstance(function(*positional, **options, backend="triton"), torch.Tensor)


def test_a_plan_that_raises_leaves_calls_as_they_are():
    positional, _ = calls()["rope_attention"]
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        plan(*positional, softmax_scale=math.inf)
    assert isinstance(rope_attention(*positional), torch.Tensor)


def test_other_functions_have_no_plan():
    """They do not run either."""
    x, table = torch.ones(1, 1, 4, 8), torch.zeros(4, 4)
    with pytest.raises(TypeError, match="^function must be one of rope_attention, .*, but is apply_rope$"):
        plan(apply_rope, x, table, table, out=x)
    assert bool((x == 1).all())


@interpreted
@pytest.mark.parametrize("choice", [{"backend": "triton"}, {"strategy": "inline"}], ids=str)
@pytest.mark.parametrize("changes", [{"head_dim": n} for n in (8, 20, 264)] + [{"dtype": F64}], ids=str)
def test_explicit_choices_never_fall_back(changes, choice):
    case = Case(**{"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 3, "len_k": 3, "head_dim": 16} | changes)
    given = *make_inputs(case)[:5], True
    pattern = "^q must be float16, bfloat16 or float32 for the Triton kernels, but is torch.float64"
    pattern = pattern if case.dtype is F64 else f"^q .*multiple of 8 from 16 to 256.*{case.head_dim}"
    for function in (rope_attention, plan):
        with pytest.raises(NotImplementedError, match=pattern):
            function(*given, **choice)
    assert rope_attention(*given).shape == given[0].shape and plan(*given).backend == "reference"


def test_backends_that_this_machine_cannot_run():
    for name, (positional, options) in calls().items():
        with pytest.raises((NotImplementedError, RuntimeError), match="hopper"):
            getattr(package, name)(*positional, **options, backend="hopper")
    positional, options = calls()["rope_attention_with_kvcache"]
    with pytest.raises(NotImplementedError, match="^cache_seqlens .*hopper.*portable"):
        rope_attention_with_kvcache(*positional, **options, backend="hopper")


def test_triton_on_cpu_needs_the_interpreter():
    program = """
import torch, fused_rope_attn
x, t = torch.zeros(1, 1, 4, 16), torch.zeros(4, 8)
for choice in ({"backend": "triton"}, {"strategy": "prepass"}):
    for function in (fused_rope_attn.rope_attention, fused_rope_attn.plan):
        try:
            function(x, x, x, t, t, True, **choice)
        except RuntimeError as error:
            assert "TRITON_INTERPRET=1" in str(error) and "cpu" in str(error), error
        else:
            raise SystemExit("it ran")
assert fused_rope_attn.plan(x, x, x, t, t).backend == "reference"
fused_rope_attn.rope_attention(x, x, x, t, t)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
