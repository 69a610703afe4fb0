"""Masks and packing in the portable kernels, in Triton's interpreter, against float64; see test_kernels.py.

Shapes are just large enough that every loop runs: 64 x 32 tiles forward and for dq, 32 x 64 for dk and dv.
"""

import math
from dataclasses import replace

import pytest
import torch
from fused_rope_attn.attention.masks import describe_masks

from fused_rope_attn import cu_seqlens_from_position_ids, plan, rope_attention, rope_attention_varlen
from fused_rope_attn.attention import configs
from fused_rope_attn.kernels.masks import key_range, query_range
from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.testing import Case, compare, make_inputs, masks_of, run_op, run_reference
from tests.attention.portable.test_kernels import F16, F32, both, cases, hold

interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1; on a GPU see test_gpu.py")
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
BASE = Case(1, 1, 1, 130, 130, 16)
PAIR = Case(2, 1, 1, 70, 110, 16)


def hold_all(case, strategy, inputs=None):
    """``hold``, and the gradient of the sinks, which is one row."""
    inputs = make_inputs(case) if inputs is None else inputs
    out = hold(case, inputs, strategy=strategy, out=run_op(inputs, case, backend="triton", strategy=strategy))
    if case.sinks:
        ref64, eager = run_reference(inputs, case, torch.float64).dsinks, run_reference(inputs, case).dsinks
        result = compare("dsinks", out.dsinks[None], ref64[None], eager[None], grad=True, dtype=case.dtype)
        assert result.ok, f"{case.name} [{strategy}]: {result}"
    return out


@interpreted
@quiet
@both
@cases(
    *(replace(BASE, window=window) for window in ((40, 0), (3, 0), (5000, -1))),
    *(replace(BASE, window=window, causal=False) for window in ((33, 7), (-1, 5), (40, -1), (2**40, 2**40))),
    replace(BASE, window=(33, 100)),  # causal is the narrower bound
    replace(PAIR, window=(33, 0), dtype=F32),
    replace(PAIR, window=(20, 10), causal=False, dtype=F32),
    Case(1, 1, 1, 100, 33, 16, window=(10, 0)),  # rows that see nothing
    Case(1, 1, 1, 1, 100, 16, window=(40, 0)),
)
def test_window(case, strategy):
    hold_all(case, strategy)


@interpreted
@quiet
@both
@cases(
    replace(PAIR, kv_lens=(100, 3)),
    replace(PAIR, kv_lens=(0, 200), causal=False, dtype=F32),
    replace(PAIR, kv_starts=(10, 90)),
    replace(PAIR, kv_starts=(75, 110), causal=False, dtype=F32),
    replace(PAIR, kv_starts=(-4, 30), kv_lens=(70, 101), dtype=F32),
    replace(PAIR, kv_starts=(50, 60), kv_lens=(40, 130), causal=False),  # no key is left in the first
    replace(PAIR, len_q=110, kv_starts=(64, 33), table_batch=True),  # left-padded prompts
)
def test_bounds_of_the_keys(case, strategy):
    hold_all(case, strategy)


@interpreted
@quiet
@both
@cases(
    replace(BASE, len_q=50, len_k=70, softcap=2.0),
    replace(BASE, len_q=50, len_k=70, softcap=50.0, dtype=F32, causal=False),
    replace(BASE, len_q=50, len_k=70, softcap=0.5, dtype=F32, softmax_scale=-2.0),
    replace(BASE, len_q=50, len_k=70, softcap=1.0, dtype=F32, softmax_scale=0.0),
)
def test_softcap(case, strategy):
    hold_all(case, strategy)


@interpreted
@quiet
@both
@cases(
    replace(BASE, heads_q=2, len_q=70, len_k=50, sinks=True),  # rows that see nothing: not even the sink
    replace(PAIR, heads_q=2, heads_kv=2, len_k=70, sinks=True, dtype=F32, causal=False),
)
def test_sinks(case, strategy):
    out = hold_all(case, strategy)
    unseeing = max(0, case.len_q - case.len_k)
    assert bool((out.lse[:, :, :unseeing] == -math.inf).all()) and bool((out.o[:, :, :unseeing] == 0).all())


