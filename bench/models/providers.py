"""Implementations of a model's attention: transformers, Liger and ours, each switched on and off on the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

from torch import nn

from baselines.attentions import FLASH_4
from baselines.base import Package
from bench.suite import Provider, by_name

_HEAD_NORMS = ("q_norm", "k_norm")
Switch = Callable[[nn.Module], AbstractContextManager]


@contextmanager
def _attention(name: str, model: Any) -> Iterator[None]:
    """Choose an attention of transformers."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _liger_rotation(model: nn.Module) -> AbstractContextManager:
    """Replace transformers' rotation by Liger's in the module, as its own patches do."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return mock.patch.object(sys.modules[type(model).__module__], "apply_rotary_pos_emb", liger_rotary_pos_emb)


@contextmanager
def _liger_norms(model: nn.Module) -> Iterator[None]:
    """Bind Liger's RMSNorm to the norms of heads, as its patches do."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    with ExitStack() as stack:
        for module in _head_norms(model):
            bound = {
                "offset": 0.0,
                "casting_mode": "llama",
                "variance_epsilon": module.variance_epsilon,
                "in_place": True,
                "row_mode": None,
                "forward": MethodType(LigerRMSNorm.forward, module),
            }
            stack.enter_context(mock.patch.dict(module.__dict__, bound))
        yield


@contextmanager
def _liger_kernels(model: nn.Module) -> Iterator[None]:
    """Apply Liger's whole patch: rotation, norms, MLPs, and a loss that computes no logits."""
    places = (vars(sys.modules[type(model).__module__]), *map(vars, model.modules()))
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.dict(place))
        LIGER.load()(model)
        yield


def _head_norms(model: nn.Module) -> list[Any]:
    return [module for path, module in model.named_modules() if path.endswith(_HEAD_NORMS)]


@contextmanager
def _hooked_norms(model: nn.Module) -> Iterator[None]:
    """Give the norms of heads hooks that do nothing, which keeps them outside of our kernels."""
    with ExitStack() as stack:
        for norm in _head_norms(model):
            stack.enter_context(norm.register_forward_hook(lambda *given: None))
        yield


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    from fused_rope_attn.integrations.transformers import patch_model, unpatch_model

    patch_model(model)
    try:
        yield
    finally:
        unpatch_model(model)


# transformers' Trainer applies it by this function.
LIGER = Package("liger-kernel", "liger_kernel.transformers", "_apply_liger_kernel_to_instance")
_PASSES = ("train", "prefill", "decode")
_STEP, _SERVED = ("step",), ("serve",)


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider):
    """A way to run a model's attention.

    switches: the contexts that are entered while a round of it runs. norms: only for models that norm heads. kinds: the
    works that it takes part in. manager: options of the manager of continuous batching.
    """

    switches: tuple[Switch, ...]
    norms: bool = False
    kinds: tuple[str, ...] = _PASSES
    manager: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Enter all switches of a model."""
        with ExitStack() as stack:
            for switch in self.switches:
                stack.enter_context(switch(model))
            yield


_EVERYTHING = _PASSES + _STEP + _SERVED
_LIGER: dict[str, Any] = LIGER.fields()
_LIGER_FLASH_4: dict[str, Any] = {
    "pip": (LIGER.pip, FLASH_4.pip),
    "missing": lambda: "; ".join(filter(None, (LIGER.missing(), FLASH_4.missing()))) or None,
}
_sdpa, _flash_4 = partial(_attention, "sdpa"), partial(_attention, "flash_attention_4")
_all_sdpa, _all_flash_4, _all_fused = ((_liger_kernels, attention) for attention in (_sdpa, _flash_4, _fused))
_graphs: dict[str, Any] = {"kinds": _SERVED, "manager": {"use_cuda_graph": True}}
_liger, _liger_norm = (_liger_rotation, _sdpa), (_liger_norms, _liger_rotation, _sdpa)
_own_norms = (_hooked_norms, _fused)
_norm_label, _with_liger = "Liger's norms of heads, rotation + sdpa", "patch_model + Liger's other kernels"
PROVIDERS: dict[str, ModelProvider] = by_name(
    (
        ModelProvider("sdpa", "sdpa", switches=(_sdpa,), kinds=_EVERYTHING),
        ModelProvider("sdpa_graphs", "sdpa, CUDA graphs", switches=(_sdpa,), **_graphs),
        ModelProvider("liger", "Liger's rotation + sdpa", switches=_liger, **_LIGER),
        ModelProvider("liger_all", "Liger + sdpa", switches=_all_sdpa, kinds=_STEP, **_LIGER),
        ModelProvider(
            "liger_all_fa4", "Liger + flash_attention_4", switches=_all_flash_4, kinds=_STEP, **_LIGER_FLASH_4
        ),
        ModelProvider("liger_norm", _norm_label, switches=_liger_norm, norms=True, **_LIGER),
        ModelProvider("own_norms", "patch_model, norms of heads outside", switches=_own_norms, norms=True),
        ModelProvider("fused", "patch_model", "ours", switches=(_fused,), kinds=_EVERYTHING),
        ModelProvider("fused_liger", _with_liger, "ours", switches=_all_fused, kinds=_STEP, **_LIGER),
    )
)
