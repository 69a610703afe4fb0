"""Implementations of a model's attention: transformers, Liger and ours, each switched on and off on the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from baselines.attentions import FLASH_4
from baselines.base import Package
from bench.suite import Provider, by_name

# It changes a model; the stack undoes that.
Switch = Callable[[Any, ExitStack], None]
# transformers' Trainer applies it by this function.
LIGER = Package("liger-kernel", "liger_kernel.transformers", "_apply_liger_kernel_to_instance")
LIGER_NORM = Package("liger-kernel", "liger_kernel.transformers.monkey_patch", "_patch_rms_norm_module")


def _attention(name: str, model: Any, stack: ExitStack) -> None:
    """Choose an attention of transformers."""
    stack.callback(model.set_attn_implementation, model.config._attn_implementation)
    model.set_attn_implementation(name)


def _liger(model: Any, stack: ExitStack, norms_of_heads: bool = False, **kernels: bool) -> None:
    """Apply Liger's whole patch: rotation, norms, MLPs, and a loss that computes no logits.

    kernels: False for those that stay as they are. norms_of_heads: apply these norms where the others stay.
    """
    for place in (vars(sys.modules[type(model).__module__]), *map(vars, model.modules())):
        stack.enter_context(mock.patch.dict(place))
    LIGER.load()(model, **kernels)
    for norm in _head_norms(model) if norms_of_heads else ():
        LIGER_NORM.load()(norm)


def _head_norms(model: nn.Module) -> list[Any]:
    return [module for path, module in model.named_modules() if path.endswith(("q_norm", "k_norm"))]


def _hooked_norms(model: Any, stack: ExitStack) -> None:
    """Give the norms of heads hooks that do nothing, which keeps them outside of our kernels."""
    for norm in _head_norms(model):
        stack.enter_context(norm.register_forward_hook(lambda *given: None))


def _fused(model: Any, stack: ExitStack) -> None:
    from fused_rope_attn.integrations.transformers import patch_model, unpatch_model

    patch_model(model)
    stack.callback(unpatch_model, model)


_PASSES = ("train", "prefill", "decode")
_STEP, _SERVED = ("step",), ("serve",)


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider):
    """A way to run a model's attention.

    switches: applied while a round of it runs. kinds: the works that it takes part in. manager: options of the manager
    of continuous batching.
    """

    switches: tuple[Switch, ...]
    kinds: tuple[str, ...] = _PASSES
    manager: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Apply all switches to a model."""
        with ExitStack() as stack:
            for switch in self.switches:
                switch(model, stack)
            yield


_EVERYTHING = _PASSES + _STEP + _SERVED
_LIGER: dict[str, Any] = {"missing": LIGER.missing}
_LIGER_FLASH_4: dict[str, Any] = {"missing": lambda: LIGER.missing() or FLASH_4.missing()}
_sdpa, _flash_4 = partial(_attention, "sdpa"), partial(_attention, "flash_attention_4")
_all_sdpa, _all_flash_4, _all_fused = ((_liger, attention) for attention in (_sdpa, _flash_4, _fused))
_graphs: dict[str, Any] = {"kinds": _SERVED, "manager": {"use_cuda_graph": True}}
_liger_rotation = partial(_liger, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)
_rotation, _norms = (_liger_rotation, _sdpa), (partial(_liger_rotation, norms_of_heads=True), _sdpa)
_own_norms = (_hooked_norms, _fused)
_norm_label, _with_liger = "Liger's norms of heads, rotation + sdpa", "patch_model + Liger's other kernels"
PROVIDERS: dict[str, ModelProvider] = by_name(
    (
        ModelProvider("sdpa", "sdpa", switches=(_sdpa,), kinds=_EVERYTHING),
        ModelProvider("sdpa_graphs", "sdpa, CUDA graphs", switches=(_sdpa,), **_graphs),
        ModelProvider("liger", "Liger's rotation + sdpa", switches=_rotation, **_LIGER),
        ModelProvider("liger_all", "Liger + sdpa", switches=_all_sdpa, kinds=_STEP, **_LIGER),
        ModelProvider(
            "liger_all_fa4", "Liger + flash_attention_4", switches=_all_flash_4, kinds=_STEP, **_LIGER_FLASH_4
        ),
        ModelProvider("liger_norm", _norm_label, switches=_norms, **_LIGER),
        ModelProvider("own_norms", "patch_model, norms of heads outside", switches=_own_norms),
        ModelProvider("fused", "patch_model", "ours", switches=(_fused,), kinds=_EVERYTHING),
        ModelProvider("fused_liger", _with_liger, "ours", switches=_all_fused, kinds=_STEP, **_LIGER),
    )
)
