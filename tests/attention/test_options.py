"""The table of options, and that each function hands every option on by its own name."""

import inspect
from typing import Annotated, TypedDict

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import distributed
from fused_rope_attn.attention import api
from fused_rope_attn.attention.problem import DESCRIBED, ROWS, SCHEMA, Options, Tensors
from fused_rope_attn.distributed import api as distributed_api
from fused_rope_attn.generation import api as generation_api
from fused_rope_attn.runtime.options import Option, rows_of
from tests.support.operators import SMALL
from verification.testing import make_inputs

ENDS = torch.tensor([0, 7], dtype=torch.int32)
# By public function: where its calls are described, and its arguments besides q, k, v, cos and sin.
FUNCTIONS = {
    "rope_attention": (api, {}),
    "plan": (api, {}),
    "rope_attention_varlen": (api, {"max_seqlen_q": 7, "max_seqlen_k": 7}),
    "plan_varlen": (api, {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 7, "max_seqlen_k": 7}),
    "rope_attention_with_kvcache": (generation_api, {}),
    "plan_with_kvcache": (generation_api, {"cache_seqlens": ENDS}),
    "rope_attention_cp": (distributed_api, {"group": None}),
    "plan_cp": (distributed_api, {"group": None}),
}
# Whose arguments a function takes that passes them on.
OF = {name: name.replace("plan", "rope_attention") for name in FUNCTIONS if name.startswith("plan")}


class Described(Exception):
    """Raised in the place of a description, with the records."""


def public(name):
    return getattr(package, name, None) or getattr(distributed, name)


def parameters(name):
    return inspect.signature(public(OF.get(name, name))).parameters


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_arrives_under_its_own_name(name, monkeypatch):
    module, needed = FUNCTIONS[name]

    def describe(*records, **_):
        raise Described(*records[:2])

    monkeypatch.setattr(module, "describe_call" if module is api else "_describe", describe)
    monkeypatch.setattr(distributed_api, "group_of", lambda group: group)
    monkeypatch.setattr(distributed_api, "fail_together", lambda group, error: (_ for _ in ()).throw(error))
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    own = parameters(name)
    options = [x for x in own if x in ROWS]
    assert len(options) > 10
    for option in options:
        marked = object()
        given = {x: None for x in own if x.startswith(("cu_", "cache_seq"))} | needed | {option: marked}
        with pytest.raises(Described) as caught:
            public(name)(q, k, v, cos, sin, **given)
        tensors, record = caught.value.args
        assert getattr(tensors if option in Tensors._fields else record, option) is marked
        for other in set(options) - {option}:
            found = getattr(tensors if other in Tensors._fields else record, other)
            assert found == own[other].default


def test_defaults_are_those_of_the_signatures():
    signature = inspect.signature(package.rope_attention).parameters
    assert {name: signature[name].default for name in ROWS} == {name: row.default for name, row in ROWS.items()}
    assert set(signature) - set(ROWS) == {"q", "k", "v", "cos", "sin", "layout"}
    assert set(Options._fields) | set(Tensors._fields) >= set(ROWS)


def test_a_problem_holds_every_option():
    """All but one that the public function reads, rotary_dim, which the tables decide, and tensors."""
    assert set(DESCRIBED) == set(Options._fields) - {"return_lse", "rotary_dim"}
    assert all(f" {name}" in SCHEMA and f"None {name}" not in SCHEMA for name in DESCRIBED)


def test_defaults_pass_their_own_checks():
    """``check_options`` does not look at them in eager calls."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    for name in Options._fields:
        if ROWS[name].check is not None:
            ROWS[name].check(name, ROWS[name].default, Tensors(q, k, v, cos, sin))


def test_keywords_without_a_row_are_left_out():
    class Table(TypedDict):
        one: int
        two: Annotated[int, Option(3)]

    assert rows_of(Table) == {"two": Option(3)}
