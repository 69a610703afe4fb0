"""Tables of every config class of the installed transformers, against the float32 tables of the model's own module."""

import contextlib
import copy
import importlib
import inspect
import itertools
import pkgutil
from collections import Counter
from collections.abc import Iterator

import torch
import transformers
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fused_rope_attn.integrations.transformers import rope_tables_from_config

# Each config is trained to 32 positions and made for 48, so that 20 rows reach neither limit and 64 rows pass both.
TRAINED, MADE_FOR = 32, 48
LENGTHS = (20, 64)
TRANSFORMERS_4 = transformers.__version__.startswith("4.")
FIELD = "rope_scaling" if TRANSFORMERS_4 else "rope_parameters"
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "proportional": {"partial_rotary_factor": 0.5},
}
TYPES = {"default", *ROPE_INIT_FUNCTIONS}
REFUSED = {
    "MistralLarge4TextConfig",  # its frequencies have a learned factor, which a config does not have
    "Qwen3OmniMoeTalkerTextConfig",  # in transformers 4 its default values make no model
}


def configs() -> Iterator[PretrainedConfig]:
    """Yield a config of default values of each class with rotary parameters."""
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        package = importlib.import_module(f"transformers.models.{folder.name}")
        for file in pkgutil.iter_modules(getattr(package, "__path__", [])):
            if not file.name.startswith("configuration_"):
                continue
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            for cls in vars(module).values():
                # EdgeTAM asks the hub for the config of its backbone, and does not rotate text.
                if inspect.isclass(cls) and cls.__module__ == module.__name__ and "EdgeTam" not in cls.__name__:
                    yield from with_default_values(cls)


def with_default_values(cls: type) -> Iterator[PretrainedConfig]:
    if issubclass(cls, PretrainedConfig):
        try:
            config = cls()
        except Exception:  # some classes refuse their own default values
            return
        if hasattr(config, FIELD) and (TRANSFORMERS_4 or config.rope_parameters):
            yield config


def own_classes(config: PretrainedConfig) -> list[type]:
    """Return the rotary classes whose annotation names a config's class, or else all that do not rotate pictures."""
    try:
        file = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        file = importlib.import_module(transformers.MODEL_MAPPING[type(config)].__module__)
    rotary = [cls for name, cls in vars(file).items() if "Rotary" in name and inspect.isclass(cls)]
    rotary = [cls for cls in rotary if "config" in inspect.signature(cls).parameters]
    names = {base.__name__ for base in type(config).__mro__}
    annotated = [cls for cls in rotary if getattr(cls.__init__.__annotations__.get("config"), "__name__", "") in names]
    return annotated or [cls for cls in rotary if not any(x in cls.__name__ for x in ("Vision", "Audio", "DiT"))]


def scaled(config: PretrainedConfig, layer_type: str | None, rope_type: str) -> PretrainedConfig:
    """Return a copy of a config whose layers, or those of one type, have another rope type."""
    config = copy.deepcopy(config)
    for name, value in (("max_position_embeddings", MADE_FOR), ("original_max_position_embeddings", TRAINED)):
        if hasattr(config, name):
            setattr(config, name, value)
    rope = {"rope_type": rope_type, **SCALINGS[rope_type]}
    if rope_type == "longrope":
        with contextlib.suppress(ValueError):
            columns = rope_tables_from_config(scaled(config, layer_type, "default"), 1, layer_type=layer_type)[0].shape[
                1
            ]
            rope |= {f"{name}_factor": [i + j / 8 for j in range(columns)] for i, name in ((1, "short"), (2, "long"))}
    before = getattr(config, FIELD) or {}
    if layer_type is not None:
        rope = {layer_type: before[layer_type] | rope}
    if not (TRANSFORMERS_4 and rope_type == "default"):
        setattr(config, FIELD, before | rope)
    return config


def tables_of(cls: type, config: PretrainedConfig, seq_len: int, layer_type: str | None) -> list[torch.Tensor]:
    """Return the cos and sin that a rotary class gives, with one dimension for positions and one for columns."""
    module = cls(copy.deepcopy(config))
    options = {} if layer_type is None else {"layer_type": layer_type}
    positions = torch.arange(seq_len)[None]
    try:
        tables = module(torch.zeros(1), positions, **options)
    except IndexError:  # text with pictures in transformers 4
        tables = module(torch.zeros(1), positions.expand(3, 1, -1), **options)
    if torch.is_tensor(tables):
        tables = (tables.real, tables.imag)
    return [table.reshape(-1, *table.shape[-2:])[0] for table in tables]


def agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether a table has the angles of another, which may have each twice, up to the rounding of float32."""
    forms = [mine] if mine.shape == theirs.shape else [torch.cat((mine, mine), 1), mine.repeat_interleave(2, 1)]
    return any(torch.allclose(form, theirs.float(), rtol=0, atol=2e-5) for form in forms)


def compare(config: PretrainedConfig, seq_len: int, layer_type: str | None) -> str:
    """Return what came of a comparison."""
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
            if getattr(config, "default_rope_type", "default") != "default":  # pictures, whose positions have two axes
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
