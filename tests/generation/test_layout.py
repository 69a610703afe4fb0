"""layout="bshd" of the generation step: q, o, the caches and the new tokens are (B, N, H, D), and nothing is copied."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache
from tests.support.attention import assert_equal
from tests.support.dtypes import F32
from tests.support.generation import PLAIN, TINY, make_inputs
from tests.support.internals import with_kvcache
from tests.support.marks import interpreted
from tests.support.operators import Record, kernel_or_reference


def arguments(check=PLAIN):
    """Return a step's arguments in the default layout; the rows past the cache's lengths are zero."""
    given = make_inputs(check, F32)._asdict()
    return given | {name: given[name].nan_to_num() for name in ("k_cache", "v_cache")}


def tokens_first(given):
    """The same with contiguous (B, N, H, D)."""
    tokens = ("q", "k_cache", "v_cache", "k", "v")
    turned = {name: given[name].transpose(1, 2).contiguous() for name in tokens if given[name] is not None}
    return given | turned | {"layout": "bshd"}


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("append", [True, False])
def test_the_step_is_that_of_the_default_layout(append, backend):
    given = arguments(replace(PLAIN, append=append))
    turned = tokens_first(given)
    expected, expected_lse = with_kvcache(**given, backend=backend)
    o, lse = with_kvcache(**turned, backend=backend)
    assert o.shape == (2, 2, 4, 16) and o.is_contiguous()
    assert_equal((o.transpose(1, 2), lse), (expected, expected_lse))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(turned[name].transpose(1, 2), given[name]), name
    assert_equal((rope_attention_with_kvcache(**turned),), (rope_attention_with_kvcache(**given).transpose(1, 2),))
    assert plan_with_kvcache(**turned) == plan_with_kvcache(**given)


@interpreted
@pytest.mark.unpoisoned
def test_nothing_is_copied():
    """Five views, the operator, and the view of o reach the dispatcher."""
    given = tokens_first(arguments(TINY))
    with Record() as record:
        with_kvcache(**given, backend="triton")
    expected = [*["aten.transpose.int"] * 5, "fused_rope_attn.attention_with_kvcache.default", "aten.transpose.int"]
    assert record.operators == expected


@pytest.mark.unpoisoned
@kernel_or_reference("reference", "triton")
def test_compiles_to_one_graph(backend):
    """The caches are written through the views, in a compiled graph too."""
    torch._dynamo.reset()

    def run(**given):
        return with_kvcache(**given, backend=backend)

    eager, compiled = tokens_first(arguments(TINY)), tokens_first(arguments(TINY))
    expected = run(**eager)
    results = torch.compile(run, fullgraph=True, backend="aot_eager")(**compiled)
    torch.testing.assert_close(results, expected)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(compiled[name], eager[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 2, 4)}, "q must have shape (B, NQ, HQ, D), but has 3 dimensions: (2, 2, 4)"),
        ({"k_cache": (2, 40, 2)}, "k_cache must have shape (B, S_max, HKV, D), but has 3 dimensions: (2, 40, 2)"),
        (
            {"v_cache": (2, 41, 2, 16)},
            "(B, S_max, HKV, D) with S_max = 40 of k_cache, but has (2, 41, 2, 16)",
        ),
        ({"k": (2, 2, 16)}, "k must have shape (B, NQ, HKV, D), but has 3 dimensions: (2, 2, 16)"),
        ({"v": (2, 3, 2, 16)}, "v must have shape (B, NQ, HKV, D) with NQ = 2 of q, but has (2, 3, 2, 16)"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_messages_show_what_the_caller_has(changes, message):
    given = tokens_first(arguments()) | {name: torch.zeros(shape) for name, shape in changes.items()}
    with pytest.raises(ValueError) as caught:
        rope_attention_with_kvcache(**given)
    assert message in str(caught.value)


def test_an_expanded_cache_is_shown_with_the_strides_of_the_caller():
    given = tokens_first(arguments())
    given["k_cache"] = given["k_cache"][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"k_cache must not be expanded.*strides \(0, 32, 16, 1\)"):
        rope_attention_with_kvcache(**given)
