"""Rotary tables from a Hugging Face config."""

import copy
import importlib.util
import inspect
import re
import sys
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import modeling_rope_utils
from transformers.models.llama import modeling_llama

from fused_rope_attn.runtime.checks import check_int, refuse_choice

# Transformers 4 has rope_theta, and rope_scaling where there is a scaling; 5 has rope_parameters.
_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")


def rope_tables_from_config(
    config: Any, seq_len: int, *, layer_type: str | None = None, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin ``(seq_len, R/2)`` float32 with the frequencies and the scaling of a Hugging Face config.

    Args:
        config: a ``PreTrainedConfig`` with rope parameters: ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3``,
            ``longrope``, or any other type that the installed transformers knows.
        seq_len: number of rows; ``dynamic`` and ``longrope`` adapt their frequencies to it.
        layer_type: for configs that have other parameters for each type of layer (Gemma 3): which of them.
        device: of the tables; default the current default device.

    Raises:
        TypeError: config is no config, or seq_len no int.
        ValueError: a config of a model that does not rotate, or learns its frequencies, or has several axes; a rope
            type that the installed transformers does not know, a rotary field that it does not read, a layer_type that
            the config does not have, or a negative seq_len.

    The tables are those of the rotary module that transformers' model of this config builds, but with float64 angles,
    as in ``rope_tables``. A config that transformers has no model for is read by Llama's rotary module, and refused if
    it has rotary fields that this module does not read.
    """
    seq_len = check_int("seq_len", seq_len)
    if seq_len < 0:
        raise ValueError(f"seq_len must be at least 0, but is {seq_len}")
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = ("default", *modeling_rope_utils.ROPE_INIT_FUNCTIONS)
    if kind not in known:
        raise ValueError(f"config must have a rope_type of {', '.join(known)}, but has {kind!r}")
    device = torch.get_default_device() if device is None else device
    own = _own_rotary_class(type(config))
    rotary = own or modeling_llama.LlamaRotaryEmbedding
    try:
        reader = _Reader(config)
        if own is None and layer_type is not None:
            # Llama's module knows no types of layers: show it the parameters of this one alone.
            reader.config.rope_parameters, layer_type = parameters, None
        with torch.device("cpu"):
            module = rotary(reader)
            tables = _evaluate(module, max(seq_len, 1), layer_type)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"config must be one that {rotary.__name__} makes tables of, but it raises {type(error).__name__}: {error}"
        ) from error
    if any(True for _ in module.parameters()):
        raise ValueError(f"config must determine the frequencies, but models learn those of {rotary.__name__}")
    _refuse_unread(reader, parameters, rotary, own is not None)
    cos, sin = (table[:seq_len].to(device, torch.float32) for table in tables)
    return cos, sin


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the rope parameters of a config, or of one type of its layers; empty for the defaults."""
    if not any(getattr(config, name, None) for name in _NAMES):
        kind = type(config).__name__
        if not hasattr(config, "model_type"):
            raise TypeError(f"config must be a PreTrainedConfig of transformers, but is {kind}")
        inner = "; give its text_config" if hasattr(config, "text_config") else ""
        raise ValueError(f"config must be of a model that rotates, but {kind} has none of {', '.join(_NAMES)}{inner}")
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layer_types = [name for name, value in parameters.items() if isinstance(value, dict)]
    if layer_types:
        if layer_type not in layer_types:
            refuse_choice("layer_type", layer_type, tuple(layer_types))
        return parameters[layer_type]
    if layer_type is not None:
        alike = f"{type(config).__name__} has the same parameters for all layers"
        raise ValueError(f"layer_type must be None, since {alike}, but is {layer_type!r}")
    return parameters


class _Reader:
    """Show a copy of a config to a rotary module, and note in ``read`` which fields the module reads."""

    def __init__(self, config: Any) -> None:
        self.config = copy.deepcopy(config)
        self.read = {*_NAMES, "rope_type", "type"}
        if hasattr(config, "standardize_rope_params"):
            self.config.standardize_rope_params()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        value = getattr(self.config, name)
        return _ReadDict(value, self.read) if isinstance(value, dict) else value


class _ReadDict(dict[str, Any]):
    """A dict that adds the keys that are looked up to the set ``read``."""

    def __init__(self, values: dict[str, Any], read: set[str]) -> None:
        super().__init__({key: _ReadDict(x, read) if isinstance(x, dict) else x for key, x in values.items()})
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


class _Float64(TorchFunctionMode):
    """Compute in float64 what a rotary module casts to float32, because float32 angles of late positions are coarse."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*args, **kwargs or {})


def _evaluate(module: Any, seq_len: int, layer_type: str | None) -> list[torch.Tensor]:
    """Return cos and sin ``(seq_len, R/2)`` float64 of a rotary module."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    positions = torch.arange(seq_len)[None]
    try:
        # The last position makes the module choose its frequencies. They stay float32, as in the model.
        module(torch.zeros(1), positions[:, -1:], **options)
    except IndexError:
        # Transformers 4 expects positions on three axes for text with pictures.
        positions = positions.expand(3, 1, -1)
        module(torch.zeros(1), positions[..., -1:], **options)
    with _Float64():
        tables = module(torch.zeros(1, dtype=torch.float64), positions, **options)
    if torch.is_tensor(tables):
        tables = (tables.real, tables.imag)
    columns = getattr(module, f"{layer_type}_inv_freq" if options else "inv_freq").numel()
    rows = [table.reshape(-1, seq_len, table.shape[-1])[0] for table in tables]
    if rows[0].shape[1] == columns:
        return rows
    # Each angle is there twice, in two halves or in adjacent columns.
    halves = [row.chunk(2, dim=1) for row in rows]
    return [x if torch.equal(x, again) else row[:, ::2] for row, (x, again) in zip(rows, halves)]


def _own_rotary_class(config_class: type) -> Any:
    """Return the class of the rotary module that transformers' model of a config class builds. Return None for a
    config without a model in transformers. Raise ValueError if the model does not build one rotary module of it."""
    kinds = _known_classes(config_class)
    for kind in kinds:
        file = kind.__module__.replace(".configuration_", ".modeling_")
        if importlib.util.find_spec(file) is None:  # the model is that of another family, for example of Llama
            file = transformers.MODEL_MAPPING[kind].__module__
        classes = {name: x for name, x in vars(importlib.import_module(file)).items() if inspect.isclass(x)}
        named = {name: inspect.signature(x).parameters for name, x in classes.items() if "Rotary" in name}
        rotary = {name for name, parameters in named.items() if "config" in parameters}
        built: set[str] = set()
        for x in classes.values():
            config = getattr(x.__init__, "__annotations__", {}).get("config", "")
            if kind.__name__ in re.findall(r"\w+", getattr(config, "__name__", str(config))):
                built.update(inspect.unwrap(x.__init__).__code__.co_names)
        for found in (built & rotary, rotary):
            if len(found) == 1:
                return classes[found.pop()]
    if kinds:
        name = config_class.__name__
        raise ValueError(f"config must be of a model that makes one rotary module of it, but is {name}")
    return None


def _known_classes(config_class: type) -> list[type]:
    """Return a config class and its bases, as far as they belong to models of transformers."""
    return [kind for kind in config_class.__mro__ if kind.__module__.startswith("transformers.models.")]


def _refuse_unread(reader: _Reader, parameters: dict[str, Any], rotary: type, own: bool) -> None:
    """Refuse rotary fields that the module did not read, unless the code of transformers' model names them."""
    fields = {name: x for name, x in vars(reader.config).items() if re.search("rope|rotary", name)} | parameters
    names = sorted(name for name, x in fields.items() if x is not None and name not in reader.read)
    if names and own:
        kinds = (rotary, *_known_classes(type(reader.config)))
        files = {modeling_rope_utils.__name__, *(kind.__module__ for kind in kinds)}
        text = "".join(inspect.getsource(sys.modules[name]) for name in files)
        names = [name for name in names if not re.search(f'"{name}"' if name in parameters else rf"\b{name}\b", text)]
    if names:
        unread = f"{type(reader.config).__name__} has {', '.join(names)}, which {rotary.__name__} does not read"
        raise ValueError(f"config must have no rotary field without a reader, but {unread}")
