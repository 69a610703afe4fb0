"""The modules that are mutated, and the tests that must kill their mutants: the quickest first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subject:
    """module: a file of the package. tests: files below tests/, or tests in them. preload: modules that their tests import,
    beside those of every test."""

    module: str
    tests: tuple[str, ...]
    preload: tuple[str, ...] = ()


_PLANNING = tuple(
    f"attention/test_{name}.py"
    for name in ("planning", "planning_masks", "planning_limits", "plan", "plan_varlen", "backends")
)
_MESSAGES = "test_layout.py::test_messages_show_what_the_caller_has"
_CALLS = ("attention/test_validation.py", "attention/test_varlen.py", f"attention/{_MESSAGES}")
_CALLS_OF_STEPS = (
    "generation/test_refusals.py", "generation/test_plan_with_kvcache.py", f"generation/{_MESSAGES}",
    "generation/test_layout.py::test_an_expanded_cache_is_shown_with_the_strides_of_the_caller",
)  # fmt: skip
_HF = "integrations/transformers/test_"

SUBJECTS = (
    Subject("attention/validation.py", _CALLS),
    Subject("attention/planning.py", _PLANNING),
    Subject("generation/validation.py", _CALLS_OF_STEPS),
    Subject("generation/planning.py", ("generation/test_plan_with_kvcache.py", "generation/test_schedule.py")),
    Subject("rotation/validation.py", ("rotation/test_refusals.py",)),
    Subject("runtime/checks.py", (*_CALLS, *_CALLS_OF_STEPS, "rotation/test_refusals.py")),
    Subject("kernels/masks.py", ("kernels/test_masks.py",)),
    Subject("kernels/lengths.py", ("kernels/test_lengths.py",)),
    Subject("kernels/sequences.py", ("kernels/test_sequences.py",)),
)


def chosen(names: list[str]) -> list[Subject]:
    """The subjects whose module begins with one of the names, in the order of the table; all without names."""
    found = [x for x in SUBJECTS if not names or any(x.module.startswith(name) for name in names)]
    idle = [name for name in names if not any(x.module.startswith(name) for x in SUBJECTS)]
    if idle:
        modules = ", ".join(x.module for x in SUBJECTS)
        raise ValueError(f"module must be one of {modules}, or how some of them begin, but is {idle[0]}")
    return found
