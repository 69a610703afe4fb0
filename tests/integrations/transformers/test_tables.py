"""Tables of Hugging Face configs: transformers' own rotary embeddings are the oracle, for every config class."""

import contextlib
import copy
import importlib
import inspect
import itertools
import pkgutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fused_rope_attn import rope_tables
from fused_rope_attn.integrations.transformers import rope_tables_from_config

# Each config is trained to 32 positions and made for 48, so that 20 rows reach neither limit and 64 rows pass both.
TRAINED, MADE_FOR = 32, 48
LENGTHS = (20, 64)
TRANSFORMERS_4 = transformers.__version__.startswith("4.")
FIELD = "rope_scaling" if TRANSFORMERS_4 else "rope_parameters"
_LONG = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": _LONG,
    "llama3": _LONG | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": _LONG,
    "proportional": {"partial_rotary_factor": 0.5},
}
TYPES = {"default", *ROPE_INIT_FUNCTIONS}
REFUSED = {
    "MistralLarge4TextConfig",  # its frequencies have a learned factor, which a config does not have
    "Qwen3OmniMoeTalkerTextConfig",  # in transformers 4 its default values make no model
}


def configs():
    for file in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if ".configuration_" in file.name:
            for cls in vars(importlib.import_module(file.name)).values():
                # EdgeTAM asks the hub for the config of its backbone, and does not rotate text.
                own = inspect.isclass(cls) and cls.__module__ == file.name and "EdgeTam" not in cls.__name__
                with contextlib.suppress(Exception):  # some classes refuse their own default values
                    if own and issubclass(cls, PretrainedConfig) and hasattr(config := cls(), FIELD):
                        yield from [config] if TRANSFORMERS_4 or config.rope_parameters else []


def own_classes(config: PretrainedConfig) -> list[type]:
    """Return the rotary classes that are annotated with a config's class, or else all that do not rotate pictures."""
    try:
        file = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        file = importlib.import_module(transformers.MODEL_MAPPING[type(config)].__module__)
    rotary = [cls for name, cls in vars(file).items() if "Rotary" in name and inspect.isclass(cls)]
    rotary = [cls for cls in rotary if "config" in inspect.signature(cls).parameters]
    names = {base.__name__ for base in type(config).__mro__}
    annotated = [cls for cls in rotary if getattr(cls.__init__.__annotations__.get("config"), "__name__", "") in names]
    return annotated or [cls for cls in rotary if not any(x in cls.__name__ for x in ("Vision", "Audio", "DiT"))]


def factors(columns: int) -> dict[str, list[float]]:
    return {f"{name}_factor": [i + j / 8 for j in range(columns)] for i, name in ((1, "short"), (2, "long"))}


def scaled(config: PretrainedConfig, layer_type: str | None, rope_type: str) -> PretrainedConfig:
    config = copy.deepcopy(config)
    for name, value in (("max_position_embeddings", MADE_FOR), ("original_max_position_embeddings", TRAINED)):
        if hasattr(config, name):
            setattr(config, name, value)
    rope = {"rope_type": rope_type, **SCALINGS[rope_type]}
    if rope_type == "longrope":
        with contextlib.suppress(ValueError):
            cos, _ = rope_tables_from_config(scaled(config, layer_type, "default"), 1, layer_type=layer_type)
            rope |= factors(cos.shape[1])
        if type(config).__name__ == "PhimoeConfig" and not TRANSFORMERS_4:  # it scales its tables by length
            rope |= {"short_mscale": 1.25, "long_mscale": 1.5}
    before = getattr(config, FIELD) or {}
    if layer_type is not None:
        rope = {layer_type: before[layer_type] | rope}
    if not (TRANSFORMERS_4 and rope_type == "default"):
        setattr(config, FIELD, before | rope)
    return config


