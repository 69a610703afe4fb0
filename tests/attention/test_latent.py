"""Multi-head latent attention: what models compute, and the kernels that run."""

import pytest
import torch
import torch.nn.functional as F

from fused_rope_attn import plan_mla, rope_attention_mla
from fused_rope_attn.rotation.reference import rotate
from tests.support.dtypes import BF16, F64
from tests.support.marks import interpreted
from tests.support.planning import kinds
from verification.testing import LatentCase, make_latent_inputs, run_latent_op


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_the_reference_is_what_models_compute(interleaved, window):
    """Concatenate, expand and attend, as DeepSeek's code does: values and gradients."""
    case = LatentCase(2, 3, 9, 12, interleaved=interleaved, window=window, dtype=F64)
    inputs = make_latent_inputs(case)
    out = run_latent_op(inputs, case, backend="reference")
    distance = torch.arange(9)[:, None] + 3 - torch.arange(12)
    mask = (distance >= 0) & (distance <= (window or (99, 0))[0])
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    q_nope, q_rope, k_nope, k_rope, v = leaves
    q_rot, k_rot = (
        rotate(x, *(t[-x.shape[2] :].to(F64) for t in (inputs.cos, inputs.sin)), interleaved=interleaved)
        for x in (q_rope, k_rope)
    )
    q, k = torch.cat((q_nope, q_rot), -1), torch.cat((k_nope, k_rot.expand(-1, case.heads, -1, -1)), -1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)
    for x, y in zip((out.o, *out[2:]), [o, *torch.autograd.grad(o, leaves, inputs.do)], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def meta_rows(heads=16, length=4096, columns=(128, 64, 128)):
    """Return the arguments of a call without memory: a query head has columns[0] + columns[1] columns, v columns[2]."""
    nope, rope, value = columns
    widths = ((heads, nope), (heads, rope), (heads, nope), (1, rope), (heads, value))
    rows = (torch.empty(1, length, h, width, dtype=BF16, device="meta").transpose(1, 2) for h, width in widths)
    table = torch.empty(length, rope // 2, device="meta")
    return (*rows, table, table)


def test_auto_takes_the_sm_90_kernels_at_the_widths_of_deepseek(arch):
    for options in ({}, {"deterministic": True}, {"kv_lens": torch.empty(1, dtype=torch.int32, device="meta")}):
        found = plan_mla(*meta_rows(), True, **options)
        assert kinds(found) == "HH" and "made for this card" in found.reason and found.saves_rotated
    widths = "must have 128, 64, 128 columns for backend='hopper', but have 128, 64, 112"
    for rows, options, reason in (
        (meta_rows(columns=(128, 64, 112)), {}, widths),
        (meta_rows(), {"softmax_scale": -0.1}, "softmax_scale must be positive for backend='hopper'"),
        (meta_rows(), {"softmax_scale": 0.0}, "softmax_scale must be positive for backend='hopper'"),
        (meta_rows(heads=1, length=512), {}, "a launch-bound call"),
    ):
        found = plan_mla(*rows, True, **options)
        assert found.backend == "triton" and reason in found.reason
        if "hopper" in reason:
            with pytest.raises(NotImplementedError, match=reason.split(",")[0]):
                plan_mla(*rows, True, **options, backend="hopper")
    arch("sm_80")
    with pytest.raises(RuntimeError, match="needs an sm_90 GPU"):
        plan_mla(*meta_rows(), True, backend="hopper")


@interpreted
@pytest.mark.parametrize(
    ("name", "changes"), [("q_rope", {"rope": 80}), ("q_nope", {"nope": 40}), ("v", {"value": 144})]
)
def test_an_explicit_backend_says_which_widths_it_serves(name, changes):
    inputs = make_latent_inputs(LatentCase(1, 2, 5, 5, **changes))[:7]
    with pytest.raises(NotImplementedError, match=f"{name} must have a number of columns that is a multiple of 16"):
        rope_attention_mla(*inputs, backend="triton")
    assert plan_mla(*inputs).backend == "reference" and rope_attention_mla(*inputs).isfinite().all()
