"""The shapes that are measured, and the groups that select them."""

import importlib

from bench import results
from bench.__main__ import COMMANDS
from bench.attention import cases, suite
from bench.attention.suite import ATTENTION
from bench.models import suite as models


def test_shapes_are_those_of_committed_rows():
    """Rows of a run replace committed ones of the same case and shape, so that a new name would leave both."""
    suites = (COMMANDS[name] for name in ("attention", "norm", "mla", "decode"))
    suites = [getattr(importlib.import_module(f"bench.{home}"), entry) for home, entry in suites]
    measured = {(case.name, case.shape) for suite in suites for case in suite.cases}
    for name in "attention decode energy fa3 groups host intervals mla norm same-bits".split():
        assert {(row["case"], row["shape"]) for row in results.read(f"{name}-h200")} <= measured, name
    for every in ((*cases.CASES, *cases.NORMED), models.CASES):
        assert len({(case.name, case.shape) for case in every}) == len(every)


def test_cases_are_chosen_by_groups_and_parts_of_names_and_shapes():
    def names(text):
        return [case.name for case in ATTENTION.choose(text)]

    assert names("") == [*(case.name for case in cases.PLAIN if case.name in cases.TABLE), "Host"]
    assert len(names("nineteen")) == 19 and set(names("table")) == set(cases.TABLE)
    assert names("masks") == ["window", "packed"] and names("packed") == ["packed"]
    assert names("gqa+16K, phi3-1k") == ["Llama3-8B-16K", "Phi3-1K"]


def test_flops():
    (case,), (full,) = ATTENTION.choose("table+Llama7B-4K"), ATTENTION.choose("Llama7B-full-4K")
    assert case.flops("fwd") == case.flops("fwd_grad") == 2 * 2 * 32 * 4096**2 * 128
    assert (case.flops("bwd"), case.flops("both")) == (2.5 * case.flops("fwd"), 3.5 * case.flops("fwd"))
    assert full.flops("fwd") == 2 * case.flops("fwd")


def test_visited_blocks_of_intervals():
    """Blocks are counted for the cases as they are measured."""
    counted = {case.name: suite.visited(*case.case.intervals(case.case.len_k)[:2]) for case in cases.BY_INTERVALS}
    assert counted["causal-4K"] == counted["causal-16K"] == 1
    assert counted["chunks"] == (4 * 64 * 65) / (256 * 257)
    assert counted["prefix"] == (32 * 33 + 8 * 8 * 9 + 2 * 8 * 8 * 32) / (96 * 97)
    assert counted["image-blocks"] == (64 * 65 + 2 * 16) / (64 * 65)
    assert 0.04 < counted["documents"] < 0.12
