"""Calls over the whole contract, drawn as ``python -m verification --random`` draws them."""

from dataclasses import replace
from typing import Any

from hypothesis import Verbosity, given, seed, settings, strategies as st

from verification.calls import Machine
from verification.run import command_of
from verification.strategies import FAMILIES, SETTINGS, Draw, draw
from verification.workers import run_check

INTERPRETER = Machine("cpu", "interpreter", ("float16", "float32"), ("reference", "triton"))
SHRINKING = settings(SETTINGS, verbosity=Verbosity.normal)
# Fields of a prototype: its calls have neither masks nor norms.
NO_MASKS = dict.fromkeys(("window", "kv_starts", "kv_lens", "intervals", "norms")) | {"softcap": 0.0, "sinks": False}


def check_calls(machine: Machine, name: str, count: int, *key: Any, head_dim: int = 0, **fixed: Any) -> None:
    """Check ``count`` calls of a family of ``strategies.FAMILIES``, the same for equal keys, and shrink one that fails.

    On a GPU all are of one prototype, because each prototype compiles for seconds. head_dim: that of all calls, with
    the part of it rotated that was drawn; fixed: other fields of the prototype.
    """

    def with_fixed(drawn: Any) -> Any:
        if head_dim:
            part = drawn.rotary_dim and max(2, drawn.rotary_dim * head_dim // drawn.head_dim // 2 * 2)
            drawn = replace(drawn, head_dim=head_dim, rotary_dim=part)
        return replace(drawn, **fixed)

    family = FAMILIES[name]
    prototypes = family.prototypes(machine).map(with_fixed)
    if machine.has_gpu:
        prototypes = st.just(draw(prototypes, name, *key))

    @st.composite
    def calls(draw: Draw) -> Any:
        return draw(family.calls_of(draw(prototypes), machine))

    test = given(call=calls())(lambda call: assert_right(call, machine))
    seed(" ".join(map(str, (name, *key))))(settings(SHRINKING, max_examples=count)(test))()


def assert_right(call: Any, machine: Machine = INTERPRETER) -> None:
    """Compare every backend of a call with float64; an illegal call must be refused."""
    outcome = run_check(call, machine)
    assert not outcome.failures, (command_of(call, machine), outcome.failures)
