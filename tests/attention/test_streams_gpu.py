"""The kernels among streams, graphs, threads and devices, without ever waiting for the GPU."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import cu_seqlens_from_position_ids, rope_attention, rope_attention_varlen
from tests.support import gpu
from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.marks import cases
from tests.support.places import PADDED, assert_same, both_backends, each_backend
from verification.testing import Inputs, Results, make_inputs, masks_of, norms_of, run_op

pytestmark = pytest.mark.gpu


@each_backend
@cases(replace(gpu.ODD_LENGTHS, len_q=64, len_k=64), replace(gpu.ODD_LENGTHS, len_q=700, norms=0.0))
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_replays_with_other_inputs(case, chosen, deterministic):
    options = norms_of(case, "cuda") | chosen | {"deterministic": deterministic}
    for fresh, (o, *gradients) in gpu.replayed(case, seeds=(1, 2), **options):
        lse = run_op(fresh, case, **chosen, deterministic=deterministic).lse
        assert_matches_float64(case, fresh, Results(o, lse, *gradients))


LENGTHS = [
    replace(PADDED, kv_starts=starts, kv_lens=lens)
    for starts, lens in (((0, 0), (700, 700)), ((0, 0), (700, 333)), ((640, 3), (700, 260)), ((0, 100), (0, 700)))
]
INTERVALS = [replace(gpu.ODD_LENGTHS, causal=False, intervals="random", seed=seed) for seed in (0, 3, 4)]
PACKED = [packed_case(gpu.ODD_LENGTHS, n) for n in ((300, 0, 401, 99), (800, 0, 0, 0), (1, 64, 65, 670))]


@both_backends
@pytest.mark.parametrize(
    "variants", [LENGTHS, INTERVALS, PACKED, [replace(case, head_dim=256) for case in PACKED]],
    ids=["lengths", "intervals", "packed", "packed, D 256"],
)  # fmt: skip
def test_masks_change_under_a_graph(variants, chosen):
    """They are read on the device: no synchronisation (``gpu.capture`` watches), and a replay sees the new ones."""
    first = variants[0]
    inputs = make_inputs(first, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def tensors(case):
        if case.seqlens is None:
            return {name: x for name, x in masks_of(case, "cuda").items() if isinstance(x, torch.Tensor)}
        ends = torch.tensor([0, *(n for n, _ in case.seqlens)], device="cuda").cumsum(0).int()
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends.clone()}

    masks = tensors(first)

    def step():
        if first.seqlens is None:
            o, lse = rope_attention(q, k, v, *inputs[3:5], first.causal, return_lse=True, **masks, **chosen)
        else:
            rows = (x[0].transpose(0, 1) for x in (q, k, v))
            given = *rows, *inputs[3:5], *masks.values(), 800, 800, True
            o, lse = rope_attention_varlen(*given, return_lse=True, **chosen)
            o, lse = o.transpose(0, 1)[None], lse[None]
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), inputs.do)

    graph, captured = gpu.capture(step)
    for case in variants:
        for name, x in tensors(case).items():
            masks[name].copy_(x)
        graph.replay()
        assert_matches_float64(case, inputs, Results(*captured))


def test_position_ids_need_no_synchronisation():
    lengths = (16, 333, 0, 1, 700, 64, 129)
    position_ids = torch.cat([torch.arange(n) for n in lengths]).cuda()
    with gpu.no_synchronisation():
        ends, longest = cu_seqlens_from_position_ids(position_ids, max_sequences=len(lengths))
    seen = [0, *torch.tensor([n for n in lengths if n]).cumsum(0).tolist()]
    assert ends.tolist() == [*seen, seen[-1]] and longest == len(position_ids)


@each_backend
def test_another_stream(chosen):
    inputs = make_inputs(gpu.ODD_LENGTHS, "cuda")
    expected = run_op(inputs, gpu.ODD_LENGTHS, **chosen)
    assert_same(gpu.run_with_late_inputs(inputs, gpu.ODD_LENGTHS, **chosen), expected, chosen)


@each_backend
def test_backward_from_another_thread(chosen):
    inputs = make_inputs(gpu.ODD_LENGTHS, "cuda")
    expected = run_op(inputs, gpu.ODD_LENGTHS, **chosen)
    dq, dk, dv = gpu.gradients_from_another_thread(inputs, **chosen)
    assert_equal((dk, dv), expected[3:])
    gpu.assert_alike([dq], [expected.dq])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@each_backend
def test_a_second_device(chosen):
    inputs = make_inputs(gpu.ODD_LENGTHS, "cuda:0")
    expected = run_op(inputs, gpu.ODD_LENGTHS, **chosen)
    there = Inputs(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = run_op(there, gpu.ODD_LENGTHS, **chosen)
        assert all(x.device == torch.device("cuda:1") for x in out)
        assert_same([x.to("cuda:0") for x in out], expected, chosen)
