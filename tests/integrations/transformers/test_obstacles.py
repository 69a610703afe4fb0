"""The host's view of a call: the reason for the modules' own attention, and unsupported arguments."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fused_rope_attn.integrations.transformers import obstacles
from fused_rope_attn.integrations.transformers.obstacles import (
    Pass,
    is_blind,
    is_causal,
    layer_of,
    may_have_images,
    obstacle,
    refuse_wrong_calls,
)

# transformers 4.57 makes masks of all position ids, unless it makes a cache.
UNMASKED = False if transformers.__version__ >= "5" else None


def attention(implementation="sdpa", **attributes):
    """An attention module with the attributes that these questions read, the only one of its decoder."""
    config = SimpleNamespace(_attn_implementation=implementation)
    return [SimpleNamespace(config=config, training=False, is_causal=True, layer_idx=0, **attributes)]


def test_block_masks_are_for_flex_attention():
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 16, 16, device="cpu")
    for implementation in ("flex_attention", "paged|flex_attention"):
        refuse_wrong_calls(Pass(attention(implementation), None, {"attention_mask": blocks}))
    for implementation in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=f"attention_mask is a BlockMask.*model's is '{implementation}'"):
            refuse_wrong_calls(Pass(attention(implementation), None, {"attention_mask": blocks}))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (None, ""),
        (torch.ones(2, 5), ""),
        (torch.ones(5), "an attention_mask that is not (B, keys)"),
        (torch.ones(2, 1, 5, 5), "an attention_mask that is not (B, keys)"),
        ("causal", "an attention_mask that is not (B, keys)"),
        ({"full_attention": None}, "a mask for each type of layer, made outside of the patched model,"),
    ],
    ids=str,
)
def test_forms_of_masks(mask, reason):
    assert obstacle(Pass(attention(), SimpleNamespace(), {"attention_mask": mask}), True) == reason


@pytest.mark.parametrize(
    ("of_config", "of_call", "reason"),
    [(False, None, ""), (True, None, "output_attentions=True"), (True, False, ""),
     (False, True, "output_attentions=True")],
)  # fmt: skip
def test_attention_weights(of_config, of_call, reason):
    """A call's argument overrides the config's."""
    config = SimpleNamespace(output_attentions=of_config)
    assert obstacle(Pass(attention(), config, {"output_attentions": of_call}), True) == reason


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([[0, 0], [0, 0]], False),
        ([[0, 0], [0, 1]], True),
        ([[0, 1]], True),
        ([[1], [1]], False),  # a step: the last token of an image sees what causal attention shows
        ([[0, 2], [2, 0]], False),
        ([[0, -1], [2, 0]], False),
    ],
    ids=str,
)
def test_images(types, expected):
    model = SimpleNamespace()
    assert may_have_images(model, {"token_type_ids": torch.tensor(types)}) is expected
    assert may_have_images(model, {"token_type_ids": torch.tensor(types, device="meta")}) is (len(types[0]) > 1)
    assert not may_have_images(model, {"token_type_ids": None}) and not may_have_images(model, {})


@pytest.mark.parametrize(
    ("own", "of_config", "of_call", "causal"),
    [
        ((True, True), None, None, True),
        ((False, False), None, None, False),
        ((True, False), None, None, None),
        ((True, False), False, None, None),
        ((True,), False, None, False),
        ((True,), False, True, True),
        ((True,), True, False, False),
        ((True,), None, True, True),
        ((False,), None, True, None),
        ((False,), True, None, None),
        ((False,), None, False, False),
        ((False,), True, False, False),
    ],
)
def test_who_says_whether_attention_is_causal(own, of_config, of_call, causal):
    given = {} if of_call is None else {"is_causal": of_call}
    modules = [SimpleNamespace(is_causal=x) for x in own]
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    if of_config is not None:
        config.is_causal = of_config
    assert is_causal(Pass(modules, config, given)) is causal


@pytest.mark.parametrize(
    ("implementation", "given", "causal"),
    [
        ("eager", {}, True),
        ("flex_attention", {}, True),
        ("flash_attention_2", {}, False),
        ("sdpa", {}, UNMASKED),
        ("sdpa", {"attention_mask": torch.ones(2, 5)}, False),
        ("sdpa", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])}, True),
        ("sdpa", {"position_ids": torch.arange(3, 8)[None]}, UNMASKED),
        ("sdpa", {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, None),
        ("sdpa", {"past_key_values": transformers.DynamicCache()}, None),
        ("sdpa", {"input_ids": torch.ones(2, 8)}, None),
        ("sdpa", {"input_ids": torch.ones(2, 1), "past_key_values": transformers.DynamicCache()}, True),
        ("sdpa", {"input_ids": torch.ones(2, 5, device="meta")}, None),
        ("sdpa", {"cache": object.__new__(PagedAttentionCache)}, True),
        ("sdpa", {"input_ids": None}, False),
        ("sdpa", {"input_ids": None, "attention_mask": torch.ones(2, 1, 5, 5)}, True),
    ],
)
def test_what_the_modules_say_of_causality_alone(implementation, given, causal):
    """Only flash-attention always follows them: the masks of all others are causal, and SDPA may get none."""
    config = SimpleNamespace(_attn_implementation=implementation, sliding_window=8)
    given = {"input_ids": torch.ones(2, 5)} | given
    assert is_causal(Pass([SimpleNamespace(is_causal=False)], config, given)) is causal


@pytest.mark.parametrize(("index", "place"), [(3, 3), (0, 0), (None, 0), ("first", 0)])
def test_places_in_a_cache(index, place):
    assert layer_of(SimpleNamespace(layer_idx=index)) == place and layer_of(SimpleNamespace()) == 0


def test_nobody_looks_at_what_is_being_captured(monkeypatch):
    assert not is_blind(torch.ones(2)) and is_blind(torch.ones(2, device="meta"))
    monkeypatch.setattr(obstacles, "is_capturing", lambda device: True)
    assert is_blind(torch.ones(2))


@pytest.mark.parametrize(
    ("places", "known"), [((0,), True), ((1,), False), ((0, 1), False), ((2,), True), ((0, 3), True), ((), True)]
)
def test_layers_of_a_cache(places, known):
    """Those of attention modules hold keys and values, or do not exist yet; those of others may be anything."""
    past = transformers.DynamicCache()
    past.layers = [DynamicLayer(), object()]
    modules = [SimpleNamespace(**vars(attention()[0]) | {"layer_idx": place}) for place in places] or attention()
    reason = obstacle(Pass(modules, SimpleNamespace(), {"past_key_values": past}), True)
    assert reason == ("" if known else "a cache of type DynamicCache")


@pytest.mark.parametrize(
    ("of_attention", "of_mask", "reason"),
    [
        (None, None, ""),
        (("transformers.somewhere", "sdpa_attention_forward"), None, ""),
        (("transformers.somewhere", "sage_attention_forward"), None, "the attention function transformers.somewhere."),
        (("somebody.somewhere", "sdpa_attention_forward"), None, "the attention function somebody.somewhere."),
        (None, "somebody.masks", "the mask function somebody.masks."),
        (None, "unsloth.masks", "the mask function unsloth.masks."),
    ],
    ids=str,
)
def test_whose_functions_are_whose(of_attention, of_mask, reason, monkeypatch):
    """Functions of transformers are known by their module and by their names."""

    def mine(*args, **kwargs):
        raise AssertionError

    def masks(*args, **kwargs):
        raise AssertionError

    if of_attention is not None:
        mine.__module__, mine.__name__ = of_attention
    masks.__module__ = of_mask
    functions = transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(functions[0], "mine", mine if of_attention else sdpa_attention_forward)
    monkeypatch.setitem(functions[1], "mine", masks if of_mask else masking_utils.sdpa_mask)
    found = obstacle(Pass(attention("mine"), SimpleNamespace(), {}), True)
    assert found.startswith(reason) and found.endswith("registered as 'mine'," if reason else "")
    assert bool(found) is bool(reason)