@interpreted
@both
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_extreme_sinks(sink, strategy):
    case = Case(1, 2, 1, 20, 40, 16, dtype=F32)
    q, k, v, cos, sin, do = make_inputs(case)
    results = []
    for backend in ("triton", "reference"):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)] + [torch.full((2,), sink, requires_grad=True)]
        chosen = {"backend": backend, "strategy": strategy if backend == "triton" else "auto"}
        o, lse = rope_attention(*tensors[:3], cos, sin, True, sinks=tensors[3], return_lse=True, **chosen)
        results.append((o, lse, *torch.autograd.grad(o, tensors, do)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# The pairs that models combine.
COMBINED = (
    Case(1, 4, 1, 100, 100, 16, window=(40, 0), softcap=3.0),  # Gemma 2
    Case(1, 4, 2, 100, 100, 16, window=(40, 0), sinks=True),  # gpt-oss
    Case(2, 2, 1, 100, 100, 16, kv_starts=(0, 41), table_batch=True),
    Case(2, 2, 1, 40, 130, 16, window=(30, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0),
         kv_lens=(60, 130), dtype=F32),
    Case(2, 2, 1, 40, 130, 24, window=(64, 0), sinks=True, kv_starts=(3, 70), kv_lens=(100, 90), rotary_dim=10,
         interleaved=True, layout="odd"),
)  # fmt: skip


@interpreted
@quiet
@both
@cases(*COMBINED)
def test_combinations(case, strategy):
    hold_all(case, strategy)


PACKED = Case(1, 2, 1, 0, 0, 16)


def packed(seqlens, behind=(0, 0), **changes):
    """A packed case; ``behind``: rows of q and k behind the last sequence."""
    pairs = tuple(n if isinstance(n, tuple) else (n, n) for n in seqlens)
    total_q, total_k = (sum(n[i] for n in pairs) + behind[i] for i in range(2))
    return replace(PACKED, len_q=total_q, len_k=total_k, seqlens=pairs, **changes)


PACKINGS = (
    packed((70, 1, 33, 64)),
    packed((70, 0, 33, 0), causal=False, dtype=F32),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33)), dtype=F32),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33)), causal=False),
    packed((20, 33), behind=(40, 70)),
    packed((), behind=(5, 9)),
    packed((), causal=False),
    packed((2, 3) * 4 + (0,) * 8, dtype=F32),
    packed((70, 50), window=(20, 0)),
    packed((70, 50), window=(20, 5), causal=False, softcap=3.0, sinks=True, dtype=F32),
    packed((30, 40), layout="odd", interleaved=True, rotary_dim=10),
)


@interpreted
@quiet
@both
@cases(*PACKINGS)
def test_packed_sequences(case, strategy):
    hold_all(case, strategy)


def packed_masks(case):
    """(masks, their tensors) of a packed case as launchers take them."""
    lengths = torch.tensor(case.seqlens, dtype=torch.int32).reshape(-1, 2)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    tensors = (masks_of(case)["sinks"], None, None, ends[:, 0].contiguous(), ends[:, 1].contiguous())
    return describe_masks(case.causal, -1, -1, 0.0, tensors, max((max(n) for n in case.seqlens), default=0)), tensors


def sequences_of(case):
    """(first query, queries, first key, keys) of each sequence, and of the rows behind the last, which see nothing."""
    first_q = first_k = 0
    for len_q, len_k in case.seqlens:
        yield first_q, len_q, first_k, len_k
        first_q, first_k = first_q + len_q, first_k + len_k
    yield first_q, case.len_q - first_q, first_k, 0


SM_90 = (
    packed((70, 1, 33, 64)),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33), (129, 3))),
    packed((20, 33), behind=(90, 70)),
    packed((), behind=(5, 9)),
    packed((2, 3) * 4 + (0,) * 8),
)


