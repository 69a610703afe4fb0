"""Keywords of other libraries, and misspelt ones of ours, raise a TypeError that says what to write instead."""

import inspect
import pickle

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn.attention.keywords import ATTENTION, VARLEN
from fused_rope_attn.generation.keywords import KVCACHE
from fused_rope_attn.rotation.keywords import ROTATION
from tests.support.operators import SMALL
from verification.testing import make_inputs

# Every public function that explains its keywords: the foreign ones that it knows, and the function with its signature.
FUNCTIONS = {
    "rope_attention": (ATTENTION, "rope_attention"),
    "plan": (ATTENTION, "rope_attention"),
    "rope_attention_varlen": (VARLEN, "rope_attention_varlen"),
    "plan_varlen": (VARLEN, "rope_attention_varlen"),
    "rope_attention_with_kvcache": (KVCACHE, "rope_attention_with_kvcache"),
    "plan_with_kvcache": (KVCACHE, "rope_attention_with_kvcache"),
    "apply_rope": (ROTATION, "apply_rope"),
    "apply_rope_qk": (ROTATION, "apply_rope_qk"),
}
# The first keywords that users of each library try.
OTHERS = set(
    "attn_mask is_causal scale dropout_p enable_gqa window_size sliding_window position_ids alibi_slopes "
    "logits_soft_cap softmax_temp s_aux rotary_cos rotary_sin block_table rotary_interleaved num_splits "
    "key_padding_mask attention_mask".split()
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
def test_every_known_keyword_is_explained(name):
    foreign, owner = FUNCTIONS[name]
    positional, options = arguments(name)
    own = inspect.signature(getattr(package, owner)).parameters
    getattr(package, name)(*positional, **options)
    for keyword, (whose, instead) in foreign.items():
        if keyword in own:
            continue
        with pytest.raises(TypeError) as caught:
            getattr(package, name)(*positional, **options, **{keyword: None})
        assert str(caught.value) == f"{name}() got {keyword}, which is {whose}: {instead}"
        assert caught.value.__cause__ is None and caught.value.__context__ is None


@pytest.mark.parametrize("name", ["rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache"])
def test_what_users_of_other_libraries_write_is_known(name):
    foreign, _ = FUNCTIONS[name]
    own = set(inspect.signature(getattr(package, name)).parameters)
    assert OTHERS - own <= set(foreign)
    public = {
        parameter for function in FUNCTIONS for parameter in inspect.signature(getattr(package, function)).parameters
    }
    of_attention = set(inspect.signature(package.rope_attention).parameters)
    # A function that lacks a keyword of rope_attention says so.
    assert (of_attention & public) - own <= set(foreign) | {"k", "v", "q"}


def test_advice_names_keywords_that_exist():
    """An advice `use X` names an argument of the function that gives it."""
    for name, (foreign, owner) in FUNCTIONS.items():
        own = inspect.signature(getattr(package, owner)).parameters
        for keyword, (_, instead) in foreign.items():
            if keyword in own or not instead.startswith("use "):
                continue
            asked = instead.removeprefix("use ").replace("=", " ").replace(",", " ").split()[0]
            assert asked in own, f"{name}: {keyword}: {instead}"


@pytest.mark.parametrize(
    ("keyword", "near"),
    [("softmax_scal", "softmax_scale"), ("kv_len", "kv_lens"), ("casual", "causal"), ("return_lsd", "return_lse")],
)
def test_misspelt_keywords_are_recognised(keyword, near):
    positional, _ = arguments("rope_attention")
    with pytest.raises(TypeError, match=rf"^rope_attention\(\) got {keyword}, .*did you mean {near}\?"):
        package.rope_attention(*positional, **{keyword: None})


def test_several_are_named_at_once():
    positional, _ = arguments("rope_attention")
    with pytest.raises(TypeError, match=r"got is_causal, .* and scale, which is .*: use softmax_scale$"):
        package.rope_attention(*positional, is_causal=True, scale=1.0)


def test_other_type_errors_stay_what_they_are():
    """Python's own of arguments that are missing or unheard of, and ours of arguments of a wrong type."""
    positional, _ = arguments("rope_attention")
    for call, message in (
        (lambda: package.rope_attention(*positional[:3]), "missing 2 required positional arguments: 'cos' and 'sin'"),
        (lambda: package.rope_attention(*positional, q=None), "multiple values for argument 'q'"),
        (lambda: package.rope_attention(*positional, zzz=1), "unexpected keyword argument 'zzz'"),
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
        assert name.startswith("plan") or inspect.Parameter.VAR_KEYWORD not in kinds
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
