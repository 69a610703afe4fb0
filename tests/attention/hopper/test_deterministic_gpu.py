"""`deterministic=True` and `batch_invariant=True` on sm_90, where dQ is added in the order of the key blocks."""

from dataclasses import replace
from itertools import accumulate, cycle

import pytest
import torch

from fused_rope_attn import plan, rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.attention import configs
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_alike
from tests.support.hopper import ON_SM_90, UNEVEN, needs_sm_90, packed
from tests.support.marks import cases
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90
# More programs than multiprocessors, so that key blocks of a head run at the same time and one after another.
LONG = Case(1, 8, 2, 3000, 3000, 128, dtype=BF16)
REST = (
    replace(MANY_TILES, causal=False),
    replace(LONG, window=(200, 0)),  # narrow: each query block is stored by the first key block that sees it
    replace(LONG, window=(150, 77), causal=False, softcap=20.0, sinks=True, dtype=F16),
    replace(LONG, window=(1500, 0), heads_kv=8, norms=1.0),
    replace(LONG, batch=2, kv_starts=(0, 700), kv_lens=(3000, 2111), softcap=9.0),
    replace(LONG, batch=2, kv_lens=(5, 0), len_q=77),
    replace(ODD_LENGTHS, len_q=700, len_k=130),  # rows at negative positions
    replace(ODD_LENGTHS, len_q=1, causal=False),
    replace(LONG, rotary_dim=64, interleaved=True, lse_gradient=True),
    replace(LONG, causal=False, intervals="random"),
    replace(LONG, causal=False, intervals="tree", norms=0.0),
    replace(LONG, causal=False, intervals="blocks", window=(900, -1), kv_lens=(2900,), heads_q=2),
    packed(UNEVEN, heads_q=16, heads_kv=4),
    packed((2000, 0, 1, 900, 127, 64), causal=False, norms=1.0, sinks=True),
    packed((16, 2, 3, 1) * 10 + (0,) * 20, window=(100, 0)),
)
# All at 128 columns, and each at one other number.
CASES = [replace(MANY_TILES, head_dim=head_dim) for head_dim in (64, 96, 128, 256)]
CASES += [
    replace(case, head_dim=head_dim) for case, other in zip(REST, cycle((64, 256, 96))) for head_dim in (128, other)
]


def busy(stream, x):
    """Begin products on another stream, so that programs start later and in another place."""
    with torch.cuda.stream(stream):
        for _ in range(int(torch.randint(1, 8, ()))):
            x @ x


def all_of(results):
    """Return the outputs, and all gradients that the case has."""
    return [x for x in (*results, results.dsinks, results.dq_norm, results.dk_norm) if x is not None]


@cases(*CASES)
def test_gradients_have_the_same_bits_in_every_run(case):
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90, deterministic=True)
    assert_matches_float64(case, inputs, first)
    stream, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    for _ in range(50):
        busy(stream, x)
        again = run_op(inputs, case, **ON_SM_90, deterministic=True)
        assert_equal(all_of(first), all_of(again))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_head_may_have_more_key_blocks_than_there_are_multiprocessors(head_dim):
    """Then fewer than half of them alternate with those of the next head."""
    case = Case(1, 6, 3, 19_001, 19_001, head_dim, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    first = all_of(run_op(inputs, case, **ON_SM_90, deterministic=True))
    assert_alike(first, all_of(run_op(inputs, case, **ON_SM_90)))
    for _ in range(5):
        assert_equal(first, all_of(run_op(inputs, case, **ON_SM_90, deterministic=True)))


@pytest.mark.parametrize("options", [{}, {"window": (300, 0)}, {"softcap": 20.0, "norms": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_sequence_has_the_same_gradients_alone_in_a_batch_and_in_a_pack(head_dim, options):
    length, generator = 1111, torch.Generator(device="cuda").manual_seed(head_dim)
    options = {"batch_invariant": True, **ON_SM_90} | options
    if options.pop("norms", False):
        norms = torch.randn(2, head_dim, generator=generator, device="cuda").abs()
        options |= {"q_norm": norms[0], "k_norm": norms[1]}

    def normal(*shape):
        return torch.randn(*shape, head_dim, generator=generator, device="cuda").to(BF16)

    cos, sin = rope_tables(2000, head_dim, device="cuda")
    batch = normal(3, 8, length), normal(3, 2, length), normal(3, 2, length), normal(3, 8, length)

    def gradients(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = rope_attention(*leaves, cos, sin, True, **options)
        return torch.autograd.grad(o, leaves, do)

    alone = gradients(*(x[2:] for x in batch))
    assert_equal(alone, [x[2:] for x in gradients(*batch)])
    lengths = (700, length, 1900, 65)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    rows = slice(lengths[0], lengths[0] + length)
    pack = [normal(sum(lengths), x.shape[1]) for x in batch]
    for x, of_batch in zip(pack, batch):
        x[rows] = of_batch[2].transpose(0, 1)
    leaves = [x.requires_grad_() for x in pack[:3]]
    o = rope_attention_varlen(*leaves, cos, sin, ends, ends, max(lengths), max(lengths), True, **options)
    found = torch.autograd.grad(o, leaves, pack[3])
    assert_equal(alone, [x[rows].transpose(0, 1)[None] for x in found])


def test_auto_takes_the_sm_90_backward():
    q, k, v, cos, sin, _ = make_inputs(MANY_TILES, "cuda")
    for option in ("deterministic", "batch_invariant"):
        chosen = plan(q, k, v, cos, sin, True, **{option: True})
        assert type(chosen.backward) is configs.HopperBackwardConfig, option
        assert "in the order of the key blocks" in chosen.reason
    assert rope_attention(q, k, v, cos, sin, True, deterministic=True).shape == q.shape