@interpreted
@cases(*SM_90)
def test_the_table_of_packed_tiles(case):
    """What the sm_90 forward reads instead of searching: every query in one tile, with its sequence."""
    from fused_rope_attn.attention.prepass import RotateKeys
    from fused_rope_attn.attention.prepass_kernel import TABLE

    masks, tensors = packed_masks(case)
    inputs = make_inputs(case)
    config = configs.HopperForwardConfig(128, rotate_rows=64, pdl=False)
    options = (case.rotary, False, config, True, masks)
    rotate = RotateKeys(inputs.k, inputs.cos, inputs.sin, *options, tiles=(case.len_q, 32))
    counter = torch.full((rotate.counter_size,), -7, dtype=torch.int32)
    rotate(0, inputs.k, inputs.cos, inputs.sin, counter, tensors)
    table = [tuple(row[:5]) for row in counter.reshape(-1, TABLE.value)[1:].tolist()]
    expected = [
        (first_q + start, first_q + len_q, first_k, len_k, len_q)
        for first_q, len_q, first_k, len_k in sequences_of(case)
        for start in range(0, len_q, 32)
    ]
    assert counter[0] == 0 and [row for row in table if row[0] < row[1]] == expected


LENGTHS = (replace(PAIR, dtype=F32), replace(PAIR, dtype=F32, kv_lens=(100, 3)), replace(PAIR, len_q=130, dtype=F32))


@interpreted
@cases(*LENGTHS, *(replace(case, dtype=F32) for case in SM_90))
def test_rotated_queries(case):
    """What the sm_90 forward of wide heads reads: the queries that exist, at their positions, times a sign."""
    from fused_rope_attn.attention.prepass import RotateQueries

    inputs = make_inputs(case)
    if case.seqlens is None:
        tensors = (None, None, masks_of(case)["kv_lens"], None, None)
        masks = describe_masks(case.causal, -1, -1, 0.0, tensors)
        lens = case.kv_lens or (case.len_k,) * case.batch
        sequences = [(b, 0, case.len_q, min(n, case.len_k)) for b, n in enumerate(lens)]
    else:
        masks, tensors = packed_masks(case)
        sequences = [(0, first, len_q, len_k) for first, len_q, _, len_k in sequences_of(case)]
    config = configs.HopperForwardConfig(64, pdl=False)
    rotate = RotateQueries(inputs.q, case.len_k, inputs.cos, inputs.sin, case.rotary, False, config, -1.0, masks)
    out = rotate(0, inputs.q, inputs.cos, inputs.sin, tensors)
    for batch, first, len_q, len_k in sequences:
        position = torch.arange(len_q) + len_k - len_q
        seen = position >= 0  # others see no key, and may be anything
        rows = slice(first, first + len_q)
        one, two = inputs.q[batch, :, rows][:, seen].chunk(2, -1)
        cos, sin = (table[position[seen]] for table in (inputs.cos, inputs.sin))
        expected = -torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
        torch.testing.assert_close(out[batch, :, rows][:, seen], expected, rtol=1e-6, atol=1e-6)


