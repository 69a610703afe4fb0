"""The table of options: each function hands every option on by its own name, and explains those that it lacks."""

import inspect
import pickle

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import distributed, rope_attention
from fused_rope_attn.attention import api
from fused_rope_attn.attention.problem import ROWS, Options, Tensors
from fused_rope_attn.distributed import api as distributed_api
from fused_rope_attn.generation import api as generation_api
from tests.support.operators import SMALL
from verification.testing import make_inputs

ENDS = torch.tensor([0, 7], dtype=torch.int32)
LENGTHS = {"max_seqlen_q": 7, "max_seqlen_k": 7}
# By public function: its arguments besides q, k, v, cos and sin.
FUNCTIONS = {
    "rope_attention": {},
    "plan": {},
    "rope_attention_varlen": LENGTHS,
    "plan_varlen": {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS} | LENGTHS,
    "rope_attention_with_kvcache": {},
    "plan_with_kvcache": {"cache_seqlens": ENDS},
    "rope_attention_cp": {"group": None},
    "plan_cp": {"group": None},
}


class Described(Exception):
    """Raised in the place of a description, with the records."""


def public(name):
    return getattr(package, name, None) or getattr(distributed, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_arrives_under_its_own_name(name, monkeypatch):
    def describe(*records, **_):
        raise Described(*records[:2])

    def fail_together(group, error):
        raise error

    for module, of_it in ((api, "describe_call"), (generation_api, "_describe"), (distributed_api, "_describe")):
        monkeypatch.setattr(module, of_it, describe)
    monkeypatch.setattr(distributed_api, "group_of", lambda group: group)
    monkeypatch.setattr(distributed_api, "fail_together", fail_together)
    given = make_inputs(SMALL)[:5]
    own = inspect.signature(public(name.replace("plan", "rope_attention"))).parameters
    options = [x for x in own if x in ROWS]
    assert len(options) > 10
    for option in options:
        marked = object()
        others = {x: None for x in own if x.startswith(("cu_", "cache_seq"))} | FUNCTIONS[name] | {option: marked}
        with pytest.raises(Described) as caught:
            public(name)(*given, **others)
        found = {x: getattr(caught.value.args[x not in Tensors._fields], x) for x in options}
        assert found.pop(option) is marked and all(x == own[other].default for other, x in found.items())


def test_the_signature_is_that_of_the_table():
    """Defaults pass their own checks: ``check_options`` does not look at them in eager calls."""
    names = (
        "q k v cos sin causal softmax_scale rotary_dim interleaved window softcap sinks kv_starts kv_lens "
        "q_norm k_norm norm_eps norm_offset query_starts query_ends layout return_lse deterministic "
        "backend strategy batch_invariant return_max_logit"
    )
    signature = inspect.signature(rope_attention).parameters
    assert list(signature) == names.split()
    assert set(signature) - set(ROWS) == {"q", "k", "v", "cos", "sin", "layout"}
    assert {name: signature[name].default for name in ROWS} == {name: row.default for name, row in ROWS.items()}
    for name in Options._fields:
        if ROWS[name].check is not None:
            ROWS[name].check(name, ROWS[name].default, Tensors(*make_inputs(SMALL)[:5]))


@pytest.mark.parametrize("name", [*(x for x in FUNCTIONS if x[0] == "r"), "apply_rope_qk"])
def test_unknown_keywords_are_explained(name):
    function = public(name)
    parameters = inspect.signature(function).parameters
    hints = {"interleave": "did you mean interleaved?", "zzz": f"the arguments are {', '.join(parameters)}"}
    if name in FUNCTIONS and name != "rope_attention":
        assert not {"query_starts", "query_ends"} & set(parameters)
    for keyword, hint in hints.items():
        with pytest.raises(TypeError) as caught:
            function(**{keyword: None})
        assert str(caught.value) == f"{name}() does not take {keyword!r} ({hint})"
        assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert function.__name__ == name and function.__doc__ and pickle.loads(pickle.dumps(function)) is function
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}


# Keywords of rope_attention, and what is said of them.
KEYWORDS = [
    *(({name: None}, rf"^rope_attention\(\) does not take '{name}' \(did you mean {near}") for name, near in (
        ("casual", "causal"), ("return_lsd", "return_lse or return_max_logit"),
        # Words of other libraries.
        ("is_causal", "causal"), ("sm_scale", "softmax_scale"), ("logits_soft_cap", "softcap"))),
    ({"is_causal": True, "scale": 1.0}, r"'is_causal' \(did you mean causal\?\) and 'scale' \(did you mean softmax_s"),
    # Other errors stay what they are: Python's own, and ours of arguments of a wrong type.
    ({"q": None}, "multiple values for argument 'q'"),
    ({"causal": 1}, "causal must be a bool, but is int 1"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "message"), KEYWORDS, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_close_keywords_are_recognised(keywords, message):
    given = make_inputs(SMALL)[:5]
    for call in (
        rope_attention,
        package.plan,
        lambda *given, **options: package.plan(rope_attention, *given, **options),
    ):
        with pytest.raises(TypeError, match=message):
            call(*given, **keywords)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'cos' and 'sin'"):
        rope_attention(*given[:3])
