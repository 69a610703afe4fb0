"""Implementations of a model's attention: transformers, Liger and ours, each switched on and off on the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from baselines.rotations import LIGER
from bench.suite import Provider

OURS = "fused"
# With all of Liger's other norms, which is what its users would compare with.
OURS_WITH_LIGER = "fused_liger"
_HEAD_NORMS = ("q_norm", "k_norm")


@contextmanager
def _attention(model: nn.Module, implementation: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _liger(model: nn.Module) -> Iterator[None]:
    """Replace transformers' rotation by Liger's in the module, as its own patches do, and undo it."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    modeling = sys.modules[type(model).__module__]
    before = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = liger_rotary_pos_emb
    try:
        with _attention(model, "sdpa"):
            yield
    finally:
        modeling.apply_rotary_pos_emb = before


@contextmanager
def _liger_norms(model: nn.Module, everywhere: bool) -> Iterator[None]:
    """Bind Liger's RMSNorm to the norms of heads, or to all of a model, as its patches do, and undo it."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    before = []
    for path, module in model.named_modules():
        name = type(module).__name__
        if not name.endswith("RMSNorm") or not (everywhere or path.endswith(_HEAD_NORMS)):
            continue
        gemma = name.startswith("Gemma")
        before.append((module, dict(module.__dict__)))
        module.__dict__ |= {
            "offset": float(gemma),
            "casting_mode": "gemma" if gemma else "llama",
            "variance_epsilon": module.eps if gemma else module.variance_epsilon,
            "in_place": not gemma,
            "row_mode": None,
            "forward": MethodType(LigerRMSNorm.forward, module),
        }
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__ |= attributes


@contextmanager
def _with_liger_norms(model: nn.Module, everywhere: bool, attention: Callable[[nn.Module], Any]) -> Iterator[None]:
    with _liger_norms(model, everywhere), attention(model):
        yield


@contextmanager
def _own_norms(model: nn.Module) -> Iterator[None]:
    """Patch the model and give its norms of heads hooks, which keeps them outside of the kernels."""
    norms = [module for path, module in model.named_modules() if path.endswith(_HEAD_NORMS)]
    hooks = [norm.register_forward_hook(_see_nothing) for norm in norms]
    try:
        with _fused(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _see_nothing(*_: Any) -> None:
    pass


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    from fused_rope_attn.integrations.transformers import patch_model, unpatch_model

    patch_model(model)
    try:
        yield
    finally:
        unpatch_model(model)


def _flash_missing() -> str | None:
    from transformers.utils import is_flash_attn_2_available

    return None if is_flash_attn_2_available() else "flash-attn is not installed"


_PASSES = ("train", "prefill", "decode")
_ALL = (*_PASSES, "serve")
_GRAPHS = {"use_cuda_graph": True}


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider):
    """A way to run a model's attention: ``on(model)`` is entered while a round of it runs.

    norms: only for models that norm heads. kinds: the works that it takes part in. manager: options of the manager of
    continuous batching.
    """

    on: Callable[[nn.Module], Any]
    norms: bool = False
    kinds: tuple[str, ...] = _PASSES
    manager: Mapping[str, Any] = field(default_factory=dict)


def _plain(implementation: str) -> Callable[[nn.Module], Any]:
    return lambda model: _attention(model, implementation)


def _normed(everywhere: bool, attention: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: _with_liger_norms(model, everywhere, attention)


_LIGER: dict[str, Any] = {"missing": LIGER.missing, "pip": LIGER.pip}
PROVIDERS: dict[str, ModelProvider] = {
    provider.name: provider
    for provider in (
        ModelProvider("eager", "eager", on=_plain("eager"), kinds=("serve",)),
        ModelProvider("eager_graphs", "eager, CUDA graphs", on=_plain("eager"), kinds=("serve",), manager=_GRAPHS),
        ModelProvider("sdpa", "sdpa", on=_plain("sdpa"), kinds=_ALL),
        ModelProvider("sdpa_graphs", "sdpa, CUDA graphs", on=_plain("sdpa"), kinds=("serve",), manager=_GRAPHS),
        ModelProvider(
            "flash_2", "flash_attention_2", missing=_flash_missing, on=_plain("flash_attention_2"), kinds=_ALL
        ),
        ModelProvider("liger", "Liger's rotation + sdpa", on=_liger, **_LIGER),
        ModelProvider(
            "liger_norm", "Liger's norms of heads, rotation + sdpa", on=_normed(False, _liger), norms=True, **_LIGER
        ),
        ModelProvider(
            "liger_all", "Liger's norms everywhere, rotation + sdpa", on=_normed(True, _liger), norms=True, **_LIGER
        ),
        ModelProvider("own_norms", "patch_model, norms of heads outside", on=_own_norms, norms=True),
        ModelProvider(OURS, "patch_model", "ours", on=_fused, kinds=_ALL),
        ModelProvider(
            OURS_WITH_LIGER,
            "patch_model, Liger's norms elsewhere",
            "ours",
            on=_normed(True, _fused),
            norms=True,
            **_LIGER,
        ),
    )
}