@interpreted
@quiet
@cases(*(replace(case, sinks=True) for case in SM_90[:4]))
def test_the_padded_buffers_of_packed_sequences(case):
    """The sm_90 backward without its main kernel, which runs on a GPU only and is done here sequence by sequence."""
    from fused_rope_attn.attention.hopper.backward import BackwardCall

    masks, tensors = packed_masks(case)
    inputs = make_inputs(case)
    q, k, v, cos, sin, do = inputs
    exact = run_reference(inputs, case, torch.float64)
    o, lse = exact.o.to(case.dtype), exact.lse.float()
    options = (case.causal, case.scale, case.rotary, False, masks, configs.HopperBackwardConfig(pdl=False))
    run = BackwardCall(do, q, k, v, o, cos, sin, *options)
    group = case.heads_q // case.heads_kv

    def main(stream, q_rot, k_rot, v, do, stats, dq, *rest):
        q_rot, k_rot, v, do, stats, dq = (x.base for x in (q_rot, k_rot, v, do, stats, dq))
        lse, delta = stats.reshape(2, case.heads_q, -1)
        for s, (first_q, len_q, first_k, len_k) in enumerate(sequences_of(case)):
            first, size = (first_q // 64 + s) * 64, -(-len_q // 64) * 64
            rows, keys = slice(first, first + size), slice(first_k, first_k + len_k)
            behind = slice(first + len_q, first + size)
            assert not (
                dq[0, :, rows].any() or q_rot[0, :, behind].any() or lse[:, behind].any() or delta[:, behind].any()
            )
            position = torch.arange(size)[:, None] + len_k - len_q
            hidden = (position < 0) | (torch.arange(len_k) > position if case.causal else False)
            # Where ``stage_rows`` puts them.
            row = torch.arange(size)
            staged = first + row // 8 * 8 + row % 4 * 2 + row // 4 % 2
            for h in range(case.heads_q):
                do_rows = torch.zeros(size, case.head_dim)
                do_rows[:len_q] = do[0, h, first_q : first_q + len_q]
                k_rows, v_rows = k_rot[0, h // group, keys].float(), v[0, h // group, keys].float()
                scores = q_rot[0, h, rows].float() @ k_rows.T * case.scale
                p = torch.exp(scores - lse[h, rows, None] * math.log(2)).masked_fill(hidden, 0.0)
                ds = p * (do_rows @ v_rows.T - delta[h, rows, None])
                dq[0, h, staged, : case.head_dim] += ds @ k_rows

    run.main = main
    dq, _, _, dsinks = run(do, q, k, v, o, lse, cos, sin, tensors)
    eager = run_reference(inputs, case)
    for name, x, y, z in (
        ("dq", dq, exact.dq, eager.dq),
        ("dsinks", dsinks[None], exact.dsinks[None], eager.dsinks[None]),
    ):
        result = compare(name, x, y, z, grad=True, dtype=case.dtype)
        assert result.ok, f"{case.name}: {result}"


@interpreted
@quiet
@cases(
    Case(2, 2, 1, 70, 130, 256, sinks=True),
    Case(1, 2, 2, 130, 70, 136, causal=False, interleaved=True, rotary_dim=64),
)
def test_the_buffers_of_wide_heads(case):
    """The sm_90 backward of head dims beyond 128 without its main kernel: dQ as it adds it, by panels of 8 columns."""
    from fused_rope_attn.attention.hopper.backward import BackwardCall

    inputs = make_inputs(case)
    q, k, v, cos, sin, do = inputs
    exact, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    o, lse = exact.o.to(case.dtype), exact.lse.float()
    tensors = (masks_of(case, "cpu").get("sinks"), None, None, None, None)
    masks = describe_masks(case.causal, -1, -1, 0.0, tensors)
    config = configs.HopperBackwardConfig(pdl=False)
    options = (case.causal, case.scale, case.rotary, case.interleaved, masks, config)
    run = BackwardCall(do, q, k, v, o, cos, sin, *options)

    def main(stream, q_rot, k_rot, v, do, stats, dq, *rest):
        q_rot, k_rot, v, do = (x.base.float() for x in (q_rot, k_rot, v, do))
        lse, delta = stats.base.reshape(2, case.batch, case.heads_q, -1, 1)[..., : case.len_q, :]
        k_rot, v = (x.repeat_interleave(case.heads_q // case.heads_kv, 1) for x in (k_rot, v))
        p = torch.exp2(q_rot @ k_rot.mT * (case.scale / math.log(2)) - lse)
        if case.causal:
            p = p.tril(case.len_k - case.len_q)
        assert not dq.any()
        rows, columns = torch.arange(case.len_q)[:, None], torch.arange(case.head_dim)
        words = rows // 64 * (64 * 256) + columns // 8 * 512 + rows % 64 * 8 + columns % 8
        dq.view(case.batch, case.heads_q, -1)[:, :, words] = (p * (do @ v.mT - delta)) @ k_rot

    run.main = main
    dq, _, _, *dsinks = run(do, q, k, v, o, lse, cos, sin, tensors)
    found = [("dq", dq, exact.dq, eager.dq)]
    if case.sinks:
        found.append(("dsinks", dsinks[0][None], exact.dsinks[None], eager.dsinks[None]))
    for name, x, y, z in found:
        result = compare(name, x, y, z, grad=True, dtype=case.dtype)
        assert result.ok, f"{case.name}: {result}"


@cases(*PACKINGS)
def test_the_packed_reference(case):
    """Its mask of the whole batch against each sequence by itself."""
    case = replace(case, dtype=F32)
    inputs = make_inputs(case)
    out, expected = run_op(inputs, case, backend="reference"), run_reference(inputs, case, torch.float64)
    for x, y in zip((*out, out.dsinks), (*expected, expected.dsinks)):
        if x is not None and x.numel():
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


@interpreted
def test_more_sequences_than_are_counted_at_once():
    """The search for a tile's sequence goes through a second chunk; nearly all sequences are empty."""
    lengths = [0] * 1100
    lengths[3], lengths[1050], lengths[1051] = 5, 40, 1
    case = packed(tuple(lengths), dtype=F32, heads_q=1)
    inputs = make_inputs(case)
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    q, k, v = (x[0].transpose(0, 1) for x in inputs[:3])
    with torch.no_grad():
        out = [
            rope_attention_varlen(q, k, v, inputs.cos, inputs.sin, cu, cu, 40, 40, True, backend=backend)
            for backend in ("triton", "reference")
        ]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)


@interpreted
@quiet
@both
@pytest.mark.parametrize("backend", ["triton", "reference"])
@cases(
    replace(PAIR, kv_starts=(10, 70), kv_lens=(100, 105), dtype=F32),
    replace(PAIR, kv_starts=(10, 70), kv_lens=(100, 105), dtype=F32, causal=False),
    Case(1, 1, 1, 10, 140, 16, window=(50, 0), dtype=F32),
    packed((20, 33), behind=(40, 70), dtype=F32),
)
def test_nan_in_keys_that_nobody_reaches(case, backend, strategy):
    """... and in query rows that see nothing, and their dO: the same numbers, and zero gradients there."""
    inputs = make_inputs(case)
    q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    choice = {"backend": backend, "strategy": strategy if backend == "triton" else "auto"}
    expected = run_op(inputs, case, **choice)
    for b in range(case.batch):
        if case.seqlens is not None:
            k[:, :, 53:], v[:, :, 53:] = math.nan, math.nan
            q[:, :, 53:], do[:, :, 53:] = math.nan, math.nan
        elif case.window is not None:
            k[b, :, : 130 - 50], v[b, :, : 130 - 50] = math.nan, math.inf
        else:
            k[b, :, : case.kv_starts[b]], v[b, :, : case.kv_starts[b]] = math.nan, math.inf
            k[b, :, case.kv_lens[b] :], v[b, :, case.kv_lens[b] :] = math.inf, math.nan
            if case.causal:
                dead = case.kv_starts[b] - case.kv_lens[b] + case.len_q
                q[b, :, : max(0, dead)], do[b, :, : max(0, dead)] = math.nan, math.nan
    out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **choice)
    for name, x, y in zip(out._fields, out, expected):
        assert torch.equal(x, y), name


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_sequences_do_not_see_each_other():
    """NaN in one sequence stays there."""
    case = packed((40, 50, 30), dtype=F32)
    inputs = make_inputs(case)
    changed = inputs._replace(**{n: getattr(inputs, n).clone() for n in ("q", "k", "v", "do")})
    for x in (changed.q, changed.k, changed.v, changed.do):
        x[:, :, 40:90] = math.nan
    expected, out = (run_op(x, case, backend="triton", strategy="prepass") for x in (inputs, changed))
    for x, y in zip(out, expected):
        assert torch.equal(x[:, :, :40], y[:, :, :40]) and torch.equal(x[:, :, 90:], y[:, :, 90:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@cases(
    packed(((10, 20), (7, 3), (0, 5), (4, 0), (1, 9), (12, 12)), behind=(3, 6), dtype=F32),
    packed(((10, 20), (7, 3), (0, 5), (4, 0), (1, 9), (12, 12)), behind=(3, 6), causal=False, dtype=torch.float64),
    packed((9, 1, 6), window=(3, 0), softcap=4.0, sinks=True),
)
def test_the_packed_reference_keeps_bad_values_where_they_are(case, bad):
    """In each sequence in turn, and behind the last: o and every gradient of the others stay what they were, to the
    bit, as do rows of the same sequence whose window does not reach a bad key."""
    inputs = make_inputs(case)
    expected = run_op(inputs, case, backend="reference")
    for first_q, len_q, first_k, len_k in sequences_of(case):
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        if len_k == 0:  # of what lies behind the last sequence the keys too
            rows_k = slice(first_k, case.len_k if first_q + len_q == case.len_q else first_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, backend="reference")
        if 0 < len_q <= len_k:  # all of them see a key
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any()), "what a row sees must not be hidden"
            assert not bool(torch.isfinite(out.dv[:, :, rows_k]).all())
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
            assert torch.equal(x, y), (name, rows)
    if case.window is not None:
        first, (length, _) = sum(n for n, _ in case.seqlens[:-1]), case.seqlens[-1]
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, first], v[:, :, first] = bad, bad
        out = run_op(inputs._replace(k=k, v=v), case, backend="reference")
        seeing = slice(first, first + 1 + case.window[0])
        hidden = slice(first + 1 + case.window[0], first + length)
        assert not bool(torch.isfinite(out.o[:, :, seeing]).any())
        for x, y in ((out.o, expected.o), (out.dq, expected.dq)):
            assert torch.equal(x[:, :, hidden], y[:, :, hidden])


def test_the_packed_reference_differentiates_and_compiles():
    """Its products are autograd functions of its own: twice differentiable, one graph."""
    case = packed(((2, 3), (3, 1), (0, 2), (3, 4)), behind=(1, 1), dtype=torch.float64, heads_q=4, heads_kv=2)
    inputs = make_inputs(case)
    ends = torch.tensor([[0, 2, 5, 5, 8], [0, 3, 4, 6, 10]], dtype=torch.int32)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def run(q, k, v):
        packed_inputs = (x[0].transpose(0, 1) for x in (q, k, v))
        return rope_attention_varlen(*packed_inputs, inputs.cos, inputs.sin, *ends, 3, 4, True, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v), fast_mode=True)
    torch._dynamo.reset()
    do = torch.randn_like(run(q, k, v))
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        o = function(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


@interpreted
@both
def test_reruns_are_bitwise_equal(strategy):
    for case in (COMBINED[3], packed((30, 0, 40), sinks=True)):
        inputs = make_inputs(case)
        first, again = (run_op(inputs, case, backend="triton", strategy=strategy) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip((*first, first.dsinks), (*again, again.dsinks)))


@interpreted
def test_blocks_outside_are_not_visited():
    """The ranges that the kernels walk through: as long as the window, however long the sequence."""
    import triton
    import triton.language as tl

    @triton.jit
    def ranges(out_ptr, start_m, NK, left, MIRRORED: tl.constexpr):
        start = tl.maximum(0, -left)
        if MIRRORED:
            first, full_first, full_last, last = query_range(start_m, 0, NK, NK, start, left, None, True, False, 64, 64)
        else:
            first, full_first, full_last, last = key_range(start_m, 0, NK, start, left, None, True, False, 64, 64)
        tl.store(out_ptr, first)
        tl.store(out_ptr + 1, full_first)
        tl.store(out_ptr + 2, full_last)
        tl.store(out_ptr + 3, last)

    out = torch.zeros(4, dtype=torch.int32)
    ranges[(1,)](out, 16384, 32768, 1024, False)
    # The last row, 16447, sees keys from 15423 on; the first one up to 16384.
    assert out.tolist() == [15360, 15424, 16384, 16448]
    ranges[(1,)](out, 16384, 32768, 1024, True)
    assert out.tolist() == [256, 257, 272, 273]


def test_cu_seqlens_from_position_ids():
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])
    cu, longest = cu_seqlens_from_position_ids(ids)
    assert cu.tolist() == [0, 3, 5, 6, 8, 9, 12] and longest == 3 and cu.dtype == torch.int32
    assert cu_seqlens_from_position_ids(ids[0])[0].tolist() == [0, 3, 5, 6]
    cu, longest = cu_seqlens_from_position_ids(ids, max_sequences=8)
    assert cu.tolist() == [0, 3, 5, 6, 8, 9, 12, 12, 12] and longest == 6
    assert cu_seqlens_from_position_ids(ids, max_sequences=2)[0].tolist() == [0, 3, 5]  # the rest belongs to none
    assert cu_seqlens_from_position_ids(torch.tensor([5, 6, 7, 3, 4]))[0].tolist() == [0, 3, 5]
    assert cu_seqlens_from_position_ids(torch.zeros(2, 0, dtype=torch.int64))[0].tolist() == [0]
    for wrong, error in ((ids.float(), TypeError), (ids[None], ValueError), ([0, 1], TypeError)):
        with pytest.raises(error, match="^position_ids "):
            cu_seqlens_from_position_ids(wrong)
    for wrong, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="^max_sequences "):
            cu_seqlens_from_position_ids(ids, max_sequences=wrong)


