"""`convention_of` knows the classes of the table, and subclasses that change nothing of them."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaAttention

from fused_rope_attn.integrations.transformers import families, patch_model, patch_report
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KNOWN = f"{LlamaAttention.__module__}.{LlamaAttention.__qualname__}".removeprefix("transformers.models.")


class Mixin:
    """The base that FSDP2 puts in front of a module's own class."""

    def unshard(self):
        raise AssertionError


class Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_subclass_that_changes_nothing(calls):
    model = make_model("llama")
    plain = type("Plain", (LlamaAttention,), {})
    mixed = type("FSDPLlamaAttention", (Mixin, LlamaAttention), {"__deepcopy__": None})
    for module, cls in zip(attentions_of(model), (plain, mixed)):
        module.__class__ = cls
        assert families.convention_of(module) is families.SUPPORTED[KNOWN]
    assert_same(model, make_ids(2, 9), grad=True, use_cache=False)
    assert calls == {"rope_attention": 2}


def test_parametrized(calls):
    """torch gives a parametrized module a class of its own, with the tensor as a property."""
    model = make_model("gpt_oss")
    module = attentions_of(model)[0]
    parametrize.register_parametrization(module, "sinks", Double())
    assert type(module).__name__ == "ParametrizedGptOssAttention"
    assert_same(model, make_ids(2, 9), use_cache=False)
    assert calls == {"rope_attention": 2}


def test_what_changes_something_is_another_class(monkeypatch):
    model = make_model("llama")
    module = attentions_of(model)[0]

    def forward(self, *args, **kwargs):
        return LlamaAttention.forward(self, *args, **kwargs)

    module.__class__ = type("Overriding", (LlamaAttention,), {"forward": forward})
    assert families.convention_of(module) is None
    module.__class__ = type("Mixed", (type("Other", (), {"forward": forward}), LlamaAttention), {})
    assert families.convention_of(module) is None
    module.__class__ = LlamaAttention
    assert families.convention_of(module) is not None
    for library in (__name__, "unsloth.models.llama"):  # before and after transformers' own name
        forward.__module__ = library
        monkeypatch.setattr(LlamaAttention, "forward", forward)  # as libraries do, for all models
        assert families.convention_of(module) is None
        monkeypatch.undo()
        assert families.convention_of(module) is not None
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(NotImplementedError, match="self_attn"):
        patch_model(model)
    monkeypatch.undo()
    assert families.convention_of(module) is not None


def test_a_refusal_says_why():
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.NemotronConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    config._attn_implementation = "eager"  # before transformers 5 others have classes of their own
    model = transformers.NemotronForCausalLM(config)
    with pytest.raises(
        NotImplementedError, match=r"self_attn \(NemotronAttention: its decoder layer passes no additional"
    ):
        patch_model(model)
    (row,) = patch_report(model)
    assert (
        not row.patched and row.reason == families.UNSUPPORTED[families.name_of(type(model.model.layers[0].self_attn))]
    )


def test_recurrences_are_no_attention():
    """MiniMax calls one attention; blocks around attention and recurrences have to read the padding mask."""
    minimax = make_model("minimax")
    names = [type(module).__name__ for module in minimax.modules() if families.looks_like_attention(module)]
    assert names == ["MiniMaxAttention"]
    assert families.hands_padding_on(minimax.model) and not families.hands_padding_on(make_model("llama").model)


def test_classes_that_are_supported_since_transformers_5():
    new = Version(transformers.__version__) >= Version("5")
    for path in map(families.path_of, families.SINCE_5):
        assert (path in families.SUPPORTED) is new and (path in families.UNSUPPORTED) is not new, path
