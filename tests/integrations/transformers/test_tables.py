"""Tables of Hugging Face configs: transformers' own rotary embeddings are the oracle."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fused_rope_attn import rope_tables
from fused_rope_attn.integrations.transformers import rope_tables_from_config
from tests.support.dtypes import F32

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "factor": 4.0,
    "long_factor": [2.0 + i / 8 for i in range(8)],
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("seq_len", [20, 64, 200])
@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, YARN, LLAMA3, LONG],
    ids=lambda scaling: scaling["rope_type"] if scaling else "default",
)
def test_tables_of_a_hugging_face_config(scaling, seq_len):
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_scaling=scaling
    )
    cos, sin = rope_tables_from_config(config, seq_len)
    assert cos.shape == sin.shape == (seq_len, 8) and cos.dtype == F32
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(seq_len)[None])
    for mine, table in zip((cos, sin), theirs):
        torch.testing.assert_close(mine, table[0, :, :8].float(), rtol=1e-4, atol=1e-4)


def test_tables_of_other_models():
    """Partial rotation, parameters for each type of layer, and unknown types."""
    glm = transformers.GlmConfig(hidden_size=64, num_attention_heads=4, head_dim=16, partial_rotary_factor=0.5)
    cos, _ = rope_tables_from_config(glm, 9)
    assert cos.shape == (9, 4)
    torch.testing.assert_close(cos, rope_tables(9, 8)[0], rtol=1e-5, atol=1e-5)
    gemma = transformers.Gemma3TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    for layer_type, base in (("sliding_attention", 10000.0), ("full_attention", 1000000.0)):
        if not isinstance(getattr(gemma, "rope_parameters", None), dict) or layer_type not in gemma.rope_parameters:
            break  # transformers 4
        cos, _ = rope_tables_from_config(gemma, 9, layer_type=layer_type)
        torch.testing.assert_close(cos, rope_tables(9, 16, base=base)[0], rtol=1e-5, atol=1e-5)
    glm.rope_parameters = glm.rope_scaling = {"rope_type": "sideways", "rope_theta": 1.0}
    with pytest.raises(ValueError, match="^config .*'sideways'"):
        rope_tables_from_config(glm, 9)


class Own(transformers.LlamaConfig):
    """A config of a user's model outside of transformers, in files without a module of the model."""


Own.__module__ = "somebody.configuration_own"


def test_a_config_from_elsewhere_rotates_as_llama_does():
    config = Own(hidden_size=64, num_attention_heads=4)
    cos, sin = rope_tables_from_config(config, 9)
    for mine, table in zip((cos, sin), rope_tables(9, 16)):
        torch.testing.assert_close(mine, table, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_parameters_under_their_new_name_and_their_old_one(name):
    config = SimpleNamespace(**{name: {"rope_type": "sideways"}})
    with pytest.raises(ValueError, match="'sideways'"):
        rope_tables_from_config(config, 9)


LAYERED = SimpleNamespace(rope_parameters={name: {"rope_type": "default"} for name in ("near", "far")})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 9), TypeError, "config must be a PreTrainedConfig of transformers, but is NoneType"),
        (({"rope_theta": 1.0}, 9), TypeError, "config must be a PreTrainedConfig of transformers, but is dict"),
        ((transformers.BertConfig(), 9), ValueError, "config must be of a model that rotates, but BertConfig has none"),
        ((transformers.LlamaConfig(), -5), ValueError, "seq_len must be at least 0, but is -5"),
        ((transformers.LlamaConfig(), 9.0), TypeError, "seq_len must be an int, but is float 9.0"),
        ((transformers.LlamaConfig(), True), TypeError, "seq_len must be an int, but is bool True"),
        ((LAYERED, 9), TypeError, "layer_type must be a str, 'near' or 'far', but is NoneType"),
        ((LAYERED, 9, "middle"), ValueError, "layer_type must be 'near' or 'far', but is 'middle'"),
        ((transformers.LlamaConfig(), 9, "near"), ValueError, "layer_type must be None, since LlamaConfig has"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else "",
)
def test_refusals_name_the_argument(arguments, error, message):
    config, seq_len, *layer_type = arguments
    options = {"layer_type": layer_type[0]} if layer_type else {}
    with pytest.raises(error, match=f"^{message}"):
        rope_tables_from_config(config, seq_len, **options)


def test_a_config_of_several_models_says_where_its_text_is():
    config = SimpleNamespace(model_type="pictures", text_config=transformers.LlamaConfig())
    with pytest.raises(ValueError, match="^config must be of a model that rotates, .*; give its text_config"):
        rope_tables_from_config(config, 9)


def test_numbers_of_numpy_are_integers():
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    for mine, table in zip(rope_tables_from_config(config, np.int64(9)), rope_tables_from_config(config, 9)):
        assert torch.equal(mine, table)