def test_packed_refusals():
    q, k, v, cos, sin, _ = make_inputs(Case(1, 2, 1, 6, 6, 16))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    good = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4,
            "max_seqlen_k": 4}  # fmt: skip
    assert rope_attention_varlen(**good).shape == q.shape
    for name, value, error, pattern in (
        ("q", q[None], ValueError, "T_q, HQ, D.*4 dimensions"),
        ("k", None, TypeError, "Tensor.*NoneType"),
        ("v", v[:, 0], ValueError, "T_k, HKV, D.*2 dimensions"),
        ("cu_seqlens_q", [0, 6], TypeError, "Tensor.*list"),
        ("cu_seqlens_k", cu.long(), TypeError, "int32.*int64"),
        ("cu_seqlens_k", cu.to("meta"), ValueError, "device cpu.*meta"),
        ("cu_seqlens_q", cu[None], ValueError, r"\(sequences \+ 1,\).*\(1, 3\)"),
        ("cu_seqlens_q", cu[:0], ValueError, r"\(sequences \+ 1,\).*\(0,\)"),
        ("cu_seqlens_q", cu.repeat_interleave(2)[::2], ValueError, "contiguous.*2"),
        ("cu_seqlens_k", cu[:2], ValueError, r"\(3,\).*\(2,\)"),
        ("max_seqlen_q", 4.0, TypeError, "int.*4.0"),
        ("max_seqlen_k", -1, ValueError, "0 or more.*-1"),
        ("cos", cos[:3], ValueError, "4 positions.*3 rows"),
    ):
        with pytest.raises(error, match=f"^{name} .*{pattern}"):
            rope_attention_varlen(**(good | ({"sin": sin[:3]} if name == "cos" else {}) | {name: value}))
    with pytest.raises(RuntimeError, match="^backend='hopper' needs an sm_90 GPU"):
        rope_attention_varlen(**good, backend="hopper")


