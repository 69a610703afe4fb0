"""Unknown keywords raise a TypeError that names the closest arguments of the function, or all of them."""

import inspect
import pickle

import pytest
import torch

import fused_rope_attn as package
from tests.support.operators import SMALL
from verification.testing import make_inputs

# Every public function that explains its keywords.
FUNCTIONS = (
    "rope_attention",
    "rope_attention_varlen",
    "rope_attention_with_kvcache",
    "apply_rope",
    "apply_rope_qk",
)


def arguments(name):
    """Valid positional arguments and keywords of a public function, all of them tiny."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    ends = torch.tensor([0, 7], dtype=torch.int32)
    if "varlen" in name:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k[:, :, :7], v[:, :, :7]))
        return (q, k, v, cos, sin, ends, ends, 7, 7), {}
    if "kvcache" in name:
        return (q, k, v, cos, sin), {"cache_seqlens": ends[1:].repeat(2)}
    return {"apply_rope": (q, cos, sin), "apply_rope_qk": (q, k[:, :, :7], cos, sin)}.get(name, (q, k, v, cos, sin)), {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_keywords_are_explained(name):
    function = getattr(package, name)
    positional, options = arguments(name)
    own = tuple(inspect.signature(function).parameters)
    function(*positional, **options)
    for keyword, hint in (
        ("interleave", "did you mean interleaved?"),
        ("rotary_dims", "did you mean rotary_dim?"),
        ("zzz", f"the arguments are {', '.join(own)}"),
    ):
        with pytest.raises(TypeError) as caught:
            function(*positional, **options, **{keyword: None})
        assert str(caught.value) == f"{name}() does not take {keyword!r} ({hint})"
        assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_plan_is_told_what_the_function_is():
    positional, _ = arguments("rope_attention")
    for call in (package.plan, lambda *given, **options: package.plan(package.rope_attention, *given, **options)):
        with pytest.raises(TypeError, match=r"^rope_attention\(\) does not take 'casual' \(did you mean causal\?\)$"):
            call(*positional, casual=True)


@pytest.mark.parametrize(
    ("keyword", "near"),
    [
        ("kv_len", "kv_lens"),
        ("casual", "causal"),
        ("return_lsd", "return_lse or return_max_logit"),
        # Words of other libraries.
        ("is_causal", "causal"),
        ("scale", "softmax_scale"),
        ("sm_scale", "softmax_scale"),
        ("window_size", "window"),
        ("sliding_window", "window"),
        ("logits_soft_cap", "softcap"),
        ("return_softmax_lse", "return_lse or return_max_logit"),
        ("rotary_interleaved", "interleaved"),
    ],
)
def test_close_keywords_are_recognised(keyword, near):
    positional, _ = arguments("rope_attention")
    with pytest.raises(TypeError, match=rf"^rope_attention\(\) does not take '{keyword}' \(did you mean {near}"):
        package.rope_attention(*positional, **{keyword: None})


def test_several_are_named_at_once():
    positional, _ = arguments("rope_attention")
    with pytest.raises(TypeError, match=r"'is_causal' \(did you mean causal\?\) and 'scale' \(did you mean softmax_s"):
        package.rope_attention(*positional, is_causal=True, scale=1.0)


def test_other_type_errors_stay_what_they_are():
    """Python's own of arguments that are missing, and ours of arguments of a wrong type."""
    positional, _ = arguments("rope_attention")
    for call, message in (
        (lambda: package.rope_attention(*positional[:3]), "missing 2 required positional arguments: 'cos' and 'sin'"),
        (lambda: package.rope_attention(*positional, q=None), "multiple values for argument 'q'"),
        (lambda: package.rope_attention(*positional, causal=1), "causal must be a bool, but is int 1"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert message in str(caught.value)


def test_signatures_are_the_functions_own():
    for name in FUNCTIONS:
        function = getattr(package, name)
        signature = inspect.signature(function)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        assert function.__name__ == name and function.__doc__ and pickle.loads(pickle.dumps(function)) is function
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    names = (
        "q k v cos sin causal softmax_scale rotary_dim interleaved window softcap sinks kv_starts kv_lens "
        "q_norm k_norm norm_eps norm_offset query_starts query_ends layout return_lse deterministic "
        "backend strategy batch_invariant return_max_logit"
    )
    assert list(inspect.signature(package.rope_attention).parameters) == names.split()


@pytest.mark.unpoisoned
def test_a_compiled_function_is_told_too():
    torch._dynamo.reset()
    positional, _ = arguments("rope_attention")
    compiled = torch.compile(package.rope_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="is_causal"):
        compiled(*positional, is_causal=True)
