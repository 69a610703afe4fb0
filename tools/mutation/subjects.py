"""The modules that are mutated, and the tests that must kill their mutants: the quickest first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subject:
    """What is mutated, and what must notice.

    module: a file of the package.
    tests: files below tests/, or tests in them.
    more: tests that run where these pass.
    preload: modules that the tests import, beside those of every test.
    spared: tests in those files that do not run.
    """

    module: str
    tests: tuple[str, ...]
    more: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()

    def stages(self) -> list[tuple[str, ...]]:
        """The options of pytest that run ``tests``, and those that run ``more`` where there are some."""
        without = tuple(f"--deselect=tests/{name}" for name in self.spared)
        return [(*without, *(f"tests/{name}" for name in names)) for names in (self.tests, self.more) if names]


_PLANNING = tuple(
    f"attention/test_{name}.py"
    for name in ("planning", "planning_masks", "planning_limits", "plan", "plan_varlen", "backends")
)
_MESSAGES = "test_layout.py::test_messages_show_what_the_caller_has"
_CALLS = ("attention/test_validation.py", "attention/test_varlen.py", f"attention/{_MESSAGES}")
_CALLS_OF_STEPS = (
    "generation/test_refusals.py",
    "generation/test_plan_with_kvcache.py",
    f"generation/{_MESSAGES}",
    "generation/test_layout.py::test_an_expanded_cache_is_shown_with_the_strides_of_the_caller",
)
# Tests of patched models that compile or export one take longer than all others together.
_HF_SPARED = tuple(
    f"integrations/transformers/test_{test}"
    for test in (
        "bidirectional.py::test_compiled",
        "dynamic_caches.py::test_nothing_outlives_its_pass",
        "foreign_attention.py::test_block_masks",
        "prefill.py::test_compiled_generation",
        "report.py::test_graphs_are_not_counted",
        "wrapping.py::test_exported",
    )
)
_HF_MODELS = (
    "cohere",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
_HF_MORE = (
    "patching",
    "pickling",
    "fallbacks",
    "packing",
    "static_caches",
    "steps",
    "dynamic_caches",
    "prefill",
    "text_towers_positions",
    "text_towers_gemma",
    "text_towers",
)
_HF_PRELOAD = ("transformers", *(f"transformers.models.{name}.modeling_{name}" for name in _HF_MODELS))


def _of_models(module: str, *tests: str, more: tuple[str, ...] = ()) -> Subject:
    """A module of the integration: the tests that are about it, then those of whole models that take seconds."""
    files = tuple(f"integrations/transformers/test_{name}.py" for name in tests)
    others = tuple(f"integrations/transformers/test_{name}.py" for name in (*_HF_MORE, *more) if name not in tests)
    return Subject(f"integrations/transformers/{module}.py", files, others, _HF_PRELOAD, _HF_SPARED)


SUBJECTS = (
    Subject("attention/validation.py", _CALLS, ("attention/test_more_queries.py",)),
    Subject("attention/planning.py", _PLANNING, ("attention/test_compile.py",)),
    Subject("generation/validation.py", _CALLS_OF_STEPS),
    Subject("generation/cache_validation.py", _CALLS_OF_STEPS),
    Subject("generation/planning.py", ("generation/test_plan_with_kvcache.py", "generation/test_schedule.py")),
    Subject("rotation/validation.py", ("rotation/test_refusals.py",)),
    Subject(
        "runtime/checks.py",
        (*_CALLS, *_CALLS_OF_STEPS, "runtime/test_checks.py", "rotation/test_refusals.py", "attention/test_kinds.py"),
        ("attention/test_more_queries.py",),
    ),
    Subject("kernels/masks.py", ("kernels/test_masks.py",)),
    Subject("kernels/lengths.py", ("kernels/test_lengths.py",)),
    Subject("kernels/sequences.py", ("kernels/test_sequences.py",)),
    _of_models("attention", "attention", "steps", "norms", more=("bidirectional", "report", "families", "distributed")),
    _of_models("batch", "batches", more=("bidirectional", "distributed")),
    _of_models("conventions", "conventions", "families_lookup", "packing", more=("families",)),
    _of_models("families", "families_lookup", more=("families",)),
    _of_models("hooks", "hooks", "patching", "pickling", more=("foreign_attention", "options")),
    _of_models("norms", "norms", more=("families", "distributed")),
    _of_models(
        "obstacles",
        "obstacles",
        "fallbacks",
        "batches",
        more=("foreign_attention", "distributed", "bidirectional", "families"),
    ),
    _of_models("patch", "patching", "options", "pickling", more=("wrapping", "report", "families")),
    _of_models("report", "report", more=("options", "distributed")),
    _of_models("buffers", "dynamic_caches"),
    _of_models("state", "report", "hooks", "pickling", more=("distributed",)),
    Subject("integrations/transformers/tables.py", ("integrations/transformers/test_tables.py",), (), _HF_PRELOAD),
)


def chosen(names: list[str]) -> list[Subject]:
    """The subjects whose module begins with one of the names, in the order of the table; all without names."""
    found = [x for x in SUBJECTS if not names or any(x.module.startswith(name) for name in names)]
    idle = [name for name in names if not any(x.module.startswith(name) for x in SUBJECTS)]
    if idle:
        modules = ", ".join(x.module for x in SUBJECTS)
        raise ValueError(f"module must be one of {modules}, or how some of them begin, but is {idle[0]}")
    return found
