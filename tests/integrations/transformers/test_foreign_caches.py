"""Caches of a user's own: attention reads the keys and values that they return, as in an unpatched model."""

import functools

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer, StaticLayer

from fused_rope_attn.integrations.transformers import patch_model, patch_report
from tests.support.hf_caches import CAPACITY, make_cache, parts
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Halving:
    """Gives back half of the values, of those of the prompt too."""

    def update(self, *args, **kwargs):
        return halved(super().update, *args, **kwargs)


def halved(update, *args, **kwargs):
    keys, values = update(*args, **kwargs)
    return keys, values / 2


class HalvingCache(Halving, transformers.DynamicCache):
    pass


class HalvingStaticCache(Halving, transformers.StaticCache):
    pass


class HalvingLayer(Halving, DynamicLayer):
    pass


class HalvingStaticLayer(Halving, StaticLayer):
    pass


class RenamedCache(transformers.DynamicCache):
    """Overrides nothing. It is not served either, because only exact types are."""


def caches_of(config):
    """By the reason of the module's own forward."""
    layers = transformers.DynamicCache(config=config)
    layers.layers = [HalvingLayer() for _ in layers.layers]
    static_layers = transformers.StaticCache(config=config, max_cache_len=CAPACITY)
    static_layers.layers = [HalvingStaticLayer(CAPACITY) for _ in static_layers.layers]
    instance = transformers.DynamicCache(config=config)
    instance.update = functools.partial(halved, instance.update)
    lazy = transformers.Cache(layer_class_to_replicate=HalvingLayer)
    last = transformers.DynamicCache(config=config)
    last.layers[-1] = HalvingLayer()
    return {
        "of type HalvingCache": HalvingCache(config=config),
        "of type HalvingStaticCache": HalvingStaticCache(config=config, max_cache_len=CAPACITY),
        "with layers of type HalvingLayer": layers,
        "with layers of type HalvingStaticLayer": static_layers,
        "of type DynamicCache": instance,
        "with all layers of type HalvingLayer": lazy,
        "whose last layer is of type HalvingLayer": last,
        "of type RenamedCache": RenamedCache(config=config),
    }


@pytest.mark.parametrize("kind", list(caches_of(transformers.LlamaConfig(num_hidden_layers=2))))
@torch.no_grad()
def test_a_cache_with_an_update_of_its_own(kind, calls):
    """In the prompt, in a step of one token, in one of several, and in a part that is longer than a step."""
    model, ids = make_model("llama"), make_ids(2, 53)
    plain = parts(model, make_cache(model, "dynamic"), ids)
    expected = parts(model, caches_of(model.config)[kind], ids)
    assert kind == "of type RenamedCache" or not torch.allclose(expected[:, :5], plain[:, :5], atol=0.01)
    patch_model(model)
    with pytest.warns(UserWarning, match="a cache (of|with layers of) type .* is not served"):
        assert torch.equal(parts(model, caches_of(model.config)[kind], ids), expected)
    assert not calls
    assert all(kind.split()[-1] in str(row.own) for row in patch_report(model))


@pytest.mark.parametrize("of", [transformers.Cache, DynamicLayer], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@torch.no_grad()
def test_an_update_that_somebody_replaces_for_all(of, given, calls, monkeypatch):
    """Libraries that compress keys and values do this. The model may make the cache itself."""
    model, ids = make_model("llama"), make_ids(2, 9)
    own = of.update

    def update(*args, **kwargs):
        return halved(own, *args, **kwargs)

    def run():
        past = make_cache(model, "dynamic") if given else None
        return model(ids, past_key_values=past).logits

    plain = run()
    monkeypatch.setattr(of, "update", update)
    expected = run()
    assert not torch.allclose(expected, plain, atol=0.01)
    patch_model(model)
    with pytest.warns(UserWarning, match=r"\.update was replaced by .*update is not served"):
        assert torch.equal(run(), expected)
    assert not calls
    monkeypatch.undo()
    run()


class HybridCache:
    """Hybrid models of older releases make such a cache. It does not inherit from ``Cache``."""


def test_a_cache_that_only_the_decoder_makes():
    """The hook that describes the batch does not see this cache, and the kernels cannot read its layers."""

    class Making(transformers.LlamaModel):
        def forward(self, *args, **kwargs):
            self.made = HybridCache()
            return super().forward(*args, **kwargs)

    model, ids = make_model("llama"), make_ids(2, 12)
    expected = model(ids, use_cache=True).logits
    model.model.__class__ = Making
    patch_model(model)
    with pytest.warns(UserWarning, match="a cache of type HybridCache, which the decoder makes, is not served"):
        assert torch.equal(model(ids, use_cache=True).logits, expected)
    assert_close(model(ids, use_cache=False).logits, expected, 1e-5)
    assert_close(model(ids, past_key_values=transformers.DynamicCache(config=model.config)).logits, expected, 1e-5)
    assert {reason: n for row in patch_report(model) for reason, n in row.own.items()} == {
        "a cache of type HybridCache, which the decoder makes,": 1
    }
