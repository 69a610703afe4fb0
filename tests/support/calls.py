"""Calls over the whole contract, drawn as ``python -m verification --random`` draws them."""

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, Verbosity, given, settings, strategies as st

from verification.calls import Machine
from verification.search import command_of
from verification.strategies import SETTINGS, families
from verification.workers import run_check

INTERPRETER = Machine("cpu", "interpreter", ("float16", "float32"), ("reference", "triton"))


def random_calls(count: int, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test of one ``call``: run it on ``count`` calls of ``strategies.FAMILIES``, the same each time."""
    phases = [Phase.generate, Phase.shrink]
    chosen = settings(SETTINGS, max_examples=count, derandomize=True, phases=phases, verbosity=Verbosity.normal)
    return lambda test: chosen(given(call=_calls(*names))(test))


@st.composite
def _calls(draw: Callable[[st.SearchStrategy], Any], *names: str) -> Any:
    family = draw(families(INTERPRETER, *names))
    return draw(family.calls_of(draw(family.prototypes(INTERPRETER)), INTERPRETER))


def assert_right(call: Any) -> None:
    """Compare every backend of a call with float64; an illegal call must be refused."""
    outcome = run_check(call, INTERPRETER)
    assert not outcome.failures, (command_of(call, INTERPRETER), outcome.failures)
