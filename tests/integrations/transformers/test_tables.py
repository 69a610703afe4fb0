"""Tables of Hugging Face configs: transformers' own rotary embeddings are the oracle."""

import importlib
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


# The fields of HunYuan's checkpoints. `alpha` replaces the scaling of `dynamic`, and the model ignores the others.
HUNYUAN = {
    "rope_type": "dynamic",
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@pytest.mark.parametrize("name", ["Dense", "MoE"])
def test_alpha_of_hunyuan_stretches_the_base(name):
    cls = getattr(transformers, f"HunYuan{name}V1Config")
    config = cls(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=64, rope_scaling=HUNYUAN)
    # Transformers 4 forgets alpha after the length that the model is made for.
    length = 64 if transformers.__version__.startswith("4.") else 200
    theirs = rope_tables(length, 16, base=1e4 * 1000 ** (16 / 14))
    for mine, table in zip(rope_tables_from_config(config, length), theirs):
        torch.testing.assert_close(mine, table, rtol=1e-5, atol=1e-5)


def test_phimoe_scales_its_tables_by_length():
    scaling = LONG | {"short_mscale": 1.25, "long_mscale": 1.5}
    if transformers.__version__.startswith("4."):
        pytest.skip("its rotary module takes no positions in transformers 4")
    config = transformers.PhimoeConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_scaling=scaling
    )
    for seq_len, scale in ((20, 1.25), (64, 1.5)):
        cos, sin = rope_tables_from_config(config, seq_len)
        torch.testing.assert_close(cos.square() + sin.square(), torch.full((seq_len, 8), scale**2))


def test_angles_are_float64():
    """At position 1,000,000 a float32 angle is off by 0.03."""
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=2_000_000)
    frequencies = LlamaRotaryEmbedding(config).inv_freq.double()
    cos, _ = rope_tables_from_config(config, 1_000_001)
    torch.testing.assert_close(cos[-1], (1_000_000 * frequencies).cos().float(), rtol=0, atol=1e-6)


def test_the_config_stays_as_it_is():
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_scaling=dict(YARN))
    before = config.to_dict()
    rope_tables_from_config(config, 9)
    assert config.to_dict() == before


class OfLlama(transformers.LlamaConfig):
    """A user's config of a kind of Llama."""


class Own(transformers.PretrainedConfig):
    """A config of a user's model that transformers does not know."""

    model_type = "somebody's"

    def __init__(self, rope_theta=10000.0, rope_scaling=None, max_position_embeddings=64, **kwargs):
        self.hidden_size = 64
        self.num_attention_heads = 4
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        super().__init__(**kwargs)


OfLlama.__module__ = Own.__module__ = "somebody.configuration_own"


@pytest.mark.parametrize("config", [OfLlama(hidden_size=64, num_attention_heads=4, rope_theta=500.0), Own(500.0)])
def test_a_config_from_elsewhere_rotates_as_llama_does(config):
    cos, sin = rope_tables_from_config(config, 9)
    for mine, table in zip((cos, sin), rope_tables(9, 16, base=500.0)):
        torch.testing.assert_close(mine, table, rtol=1e-5, atol=1e-5)


def test_a_scaled_config_from_elsewhere():
    config = Own(rope_scaling={"type": "linear", "factor": 2.0})
    cos, sin = rope_tables_from_config(config, 9)
    for mine, table in zip((cos, sin), rope_tables(9, 16, positions=torch.arange(9) / 2)):
        torch.testing.assert_close(mine, table, rtol=1e-5, atol=1e-5)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (transformers.LlamaConfig(rope_scaling=dict(DYNAMIC)), "alpha"),
        (transformers.Qwen3Config(rope_scaling=dict(DYNAMIC)), "alpha"),
        (transformers.LlamaConfig(rotary_pct=0.5), "rotary_pct"),
        (OfLlama(rope_of_mine=2.0), "rope_of_mine"),
        (Own(rope_scaling=dict(DYNAMIC)), "alpha"),
        (Own(rotary_emb_fraction=0.5, rope_ntk=2.0), "rope_ntk, rotary_emb_fraction"),
        # The code of transformers names these, but Llama's module does not read them.
        (Own(rope_scaling=DYNAMIC | {"alpha": None, "beta_fast": 32}), "beta_fast"),
        (Own(rope_local_base_freq=1e4), "rope_local_base_freq"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_rotary_field_without_a_reader_is_refused(config, field):
    rotary = "Qwen3RotaryEmbedding" if isinstance(config, transformers.Qwen3Config) else "LlamaRotaryEmbedding"
    expected = (
        f"config must have no rotary field without a reader, but {type(config).__name__} has {field}, which {rotary} "
        "does not read"
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        rope_tables_from_config(config, 9)


def test_a_field_that_is_unset_does_not_count():
    config = Own(rope_scaling=DYNAMIC | {"alpha": None})
    assert rope_tables_from_config(config, 9)[0].shape == (9, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DINOv3ViTConfig", "config must be of a model that makes one rotary module of it, but is DINOv3ViTConfig"),
        (
            "EfficientLoFTRConfig",
            "config must be one that EfficientLoFTRRotaryEmbedding makes tables of, but it raises",
        ),
        ("MistralLarge4TextConfig", "config must determine the frequencies, but models learn those of MistralLarge4"),
        ("Qwen2VLVisionConfig", "config must "),  # of no model that rotates, or of no known rope type
    ],
)
def test_models_without_a_table_of_positions_are_refused(name, message):
    file = importlib.import_module("transformers.models.qwen2_vl.configuration_qwen2_vl")
    cls = getattr(transformers, name, None) or getattr(file, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(ValueError, match=f"^{message}"):
        rope_tables_from_config(cls(), 9)


def test_a_missing_parameter_is_named():
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = config.rope_scaling = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="^config must be one that LlamaRotaryEmbedding .* KeyError: 'factor'"):
        rope_tables_from_config(config, 9)


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
