"""The cost of ``batch_invariant``: the cases, the rivals that never split keys, and the tables."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baselines import attentions
from bench import report
from bench.attention.cases import CASES
from bench.attention.suite import ATTENTION
from bench.decode import DECODE, PROVIDERS, DecodeCase
from tests.support.bench import TINY, run
from tests.support.internals import rotate_without_the_kernel

NAMES = ["fused", "fused_same_bits", "flex16", "flex64"]


def visible(mask, length):
    """Return the pairs of a block mask: all of its full blocks, and of the others those that its function sees."""
    position, found = torch.arange(length), torch.zeros(length, length, dtype=torch.bool)
    seen = mask.mask_mod(0, 0, position[:, None], position)
    blocks = ((mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(seen)),)
    blocks += ((mask.kv_num_blocks, mask.kv_indices, seen),)
    for counts, indices, pairs in blocks:
        for row, count in enumerate(counts[0, 0]):
            for column in indices[0, 0, row, :count].tolist():
                block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                found[block] |= pairs[block]
    return found


@pytest.fixture
def eager_flex(monkeypatch):
    """SDPA in the place of FlexAttention, which without a compiler traces for seconds; what it was asked for."""
    asked = []

    def attend(q, k, v, *, block_mask, enable_gqa, kernel_options):
        asked.append(kernel_options)
        mask = None if block_mask is None else visible(block_mask, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(attentions, "compiled_flex", lambda: attend)
    rotate_without_the_kernel(monkeypatch)
    return asked


def test_attention_and_its_rivals(eager_flex):
    """One length is within a block of the mask, the other ends in its second block."""
    found = []
    for length, passes in ((64, ("fwd", "bwd")), (140, ("fwd",))):
        case = replace(TINY.case, batch=1, len_q=length, len_k=length)
        bench_case = replace(TINY, name=f"Tiny-{length}", kind="unsplit", case=case)
        found += run(ATTENTION, bench_case, modes=("eager",), passes=passes, round_ms=1.0)[0]
    assert sorted(row["provider"] for row in report.timed(found, "fwd")) == sorted(2 * NAMES), found
    assert {row["provider"] for row in report.timed(found, "bwd")} == set(NAMES[:2])
    assert {row["status"] for row in found if row["pass"] == "bwd"} == {"ok", "unsupported"}
    assert {(x["BLOCK_M"], x["BLOCK_N"]) for x in eager_flex} == {(16, 16), (64, 64)}


def test_steps_and_their_rivals(eager_flex):
    case = DecodeCase(2, 64, 4, 2, 32, torch.float16)
    names = ["fused", "fused_same_bits", "fused_page16", "flex16", "flex64"]
    rows, _ = run(DECODE, case, providers=[PROVIDERS[name] for name in names], modes=("eager",))
    assert [row["provider"] for row in report.timed(rows)] == names, rows


def test_the_option_is_passed():
    """Ours refuses a step that cannot keep the promise, which no other provider's call can do."""
    case = DecodeCase(1, 32, 2, 1, 32, torch.float16)
    step = case.step(torch.device("cpu"))
    float8 = step._replace(k_cache=step.k_cache.to(torch.float8_e4m3fn), v_cache=step.v_cache.to(torch.float8_e4m3fn))
    with pytest.raises(NotImplementedError, match="batch_invariant=True does not serve float8"):
        PROVIDERS["fused_same_bits"].make(float8)()


def test_cases():
    chosen = ATTENTION.choose("same-bits")
    assert [case.case.len_k for case in chosen if case.case.head_dim == 64] == [1024, 4096, 4096, 16384, 65536]
    assert {(case.case.heads_q, case.case.heads_kv, case.case.causal) for case in chosen} == {(32, 8, True)}
    assert len({case.name for case in CASES}) == len(CASES)