def tables_of(cls: type, config: PretrainedConfig, seq_len: int, layer_type: str | None) -> list[torch.Tensor]:
    module, positions = cls(copy.deepcopy(config)), torch.arange(seq_len)[None]
    options = {} if layer_type is None else {"layer_type": layer_type}
    try:
        tables = module(torch.zeros(1), positions, **options)
    except IndexError:  # text with pictures in transformers 4
        tables = module(torch.zeros(1), positions.expand(3, 1, -1), **options)
    tables = (tables.real, tables.imag) if torch.is_tensor(tables) else tables
    return [table.reshape(-1, *table.shape[-2:])[0] for table in tables]


def agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether a table has the angles of another, which may have each twice, up to the rounding of float32."""
    forms = [mine] if mine.shape == theirs.shape else [torch.cat((mine, mine), 1), mine.repeat_interleave(2, 1)]
    return any(torch.allclose(form, theirs.float(), rtol=0, atol=2e-5) for form in forms)


def compare(config: PretrainedConfig, seq_len: int, layer_type: str | None) -> str:
    theirs = []
    for cls in own_classes(config):
        # Some modules want pixels instead of positions, and some do not take every rope type.
        with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            theirs.append(tables_of(cls, config, seq_len, layer_type))
    try:
        mine = rope_tables_from_config(config, seq_len, layer_type=layer_type)
    except ValueError as error:
        return f"refused: {error}" if theirs else "neither"
    if not theirs:
        return "tables of a config that the model cannot read"
    return "equal" if all(agree(*pair) for tables in theirs for pair in zip(mine, tables, strict=True)) else "different"


def test_every_config_class_and_rope_type():
    counts: Counter[str] = Counter()
    wrong = []
    for config in configs():
        layers = [name for name, value in (getattr(config, FIELD) or {}).items() if isinstance(value, dict)]
        for layer_type, rope_type in itertools.product(layers or [None], sorted(TYPES)):
            if getattr(config, "default_rope_type", "default") != "default":  # positions of pictures have two axes
                continue
            other = scaled(config, layer_type, rope_type)
            for seq_len in LENGTHS:
                result = compare(other, seq_len, layer_type)
                counts[result] += 1
                if result not in ("equal", "neither") and type(config).__name__ not in REFUSED:
                    wrong.append(f"{type(config).__name__}, {layer_type}, {rope_type}, {seq_len}: {result}")
    print(counts)
    assert not wrong
    assert counts["equal"] > (800 if TRANSFORMERS_4 else 2900), counts


def assert_tables(config, length, theirs):
    for mine, table in zip(rope_tables_from_config(config, length), theirs, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, table, rtol=1e-5, atol=1e-5)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize("name", ["Dense", "MoE"])
def test_alpha_of_hunyuan_stretches_the_base(name):
    """Its checkpoints replace the scaling of `dynamic` by `alpha`, and have fields that the model ignores."""
    ignored = {"beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    scaling = {"rope_type": "dynamic", "alpha": 1000.0} | ignored
    config = getattr(transformers, f"HunYuan{name}V1Config")(**SIZES, head_dim=16, rope_scaling=scaling)
    # Transformers 4 forgets alpha after the length that the model is made for.
    length = 64 if TRANSFORMERS_4 else 200
    assert_tables(config, length, rope_tables(length, 16, base=1e4 * 1000 ** (16 / 14)))


def test_angles_are_float64():
    """At position 1,000,000 a float32 angle is off by 0.03."""
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 2_000_000})
    frequencies, before = LlamaRotaryEmbedding(config).inv_freq.double(), config.to_dict()
    cos, _ = rope_tables_from_config(config, 1_000_001)
    assert config.to_dict() == before
    torch.testing.assert_close(cos[-1], (1_000_000 * frequencies).cos().float(), rtol=0, atol=1e-6)


class OfLlama(LlamaConfig):
    """A user's config of a kind of Llama."""


class Own(PretrainedConfig):
    model_type = "somebody's"

    def __init__(self, rope_theta=10000.0, rope_scaling=None, **kwargs):
        for name, value in (SIZES | {"rope_theta": rope_theta, "rope_scaling": rope_scaling}).items():
            setattr(self, name, value)
        super().__init__(**kwargs)


OfLlama.__module__ = Own.__module__ = "somebody.configuration_own"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}


