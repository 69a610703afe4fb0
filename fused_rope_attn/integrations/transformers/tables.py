"""Rotary tables from a Hugging Face config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fused_rope_attn.runtime.checks import check_int, refuse_choice

_LLAMA = "transformers.models.llama.modeling_llama"


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
        ValueError: a config of a model without rotary embedding, a rope type that the installed transformers does not
            know, a layer_type that the config does not have, or a negative seq_len.

    The frequencies are those of transformers' own initialisers. The angles are float64, as in ``rope_tables``.
    """
    seq_len = check_int("seq_len", seq_len)
    if seq_len < 0:
        raise ValueError(f"seq_len must be at least 0, but is {seq_len}")
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    options = {} if layer_type is None else {"layer_type": layer_type}
    # Long and dynamic scaling begin beyond the trained length; asked for less, dynamic would scale down.
    known = max(seq_len, getattr(config, "max_position_embeddings", 0)) if kind == "dynamic" else seq_len
    device = torch.get_default_device() if device is None else torch.device(device)
    frequencies, scaling = _initialiser(kind, config)(config, device=device, seq_len=known, **options)
    positions = torch.arange(seq_len, device=frequencies.device, dtype=torch.float64)
    angles = positions[:, None] * frequencies.double()
    return (angles.cos() * scaling).float(), (angles.sin() * scaling).float()


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the rope parameters of a config, or of one type of its layers; empty for the defaults."""
    # Transformers 4 has rope_theta, and rope_scaling where there is a scaling; 5 has rope_parameters.
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    if not any(hasattr(config, name) for name in names):
        kind = type(config).__name__
        if not hasattr(config, "model_type"):
            raise TypeError(f"config must be a PreTrainedConfig of transformers, but is {kind}")
        inner = "; give its text_config" if hasattr(config, "text_config") else ""
        raise ValueError(f"config must be of a model that rotates, but {kind} has none of {', '.join(names)}{inner}")
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layer_types = [name for name, value in parameters.items() if isinstance(value, dict)]
    if layer_types:
        if layer_type not in layer_types:
            refuse_choice("layer_type", layer_type, tuple(layer_types))
        return parameters[layer_type]
    if layer_type is not None:
        raise ValueError(
            f"layer_type must be None, since {type(config).__name__} has the same parameters for all layers, but is "
            f"{layer_type!r}"
        )
    return parameters


def _initialiser(kind: str, config: Any) -> Callable[..., tuple[torch.Tensor, float]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind in ROPE_INIT_FUNCTIONS:
        return ROPE_INIT_FUNCTIONS[kind]
    if kind != "default":
        raise ValueError(
            f"config must have a rope_type of {', '.join(ROPE_INIT_FUNCTIONS)} or default, but has {kind!r}"
        )
    # Since transformers 5 each model's embedding has the method, because models differ in partial rotation and layers.
    for name in (type(config).__module__.replace(".configuration_", ".modeling_"), _LLAMA):
        try:
            members = vars(importlib.import_module(name)).values()
        except ImportError:
            continue
        for member in members:
            if hasattr(member, "compute_default_rope_parameters"):
                return member.compute_default_rope_parameters
    raise ValueError(f"config must be of a model that rotates, but is {type(config).__name__}")