@interpreted
@pytest.mark.unpoisoned
def test_packed_sequences_compile():
    torch._dynamo.reset()
    case = packed((5, 9, 3), dtype=F32, sinks=True)
    inputs = make_inputs(case)
    cu = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    sinks = masks_of(case)["sinks"].requires_grad_()

    def run(q, k, v, sinks):
        return rope_attention_varlen(
            q, k, v, inputs.cos, inputs.sin, cu, cu, 9, 9, True, window=(4, 0), sinks=sinks, backend="triton"
        )

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        tensors = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3]] + [sinks]
        o = function(*tensors)
        results.append((o, *torch.autograd.grad(o, tensors, inputs.do[0].transpose(0, 1))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


@interpreted
def test_plans_of_masked_calls():
    q, k, v, cos, sin, _ = make_inputs(Case(2, 2, 1, 8, 8, 16, dtype=F16))
    chosen = plan(q, k, v, cos, sin, True, window=(3, 0), strategy="prepass")
    assert chosen.backend == "triton" and chosen.strategy == "prepass"


def test_heads_share_a_section_by_the_longest_sequence():
    """Not by all tokens; as a power of two, so that batches of about the same lengths share their launches."""
    ends = torch.tensor([0, 300, 600], dtype=torch.int32)
    packed_masks = describe_masks(True, -1, -1, 0.0, (None, None, None, ends, ends), 300)
    assert packed_masks.longest(10**6) == 512 and packed_masks.longest(400) == 400
    assert packed_masks == describe_masks(True, -1, -1, 0.0, (None, None, None, ends, ends), 511)
    assert describe_masks(True, 5, -1, 0.0, (None,) * 5).longest(10**6) == 10**6
