"""Runs of a tiny model of hf_models.py, patched and not, and how their results are compared."""

import functools

import torch

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_models import WINDOW

LENGTH = 3 * WINDOW + 1


def assert_close(got, expected, tolerance, what=""):
    scale = expected.abs().max().item()
    error = (got - expected).abs().max().item()
    assert error <= tolerance * scale + 1e-30, f"{what}: {error:.2e} of {scale:.2e}"


def noted(monkeypatch, owner, name):
    """The arguments and keywords of every call of a function that its owner has under a name."""
    calls, own = [], getattr(owner, name)

    @functools.wraps(own)
    def note(*args, **kwargs):
        calls.append((args, kwargs))
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, note)
    return calls


def run(model, ids, grad=False, **inputs):
    """Logits, and with `grad` the gradients of all parameters by name."""
    model.zero_grad()
    logits = model(input_ids=ids, **inputs).logits
    if not grad:
        return logits.detach(), {}
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits.device)
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        weight = weight * mask[:, -ids.shape[1] :, None]
    (logits * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def assert_same(model, ids, present=None, grad=False, unsupported="raise", **inputs):
    """The model, unpatched, gives what it gives patched: logits to 1e-5, gradients to 1e-4. Leaves it patched."""
    logits, grads = run(unpatch_model(model), ids, grad, **inputs)
    patched, patched_grads = run(patch_model(model, unsupported=unsupported), ids, grad, **inputs)
    if present is not None:
        logits, patched = logits[present], patched[present]
    assert_close(patched, logits, 1e-5, "logits")
    assert grads.keys() == patched_grads.keys() and bool(grads) is grad
    for parameter, expected in grads.items():
        assert_close(patched_grads[parameter], expected, 1e-4, parameter)
