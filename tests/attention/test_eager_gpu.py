"""On a GPU: eager calls that are replayed give what they give when every launch is made anew."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.attention import ops
from fused_rope_attn.runtime.launch import Launch
from tests.support.attention import assert_equal
from tests.support.gpu import ODD_LENGTHS, assert_alike, is_sm_90, misaligned
from tests.support.places import INLINE, ON_SM_90, PREPASS
from verification.testing import Case, make_inputs, masks_of, norms_of

pytestmark = pytest.mark.gpu

PLAIN = Case(1, 4, 4, 128, 128, 64)
# (case, options): after the calls that are recorded, none of these launches a kernel by itself.
CALLS = {
    "inline": (PLAIN, INLINE),
    "pre-pass": (ODD_LENGTHS, PREPASS),
    "sm_90": (ODD_LENGTHS, ON_SM_90),
    "sm_90, a narrow window": (replace(ODD_LENGTHS, window=(40, 0)), ON_SM_90),
    "sm_90, wide heads": (replace(ODD_LENGTHS, head_dim=192), ON_SM_90),
    "lengths": (replace(ODD_LENGTHS, kv_lens=(400, 500)), {"backend": "triton"}),
    "norms": (replace(PLAIN, norms=0.0), {"backend": "triton"}),
    "norms, sm_90": (replace(ODD_LENGTHS, norms=1.0), ON_SM_90),
    "chosen": (PLAIN, {}),
}


@pytest.mark.parametrize(("case", "chosen"), CALLS.values(), ids=CALLS)
def test_replays_give_what_launches_give(case, chosen, monkeypatch):
    """Also with gradients of o of other strides, and with saved tensors that hooks have moved: other calls."""
    if chosen is ON_SM_90 and not is_sm_90():
        pytest.skip("needs an sm_90 GPU")

    def make(seed):
        inputs = make_inputs(replace(case, seed=seed), "cuda")
        options = masks_of(case, "cuda") | norms_of(case, "cuda") | chosen

        def step(do=inputs.do):
            alone = rope_attention(*inputs[:5], True, **options)
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            o, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, True, return_lse=True, **options)
            return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do), alone

        return step, inputs.do

    compare = assert_equal if chosen.get("backend") == "triton" else assert_alike
    steps = [make(seed) for seed in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(ops, "find", lambda *arguments: None)
        expected = [[x.clone() for x in step()] for step, _ in steps]
    for _ in range(3):
        steps[0][0]()
    with monkeypatch.context() as patched:
        patched.setattr(Launch, "__call__", None)
        for seed in (1, 2, 0, 1):
            compare(steps[seed][0](), expected[seed])
    step, do = steps[1]
    apart = do.repeat_interleave(2, -1)[..., ::2]
    for other in (do.transpose(1, 2).contiguous().transpose(1, 2), apart, misaligned(do)):
        for _ in range(4):
            assert_alike(step(other), expected[1])
    for unpack in (misaligned, torch.Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            assert_alike(step(), expected[1])
    ops.forget()
