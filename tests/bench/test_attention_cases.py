"""The shapes that are measured, and the groups that select them."""

import pytest
import torch

from bench.attention import cases


def test_the_nineteen_of_the_inspiring_project():
    found = {(c.name, c.case.batch, c.case.heads_q, c.case.len_q, c.case.head_dim) for c in _group("nineteen")}
    small = {(f"Small-{label}", 4, 8, n, 64) for label, n in _lengths("512 1K 2K 4K 8K")}
    llama7b = {(f"Llama7B-{label}", 1 if n == 16384 else 2, 32, n, 128) for label, n in _lengths("512 1K 2K 4K 8K 16K")}
    llama70b = {(f"Llama70B-{label}", 1 if n >= 4096 else 2, 64, n, 128) for label, n in _lengths("512 1K 2K 4K 8K")}
    long = {("Long-32K", 1, 16, 32768, 128), ("Long-64K", 1, 8, 65536, 128), ("Long-128K", 1, 4, 131072, 128)}
    assert found == small | llama7b | llama70b | long
    assert len(found) == 19


def test_the_target_table():
    found = {
        c.name: (c.case.batch, c.case.heads_q, c.case.heads_kv, c.case.len_q, c.case.head_dim) for c in _group("table")
    }
    assert found == {
        "Small-512": (4, 8, 8, 512, 64),
        "Small-1K": (4, 8, 8, 1024, 64),
        "Llama7B-2K": (2, 32, 32, 2048, 128),
        "Llama7B-4K": (2, 32, 32, 4096, 128),
        "Llama70B-1K": (2, 64, 64, 1024, 128),
        "Llama3-8B-4K": (2, 32, 8, 4096, 128),
        "Llama3-8B-16K": (1, 32, 8, 16384, 128),
        "Long-64K": (1, 8, 8, 65536, 128),
    }


def test_the_other_cases_cover_gqa_96_256_and_no_mask():
    everything = _group("all")
    assert len({c.name for c in everything}) == len(everything)
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
    assert cases.select(["all"], "small-1k", torch.float32)[0].case.dtype == torch.float32
    with pytest.raises(ValueError, match="unknown group nowhere"):
        _group("nowhere")
    with pytest.raises(ValueError, match="no name contains nothing-like-it"):
        _group("table", "nothing-like-it")


def _group(group, *substrings):
    return cases.select([group], ",".join(substrings), torch.bfloat16)


def _lengths(text):
    return [(word, int(word[:-1]) * 1024 if word.endswith("K") else int(word)) for word in text.split()]
