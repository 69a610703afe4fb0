"""The shapes that are measured, and the groups that select them."""

import pytest

from bench.attention import cases
from bench.attention.suite import ATTENTION


def test_the_other_cases_cover_gqa_96_256_and_no_mask():
    everything = _group("all")
    assert len({c.name for c in everything}) == len(everything) and len(_group("nineteen")) == 19
    assert {c.name for c in _group("table")} == set(cases.TABLE)
    assert {c.case.head_dim for c in everything} == {64, 96, 128, 256}
    assert any(not c.case.causal for c in everything)
    assert all(c.case.len_q == c.case.len_k for c in everything)


def test_flops_and_selection():
    case = _group("table", "Llama7B-4K")[0]
    assert case.flops("fwd") == 2 * 2 * 32 * 4096**2 * 128
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert case.flops("both") == 3.5 * case.flops("fwd")
    full = _group("full", "Llama7B-full-4K")[0]
    assert full.flops("fwd") == 2 * case.flops("fwd")
    with pytest.raises(ValueError, match="no case fits 'nowhere'; groups are nineteen"):
        _group("nowhere")


def test_cases_are_chosen_by_groups_and_parts_of_names_and_shapes():
    def names(text):
        return [case.name for case in ATTENTION.choose(text)]

    assert names("") == [*(case.name for case in cases.PLAIN if case.name in cases.TABLE), "Host"]
    assert names("masks") == ["window", "packed"] and names("packed") == ["packed"]
    assert names("gqa+16K, phi3-1k") == ["Llama3-8B-16K", "Phi3-1K"]
    assert all("full" in case.shape for case in ATTENTION.choose("full")) and len(names("corope")) == 4


def test_masks_and_norms():
    packed = next(case for case in cases.MASKED if case.kind == "packed")
    lengths = [n for n, _ in packed.case.seqlens]
    assert len(lengths) == 64 and min(lengths) == 16 and max(lengths) == 4096 and sum(lengths) == packed.case.len_q
    assert cases.mixed_lengths(64, 16, 4096) == tuple(lengths) != cases.mixed_lengths(64, 16, 4096, seed=1)
    assert "packed=64x16..4096" in packed.shape
    assert cases.MASKED[0].case.window == (1024, 0) and cases.MASKED[0].case.len_q == 32768
    # The attention of Qwen3-0.6B and 8B, and of Gemma 3's smallest two.
    shapes = {(c.family, c.case.heads_q, c.case.heads_kv, c.case.head_dim) for c in cases.NORMED}
    assert shapes == {
        ("Qwen3-0.6B", 16, 8, 128),
        ("Qwen3-8B", 32, 8, 128),
        ("Gemma3-1B", 4, 1, 256),
        ("Gemma3-4B", 8, 4, 256),
    }
    assert [case.case.norms for case in cases.NORMED] == [float("Gemma" in case.name) for case in cases.NORMED]
    assert len({case.name for case in cases.NORMED}) == len(cases.NORMED)


def _group(group, *parts):
    return [case for case in ATTENTION.choose("+".join([group, *parts])) if case.kind == "plain"]
