"""Multi-head latent attention of DeepSeek's widths by both backends: float64, equal bits, plans."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_attn import plan_mla, rope_attention_mla
from tests.support.dtypes import BF16
from tests.support.gpu import assert_alike
from tests.support.internals import go_through_the_dispatcher
from tests.support.marks import cases
from tests.support.places import both_backends, check_on_gpu, only_sm_90
from verification.testing import LatentCase, make_latent_inputs, run_latent_op

DEEPSEEK = LatentCase(2, 6, 333, 700, 128, 64, 128, interleaved=True, dtype=BF16)
PACKED = replace(
    DEEPSEEK, batch=1, len_q=650, len_k=710, lse_gradient=True,
    seqlens=((300, 300), (0, 0), (1, 1), (20, 0), (129, 129), (0, 30), (200, 250)),
)  # fmt: skip
PADDED = replace(DEEPSEEK, kv_starts=(0, 300), kv_lens=(700, 650), lse_gradient=True)
KINDS = {
    "causal": {"causal": True, "window": None, "kv_starts": None, "kv_lens": None, "seqlens": None},
    "masks": {"window": (7, -1), "kv_starts": (), "kv_lens": (), "seqlens": None},
    "packed": {"window": None, "kv_starts": None, "kv_lens": None, "seqlens": ()},
    "packed, a window": {"causal": False, "window": (7, 7), "kv_starts": None, "kv_lens": None, "seqlens": ()},
}


@both_backends
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind, chosen):
    chosen = {"backend": chosen["backend"]}
    check_on_gpu(chosen, "mla", kind, **KINDS[kind], head_dim=64, nope=128, value=128, table_batch=False)


@both_backends
@cases(DEEPSEEK, PADDED, PACKED, replace(DEEPSEEK, len_q=2048, len_k=2048, heads=16))
def test_a_hundred_reruns_are_bitwise_equal(case, chosen):
    inputs, others = make_latent_inputs(case, "cuda"), make_latent_inputs(replace(case, seed=1), "cuda")
    backend = chosen["backend"]
    first = run_latent_op(inputs, case, backend=backend, deterministic=True)
    for _ in range(100):
        # Leave other numbers in the memory that the next run's workspaces get: a kernel may begin before another ends.
        run_latent_op(others, case, backend=backend)
        assert all(torch.equal(x, y) for x, y in zip(first, run_latent_op(inputs, case, backend=backend)))


@both_backends
@cases(PADDED, PACKED)
def test_rows_that_do_not_exist_may_hold_nan(case, chosen):
    """Keys outside of a sequence, and those of the first packed sequence, reach nothing else."""
    inputs = make_latent_inputs(case, "cuda")
    hidden = inputs._replace(**{name: getattr(inputs, name).clone() for name in ("k_nope", "k_rope", "v")})
    for x in (hidden.k_nope, hidden.k_rope, hidden.v):
        x[-1, :, :300] = float("nan")
        if case.seqlens is None:
            x[-1, :, 650:] = float("nan")
    found = zip(*(run_latent_op(x, case, backend=chosen["backend"]) for x in (hidden, inputs)))
    kept = slice(None if case.seqlens is None else 300, None)
    assert all(torch.equal(x[:, :, kept], y[:, :, kept]) for x, y in found)


@only_sm_90
@cases(DEEPSEEK, PADDED, PACKED)
def test_backward_of_saved_and_of_given_queries(case, chosen, monkeypatch):
    """An eager forward pass saves q_rope rotated. Traced calls save what the caller gave."""
    inputs = make_latent_inputs(case, "cuda")
    o, _, *gradients = run_latent_op(inputs, case, **chosen)
    go_through_the_dispatcher(monkeypatch)
    found_o, _, *found = run_latent_op(inputs, case, **chosen)
    assert_alike((found_o, *found), (o, *gradients))


@only_sm_90
def test_the_operator_of_saved_queries(chosen):
    """A mode that watches operators sees one. Its fake results have the layout of the real ones."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((function, args))
            return function(*args, **(kwargs or {}))

    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = rope_attention_mla(*leaves, *inputs[5:7], True, interleaved=True, **chosen)
    expected = torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
    with Watch(), torch.enable_grad():
        found = torch.autograd.grad(o, leaves, inputs.do, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    ((function, arguments),) = [x for x in seen if "attention_backward" in str(x[0])]
    torch.library.opcheck(function, arguments, test_utils="test_faketensor")


@only_sm_90
def test_plans_and_refusals(chosen):
    """The backend "auto" takes these kernels where there is enough work."""
    large, small = (
        make_latent_inputs(replace(DEEPSEEK, batch=1, heads=heads, len_q=512, len_k=512), "cuda")[:7]
        for heads in (2, 1)
    )
    assert plan_mla(*large, True).backend == "hopper"
    found = plan_mla(*small, True)
    assert found.backend == "triton" and found.backward is not None and "a launch-bound call" in found.reason
    assert "softmax_scale must be positive" in plan_mla(*large, True, softmax_scale=-0.1).reason
    with pytest.raises(NotImplementedError, match="softmax_scale must be positive for backend='hopper'"):
        rope_attention_mla(*large, True, softmax_scale=-0.1, **chosen)
    narrow = make_latent_inputs(replace(DEEPSEEK, value=112), "cuda")
    with pytest.raises(NotImplementedError, match="must have 128, 64, 128 columns .* but have 128, 64, 112"):
        rope_attention_mla(*narrow[:7], True, **chosen)
