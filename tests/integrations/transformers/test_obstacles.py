"""The host's view of a call: the reason for the modules' own attention, and unsupported arguments."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers import obstacles
from fused_rope_attn.integrations.transformers.obstacles import Pass, is_blind, is_causal, layer_of, obstacle

# transformers 4.57 makes masks of all position ids, unless it makes a cache.
UNMASKED = False if transformers.__version__ >= "5" else None


def attention(implementation="sdpa", layer=0):
    config = SimpleNamespace(_attn_implementation=implementation)
    return SimpleNamespace(config=config, training=False, is_causal=True, layer_idx=layer)


def cache_of_two_kinds():
    past = transformers.DynamicCache()
    past.layers = [DynamicLayer(), object()]
    return past


BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 16, 16, device="cpu")
MASK = "an attention_mask that is not (B, keys)"
PAGED = "attn_implementation='paged|eager' without the paged cache that it takes (continuous batching)"
WEIGHTS = "output_attentions=True"
FOREIGN_CACHE = "a cache of type DynamicCache"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": torch.ones(2, 5)}, ""),
        ({"attention_mask": torch.ones(5)}, MASK),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, MASK),
        ({"attention_mask": {}}, "a mask for each type of layer, made outside of the patched model,"),
        ({"attention_mask": BLOCKS, "implementation": "flex_attention"}, "a BlockMask"),
        ({"implementation": "paged|eager"}, PAGED),
        # A call's argument overrides the config's.
        ({"of_config": False, "output_attentions": None}, ""),
        ({"of_config": True, "output_attentions": None}, WEIGHTS),
        ({"of_config": True, "output_attentions": False}, ""),
        ({"of_config": False, "output_attentions": True}, WEIGHTS),
        # Layers of attention modules hold keys and values, or do not exist yet; those of others may be anything.
        *(({"layers": layers, "past_key_values": cache_of_two_kinds()}, "") for layers in ((0,), (2,), (0, 3))),
        *(({"layers": layers, "past_key_values": cache_of_two_kinds()}, FOREIGN_CACHE) for layers in ((1,), (0, 1))),
    ],
)
def test_reasons(given, reason):
    given = {"layers": (0,), "of_config": False, "implementation": "sdpa"} | given
    name, config = given.pop("implementation"), SimpleNamespace(output_attentions=given.pop("of_config"))
    modules = [attention(name, layer) for layer in given.pop("layers")]
    assert obstacle(Pass(modules, config, given), True) == reason


def test_block_masks_are_for_flex_attention():
    for implementation in ("flex_attention", "paged|flex_attention"):
        obstacles.refuse_wrong_calls(Pass([attention(implementation)], None, {"attention_mask": BLOCKS}))
    for implementation in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=f"attention_mask is a BlockMask.*model's is '{implementation}'"):
            obstacles.refuse_wrong_calls(Pass([attention(implementation)], None, {"attention_mask": BLOCKS}))


def test_images():
    for types, expected in (
        ([[0, 0], [0, 0]], False),
        ([[0, 0], [0, 1]], True),
        ([[0, 1]], True),
        ([[1], [1]], False),  # a step: the last token of an image sees what causal attention shows
        ([[0, 2], [2, -1]], False),
    ):
        given = torch.tensor(types)
        assert obstacles.may_have_images(None, {"token_type_ids": given}) is expected, types
        assert obstacles.may_have_images(None, {"token_type_ids": given.to("meta")}) is (given.shape[1] > 1)
    assert not obstacles.may_have_images(None, {"token_type_ids": None}) and not obstacles.may_have_images(None, {})


FLASH = "flash_attention_2"
PAST = {"past_key_values": transformers.DynamicCache()}


@pytest.mark.parametrize(
    ("implementation", "own", "of_config", "given", "causal"),
    [
        # The modules, the config and the call may all say whether attention is causal.
        (FLASH, (True, False), None, {}, None),
        (FLASH, (True,), False, {"is_causal": True}, True),
        (FLASH, (False,), None, {"is_causal": True}, None),
        # Only flash-attention always follows the modules: the masks of all others are causal, and SDPA may get none.
        ("eager", (False,), None, {}, True),
        ("flex_attention", (False,), None, {}, True),
        ("sdpa", (False,), None, {}, UNMASKED),
        ("sdpa", (False,), None, {"attention_mask": torch.ones(2, 5)}, False),
        ("sdpa", (False,), None, {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])}, True),
        ("sdpa", (False,), None, {"position_ids": torch.arange(3, 8)[None]}, UNMASKED),
        ("sdpa", (False,), None, {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, None),
        ("sdpa", (False,), None, PAST, None),
        ("sdpa", (False,), None, {"input_ids": torch.ones(2, 8)}, None),
        ("sdpa", (False,), None, {"input_ids": torch.ones(2, 1)} | PAST, True),
        ("sdpa", (False,), None, {"input_ids": torch.ones(2, 5, device="meta")}, None),
        ("sdpa", (False,), None, {"cache": object.__new__(PagedAttentionCache)}, True),
        ("sdpa", (False,), None, {"input_ids": None}, False),
        ("sdpa", (False,), None, {"input_ids": None, "attention_mask": torch.ones(2, 1, 5, 5)}, True),
    ],
)
def test_whether_attention_is_causal(implementation, own, of_config, given, causal):
    modules = [SimpleNamespace(is_causal=x) for x in own]
    config = SimpleNamespace(_attn_implementation=implementation, sliding_window=8)
    if of_config is not None:
        config.is_causal = of_config
    assert is_causal(Pass(modules, config, {"input_ids": torch.ones(2, 5)} | given)) is causal


def test_places_in_a_cache():
    for index, place in ((3, 3), (0, 0), (None, 0), ("first", 0)):
        assert layer_of(SimpleNamespace(layer_idx=index)) == place
    assert layer_of(SimpleNamespace()) == 0


def test_nobody_looks_at_what_is_being_captured(monkeypatch):
    assert not is_blind(torch.ones(2)) and is_blind(torch.ones(2, device="meta"))
    monkeypatch.setattr(obstacles, "is_capturing", lambda device: True)
    assert is_blind(torch.ones(2))
