"""A patched model that is saved whole, and loaded, is a patched model."""

import io
import pickle
import warnings

import pytest
import torch

from fused_rope_attn.integrations.transformers import families, is_patched, patch_model, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _reloaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_saved_whole(calls):
    model, ids = patch_model(make_model("gemma3")), make_ids(2, LENGTH)
    expected = run(model, ids)[0]
    loaded = _reloaded(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(run(loaded, ids)[0], expected)
    assert calls == {"rope_attention": 4} and is_patched(loaded)
    for old, new in zip(attentions_of(model), attentions_of(loaded)):
        assert new.forward.args == (new,) and new is not old  # each of the two models calls its own modules
    tokens = loaded.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=3, do_sample=False))
    unpatch_model(loaded)
    assert not is_patched(loaded) and is_patched(model)
    calls.clear()
    run(loaded, ids)
    assert not calls
    assert all("forward" not in module.__dict__ for module in loaded.modules())
    run(patch_model(_reloaded(unpatch_model(model))), ids)
    assert calls == {"rope_attention": 2}


def test_saved_alone():
    """An attention module by itself is pickled with the objects that it refers to."""
    module = attentions_of(patch_model(make_model("llama")))[0]
    loaded = pickle.loads(pickle.dumps(module))
    x, angles = torch.randn(2, 5, 64), torch.randn(1, 5, 8)
    tables = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    for one in (module, loaded):
        one.config._attn_implementation = "sdpa"
    assert torch.equal(loaded(x, position_embeddings=tables)[0], module(x, position_embeddings=tables)[0])


@pytest.mark.parametrize("name", sorted(families.SUPPORTED))
def test_conventions_can_be_pickled(name):
    convention = families.SUPPORTED[name]
    assert pickle.loads(pickle.dumps(convention)) == convention
