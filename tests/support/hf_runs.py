"""Runs of a tiny model of hf_models.py, patched and not, whole or in parts, and how their results are compared."""

import functools

import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_models import WINDOW

LENGTH = 3 * WINDOW + 1
# Ends of the parts of a sequence: one token and several, before, across and after the window's end. The last part is
# longer than the generation step takes.
ENDS = (5, 7, 10, 11, 13, 53)
CAPACITY = 56
STATIC = {"cache_implementation": "static"}


def assert_close(got, expected, tolerance, what=""):
    scale = expected.abs().max().item()
    error = (got - expected).abs().max().item()
    assert error <= tolerance * scale + 1e-30, f"{what}: {error:.2e} of {scale:.2e}"


def left_padded(length, *starts, device="cpu"):
    """A padding mask (B, length): the first token of every row."""
    return (torch.arange(length) >= torch.tensor(starts)[:, None]).long().to(device)


def declared(*lengths):
    """The arguments by which a model is told the lengths of the sequences in a row."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


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


def assert_same(model, ids, present=None, grad=False, unsupported="raise", tolerance=1e-5, **inputs):
    """The model, unpatched, gives what it gives patched; gradients to ten times the tolerance. Leaves it patched."""
    logits, grads = run(unpatch_model(model), ids, grad, **inputs)
    patched, patched_grads = run(patch_model(model, unsupported=unsupported), ids, grad, **inputs)
    if present is not None:
        logits, patched = logits[present], patched[present]
    assert_close(patched, logits, tolerance, "logits")
    assert grads.keys() == patched_grads.keys() and bool(grads) is grad
    for parameter, expected in grads.items():
        assert_close(patched_grads[parameter], expected, 10 * tolerance, parameter)


def generate(model, new, **options):
    """Greedy tokens and their logits."""
    options |= {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model.__dict__.pop("_cache", None)  # transformers 4.57 keeps it for the next call, full of tokens
    out = model.generate(**options)
    return out.sequences, torch.stack(out.logits)


def assert_same_generation(model, new, unsupported="raise", **options):
    tokens, logits = generate(unpatch_model(model), new, **options)
    patched_tokens, patched_logits = generate(patch_model(model, unsupported=unsupported), new, **options)
    assert torch.equal(tokens, patched_tokens)
    assert_close(patched_logits, logits, 1e-5)


def make_cache(model, kind, capacity=CAPACITY):
    """A cache of a kind, "dynamic" or "static", or of a class of static ones."""
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return (transformers.StaticCache if kind == "static" else kind)(config=model.config, max_cache_len=capacity)


def parts(model, past, ids, mask=None, ends=ENDS):
    """Logits of a sequence that the model is given in parts, with the cache between them."""
    logits = []
    for start, end in zip((0, *ends), ends):
        part = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], attention_mask=part, past_key_values=past).logits)
    return torch.cat(logits, dim=1)


def steps(model, past, ids, start):
    """Logits of the tokens from ``start`` on, one by one."""
    return torch.cat([model(ids[:, i : i + 1], past_key_values=past).logits for i in range(start, ids.shape[1])], dim=1)
