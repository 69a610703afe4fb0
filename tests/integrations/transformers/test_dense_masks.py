"""Masks of four dimensions: those that are intervals of queries are served, with gradients, and no others."""

import pytest
import torch
import transformers

from fused_rope_attn import masks
from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run
from tests.support.hf_vision_models import make_inputs, make_vision_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROWS = torch.arange(LENGTH)


def dense(starts, ends):
    """The matrix (B, 1, N, N) of intervals (B, N)."""
    return ((starts[:, None, :] <= ROWS[:, None]) & (ROWS[:, None] < ends[:, None, :]))[:, None]


def random_intervals(rows, seed):
    """Every query sees itself, and each key is seen by some adjacent queries."""
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.rand((2, rows, LENGTH), generator=generator)
    starts = (ROWS * before).long()
    return starts, ROWS + 1 + ((LENGTH - ROWS - 1) * after).long()


def added(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def own_reasons(model):
    return {reason for row in patch_report(model) for reason in row.own}


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("form", ["bool", "added", "infinite"])
def test_random_intervals(name, form, calls):
    """Windows of the modules do not matter: the mask has the last word."""
    model = make_model(name)
    if form == "bool":
        if name in ("gemma2", "gpt_oss"):
            pytest.skip("SDPA has neither a softcap nor sinks")
        model.set_attn_implementation("sdpa")
    mask = dense(*random_intervals(2, seed=4))
    if form != "bool":
        mask = added(mask) if form == "added" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert_same(model, make_ids(2, LENGTH), grad=True, attention_mask=mask, use_cache=False)
    assert calls == {"rope_attention": 2} and not own_reasons(model)


def test_a_tree_is_its_branches(calls):
    """One mask for all rows of the batch, and positions that go on from the prompt."""
    starts, ends, positions = masks.prefix_tree([-1, 0, 0], [10, 8, LENGTH - 18])
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    inputs = {"attention_mask": added(dense(starts, ends)), "position_ids": positions}
    assert_same(model, ids, grad=True, use_cache=False, **inputs)
    assert calls == {"rope_attention": 2}
    logits = run(model, ids, use_cache=False, **inputs)[0]
    branch = torch.cat((ids[:, :10], ids[:, 18:]), 1)
    assert_close(logits[:, 18:], run(unpatch_model(model), branch)[0][:, 10:], 1e-5)


@torch.no_grad()
def test_a_prompt_is_put_into_the_cache(calls):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    prompt = added(dense(*masks.prefix_lm(torch.tensor([9, LENGTH]), LENGTH)))

    def logits():
        past = transformers.DynamicCache(config=model.config)
        first = model(ids, attention_mask=prompt, past_key_values=past).logits
        return torch.cat((first, model(ids[:, :1], past_key_values=past).logits), 1)

    expected = logits()
    patch_model(model)
    assert_close(logits(), expected, 1e-5)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2} and not own_reasons(model)


def test_padding_sees_nothing(calls):
    mask = dense(ROWS[None].expand(2, -1), torch.full((2, LENGTH), LENGTH))
    mask[0, :, :, :4] = False
    present = torch.ones((2, LENGTH), dtype=torch.bool)
    present[0, :4] = False
    assert_same(make_model("llama"), make_ids(2, LENGTH), present, attention_mask=added(mask), use_cache=False)
    assert calls == {"rope_attention": 2}


def changed(change):
    mask = dense(ROWS[None], torch.full((1, LENGTH), LENGTH)).repeat(2, 4, 1, 1)
    change(mask)
    return mask


def hole(mask):
    mask[1, :, 9, 3] = False


def head(mask):
    mask[1, 2, 3, 4] = True


def seen_padding(mask):
    mask[0, :, 5] = False  # the row sees nothing, but later rows see its key


GAPS = "an attention_mask in which the queries that see a key are not next to one another"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (added(changed(hole)), GAPS),
        (added(changed(head)), GAPS),
        (added(changed(seen_padding)), GAPS),
        (added(changed(lambda mask: None)) / 1e30, GAPS),  # a bias, which hides nothing
        (changed(lambda mask: None).long(), "an attention_mask that is not (B, keys)"),
        (changed(lambda mask: None), "an attention_mask that is not (B, keys)"),  # eager attention adds a bool
        (added(changed(lambda mask: None)).requires_grad_(), "an attention_mask that is not (B, keys)"),
    ],
    ids=["hole", "head", "seen padding", "bias", "int", "bool", "gradient"],
)
def test_what_is_no_interval_takes_the_own_forward(mask, reason, calls):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    expected = run(model, ids, attention_mask=mask, use_cache=False)[0]
    with pytest.warns(UserWarning, match="not served by the fused kernels"):
        got = run(patch_model(model), ids, attention_mask=mask, use_cache=False)[0]
    assert torch.equal(got, expected) and own_reasons(model) == {reason} and not calls


def test_a_cache_that_holds_tokens(calls):
    model, ids = make_model("llama"), make_ids(1, LENGTH)
    square = added(dense(ROWS[None], torch.full((1, LENGTH), LENGTH)))
    steps = torch.cat((torch.zeros_like(square), square), 3)

    def logits(mask):
        past = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=past)
        return model(ids, attention_mask=mask, past_key_values=past).logits

    expected = logits(steps)
    patch_model(model)
    with pytest.warns(UserWarning, match="not served by the fused kernels"):
        assert_close(logits(steps), expected, 1e-6)
    assert own_reasons(model) == {"an attention_mask of four dimensions with a cache that may hold tokens,"}
    with pytest.raises((RuntimeError, ValueError)):
        logits(square)  # of the wrong shape, which the own forward says


def test_a_mask_for_each_type_of_layer(calls):
    model, ids = make_model("gemma2"), make_ids(2, LENGTH)
    kinds = {module.config.layer_types[module.layer_idx] for module in attentions_of(model)}
    assert len(kinds) == 2
    by_type = {name: added(dense(*random_intervals(2, seed))) for seed, name in enumerate(sorted(kinds))}
    assert_same(model, ids, grad=True, attention_mask=by_type, use_cache=False)
    assert calls == {"rope_attention": 2}


@pytest.mark.parametrize("text", [{}, {"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 10}])
def test_prompts_of_paligemma(text, calls):
    """The whole prompt sees itself, the answer is causal; PaliGemma 2 has windows as well."""
    model, inputs = make_vision_model("paligemma", **text), make_inputs("paligemma")
    model.model.vision_tower.requires_grad_(False)
    ids, types = inputs.pop("input_ids"), inputs.pop("token_type_ids")
    causal = run(model, ids, **inputs, token_type_ids=torch.ones_like(types), labels=ids)[0]
    inputs |= {"token_type_ids": types, "labels": ids, "use_cache": False}
    assert (run(model, ids, **inputs)[0] - causal).abs().max() > 0.1  # so that causal attention would be seen
    assert_same(model, ids, grad=True, unsupported="skip", **inputs)
    assert calls == {"rope_attention": 2} and not own_reasons(model)