def test_a_config_from_elsewhere_rotates_as_llama_does():
    for config in (OfLlama(**SIZES, rope_theta=500.0), Own(500.0)):
        assert_tables(config, 9, rope_tables(9, 16, base=500.0))
    linear = Own(rope_scaling={"type": "linear", "factor": 2.0})
    assert_tables(linear, np.int64(9), rope_tables(9, 16, positions=torch.arange(9) / 2))
    unset = Own(rope_scaling=DYNAMIC | {"alpha": None})  # does not count as a field without a reader
    assert_tables(unset, 9, rope_tables(9, 16))


UNREAD = "config must have no rotary field without a reader, but "


def unread(config, field, rotary="LlamaRotaryEmbedding"):
    return config, {}, ValueError, f"{UNREAD}{type(config).__name__} has {field}, which {rotary} does not read$"


LLAMA = LlamaConfig(**SIZES)
INCOMPLETE = LlamaConfig(**SIZES)
INCOMPLETE.rope_parameters = INCOMPLETE.rope_scaling = {"rope_type": "yarn", "rope_theta": 1e4}
LAYERED = SimpleNamespace(rope_parameters={name: {"rope_type": "default"} for name in ("near", "far")})


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (None, {}, TypeError, "config must be a PreTrainedConfig of transformers, but is NoneType"),
        (transformers.BertConfig(), {}, ValueError, "config must be of a model that rotates, but BertConfig has none"),
        unread(transformers.Qwen3Config(rope_scaling=dict(DYNAMIC)), "alpha", "Qwen3RotaryEmbedding"),
        unread(OfLlama(rope_of_mine=2.0), "rope_of_mine"),
        unread(Own(rope_scaling=dict(DYNAMIC)), "alpha"),
        unread(Own(rotary_emb_fraction=0.5, rope_ntk=2.0), "rope_ntk, rotary_emb_fraction"),
        # The code of transformers names these, but Llama's module does not read them.
        unread(Own(rope_scaling=DYNAMIC | {"alpha": None, "beta_fast": 32}), "beta_fast"),
        unread(Own(rope_local_base_freq=1e4), "rope_local_base_freq"),
        (SimpleNamespace(model_type="", text_config=LLAMA), {}, ValueError, "config .* rotates, .*; give its text_con"),
        (INCOMPLETE, {}, ValueError, "config must be one that LlamaRotaryEmbedding .* KeyError: 'factor'"),
        (SimpleNamespace(rope_parameters={"rope_type": "sideways"}), {}, ValueError, "config must .* has 'sideways'"),
        (SimpleNamespace(rope_scaling={"rope_type": "sideways"}), {}, ValueError, "config must .* has 'sideways'"),
        (LLAMA, {"seq_len": -1}, ValueError, "seq_len must be at least 0, but is -1"),
        (LLAMA, {"layer_type": "near"}, ValueError, "layer_type must be None, since LlamaConfig has"),
        (LAYERED, {}, TypeError, "layer_type must be a str, 'near' or 'far', but is NoneType"),
        (LAYERED, {"layer_type": "middle"}, ValueError, "layer_type must be 'near' or 'far', but is 'middle'"),
        ("DINOv3ViTConfig", {}, ValueError, "config must be of a model that makes one rotary module of it, but is DIN"),
        ("EfficientLoFTRConfig", {}, ValueError, "config .* EfficientLoFTRRotaryEmbedding makes tables of, but it ra"),
        ("MistralLarge4TextConfig", {}, ValueError, "config must determine the frequencies, but models learn those"),
        ("Qwen2VLVisionConfig", {}, ValueError, "config must "),  # of no model that rotates, or of no known rope type
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_refusals_name_the_argument(config, options, error, message):
    if isinstance(config, str):
        file = importlib.import_module("transformers.models.qwen2_vl.configuration_qwen2_vl")
        cls = getattr(transformers, config, None) or getattr(file, config, None)
        if cls is None:
            pytest.skip(f"transformers {transformers.__version__} has no {config}")
        config = cls()
    with pytest.raises(error, match=f"^{message}"):
        rope_tables_from_config(config, **{"seq_len": 9} | options)
