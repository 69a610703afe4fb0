"""Fixtures of the tests of patched models: what runs where the kernels would, and how often."""

import functools
from collections import Counter

import pytest

from fused_rope_attn.integrations.transformers import attention
from fused_rope_attn.runtime.device import is_interpreted
from tests.support.generation import interpreted_step
from tests.support.internals import OPERATORS_OF_A_PATCHED_MODEL, rotate_without_the_kernel


def pytest_collection_modifyitems(items):
    """Leave out transformers' own warnings, which each release has others of."""
    for item in items:
        if "integrations/transformers" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))


@pytest.fixture(autouse=True)
def eager_rotation(request, monkeypatch):
    """`apply_rope` takes its reference: hundreds of steps of generation would take the interpreter an hour."""
    if "interpreted_attention" not in request.fixturenames and "gpu" not in request.keywords:
        rotate_without_the_kernel(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each operator in place of a module's own attention."""
    counts = Counter()
    for name, operator in [(name, getattr(attention, name)) for name in OPERATORS_OF_A_PATCHED_MODEL]:

        def counted(*args, name=name, operator=operator, **kwargs):
            counts[name] += 1
            return operator(*args, **kwargs)

        monkeypatch.setattr(attention, name, counted)
    return counts


@pytest.fixture
def interpreted_attention(monkeypatch):
    """All of a patched model's attention, and its rotation, in Triton's interpreter."""
    if not is_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(attention, "rope_attention_with_kvcache", interpreted_step)
    for name in ("rope_attention", "rope_attention_varlen", "rope_attention_mla", "rope_attention_mla_varlen"):
        monkeypatch.setattr(attention, name, functools.partial(getattr(attention, name), backend="triton"))
