"""`patch_model` on tiny models of every supported class, float32 on the CPU: the unpatched model is the reference."""

from collections import Counter

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import attention, patch_model, unpatch_model
from tests.support.hf_models import MODELS, WINDOW, make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
every_model = pytest.mark.parametrize("name", MODELS)
LENGTH = 3 * WINDOW + 1


@pytest.fixture(autouse=True)
def eager_rotation(request, monkeypatch):
    """The interpreter takes apply_rope's kernel by itself: hundreds of steps of generation would take an hour."""
    if "interpreted" not in request.fixturenames:
        monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


@pytest.fixture
def calls(monkeypatch):
    """How often each operator ran in the place of a module's own attention."""
    counts = {}

    def count(name):
        operator = getattr(attention, name)

        def counted(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return operator(*args, **kwargs)

        monkeypatch.setattr(attention, name, counted)

    for name in ("rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache"):
        count(name)
    return counts


def assert_close(got, expected, tolerance, what=""):
    scale = expected.abs().max().item()
    error = (got - expected).abs().max().item()
    assert error <= tolerance * scale + 1e-30, f"{what}: {error:.2e} of {scale:.2e}"


def run(model, ids, grad=False, **inputs):
    """Logits, and with `grad` the gradients of all parameters by name."""
    model.zero_grad()
    logits = model(input_ids=ids, **inputs).logits
    if not grad:
        return logits.detach(), {}
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        weight = weight * mask[:, -ids.shape[1] :, None]
    (logits * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def assert_same(model, ids, present=None, grad=False, **inputs):
    """The model, unpatched, gives what it gives patched: logits to 1e-5, gradients to 1e-4. Leaves it patched."""
    logits, grads = run(unpatch_model(model), ids, grad, **inputs)
    patched, patched_grads = run(patch_model(model), ids, grad, **inputs)
    if present is not None:
        logits, patched = logits[present], patched[present]
    assert_close(patched, logits, 1e-5, "logits")
    assert grads.keys() == patched_grads.keys() and bool(grads) is grad
    for parameter, expected in grads.items():
        assert_close(patched_grads[parameter], expected, 1e-4, parameter)


@every_model
def test_training(name, calls):
    model = make_model(name).train()
    assert_same(model, make_ids(2, LENGTH), grad=True, use_cache=False)
    assert calls == {"rope_attention": 2}


@every_model
def test_padding(name, calls):
    model = make_model(name)
    ids, mask = make_ids(3, LENGTH), torch.ones((3, LENGTH), dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, :20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, position_ids=positions, use_cache=False)
    assert_same(model, ids, mask.bool(), attention_mask=mask)  # positions count padding too, and with a cache
    mask = mask.flip(1)
    assert_same(model, ids, mask.bool(), attention_mask=mask, use_cache=False)
    mask[2, 0] = 0  # both sides
    assert_same(model, ids, mask.bool(), attention_mask=mask.bool(), use_cache=False)
    assert calls == {"rope_attention": 8}


def generate(model, ids, mask, **options):
    options = {
        "max_new_tokens": 14,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    } | options
    out = model.generate(ids, attention_mask=mask, **options)
    return out.sequences, torch.stack(out.scores)


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache, calls):
    model = make_model(name)
    ids, mask = make_ids(3, 13), torch.ones((3, 13), dtype=torch.int64)
    mask[1, :5], mask[2, :10] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    for rows, width in ((slice(3), 13), (slice(1), 4)):  # padded on the left; a prompt shorter than the window
        tokens, scores = generate(model, ids[rows, -width:], mask[rows, -width:], **options)
        patched_tokens, patched_scores = generate(
            patch_model(model), ids[rows, -width:], mask[rows, -width:], **options
        )
        assert torch.equal(tokens, patched_tokens)
        assert_close(patched_scores, scores, 1e-5, "scores")
        unpatch_model(model)
    # Two prompts, and the steps after them. transformers 4.57 gives the patched model the unpatched one's static cache,
    # whose layers without a window know only on the device that it was emptied: they take the prompts as steps.
    emptied = 0
    if cache == "static" and transformers.__version__ < "5":
        emptied = 2 * sum(not layer.is_sliding for layer in model._cache.layers)
    steps = 2 * 2 * 13 + emptied
    assert Counter(calls) == Counter({"rope_attention": 2 * 2 - emptied, "rope_attention_with_kvcache": steps})


@every_model
def test_beams(name, calls):
    model = make_model(name)
    ids, mask = make_ids(2, 9), torch.ones((2, 9), dtype=torch.int64)
    mask[1, :4] = 0
    options = {"num_beams": 3, "max_new_tokens": 6, "output_scores": False}
    expected = model.generate(ids, attention_mask=mask, do_sample=False, num_beams=3, max_new_tokens=6)
    patched = patch_model(model).generate(ids, attention_mask=mask, do_sample=False, num_beams=3, max_new_tokens=6)
    assert torch.equal(expected, patched)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2 * (options["max_new_tokens"] - 1)}
