"""Implementations of a model's attention: transformers, Liger and ours, each switched on and off on the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest import mock

from torch import nn

from baselines.rotations import LIGER_ROTATION
from bench.suite import Provider, by_name

OURS = "fused"
# With all of Liger's other norms, which is what its users would compare with.
OURS_WITH_LIGER = "fused_liger"
_HEAD_NORMS = ("q_norm", "k_norm")
Switch = Callable[[nn.Module], AbstractContextManager]


def _all(*switches: Switch) -> Switch:
    """Return what enters several contexts of a model."""

    @contextmanager
    def on(model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for switch in switches:
                stack.enter_context(switch(model))
            yield

    return on


def _plain(implementation: str) -> Switch:
    """Return what chooses an attention of transformers."""

    @contextmanager
    def on(model: nn.Module) -> Iterator[None]:
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation(before)

    return on


def _liger_rotation(model: nn.Module) -> AbstractContextManager:
    """Replace transformers' rotation by Liger's in the module, as its own patches do."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return mock.patch.object(sys.modules[type(model).__module__], "apply_rotary_pos_emb", liger_rotary_pos_emb)


def _liger_norms(everywhere: bool) -> Switch:
    """Return what binds Liger's RMSNorm to the norms of heads, or to all of a model, as its patches do."""

    def bound(module: Any) -> dict[str, Any]:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        gemma = type(module).__name__.startswith("Gemma")
        return {
            "offset": float(gemma),
            "casting_mode": "gemma" if gemma else "llama",
            "variance_epsilon": module.eps if gemma else module.variance_epsilon,
            "in_place": not gemma,
            "row_mode": None,
            "forward": MethodType(LigerRMSNorm.forward, module),
        }

    @contextmanager
    def on(model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in model.named_modules():
                if type(module).__name__.endswith("RMSNorm") and (everywhere or path.endswith(_HEAD_NORMS)):
                    stack.enter_context(mock.patch.dict(module.__dict__, bound(module)))
            yield

    return on


@contextmanager
def _hooked_norms(model: nn.Module) -> Iterator[None]:
    """Give the norms of heads hooks that do nothing, which keeps them outside of our kernels."""
    norms = [module for path, module in model.named_modules() if path.endswith(_HEAD_NORMS)]
    hooks = [norm.register_forward_hook(lambda *given: None) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
_SERVED = ("serve",)


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider):
    """A way to run a model's attention: ``on(model)`` is entered while a round of it runs.

    norms: only for models that norm heads. kinds: the works that it takes part in. manager: options of the manager of
    continuous batching.
    """

    on: Switch
    norms: bool = False
    kinds: tuple[str, ...] = _PASSES
    manager: Mapping[str, Any] = field(default_factory=dict)


_LIGER = LIGER_ROTATION.fields()
_NORMS: dict[str, Any] = _LIGER | {"norms": True}
_GRAPHS: dict[str, Any] = {"kinds": _SERVED, "manager": {"use_cuda_graph": True}}
_eager, _sdpa, _flash_2 = map(_plain, ("eager", "sdpa", "flash_attention_2"))
_liger = _all(_liger_rotation, _sdpa)
_liger_norm, _liger_all = (_all(_liger_norms(everywhere), _liger) for everywhere in (False, True))
_fused_liger = _all(_liger_norms(True), _fused)
PROVIDERS: dict[str, ModelProvider] = by_name(
    (
        ModelProvider("eager", "eager", on=_eager, kinds=_SERVED),
        ModelProvider("eager_graphs", "eager, CUDA graphs", on=_eager, **_GRAPHS),
        ModelProvider("sdpa", "sdpa", on=_sdpa, kinds=_PASSES + _SERVED),
        ModelProvider("sdpa_graphs", "sdpa, CUDA graphs", on=_sdpa, **_GRAPHS),
        ModelProvider("flash_2", "flash_attention_2", missing=_flash_missing, on=_flash_2, kinds=_PASSES + _SERVED),
        ModelProvider("liger", "Liger's rotation + sdpa", on=_liger, **_LIGER),
        ModelProvider("liger_norm", "Liger's norms of heads, rotation + sdpa", on=_liger_norm, **_NORMS),
        ModelProvider("liger_all", "Liger's norms everywhere, rotation + sdpa", on=_liger_all, **_NORMS),
        ModelProvider("own_norms", "patch_model, norms of heads outside", on=_all(_hooked_norms, _fused), norms=True),
        ModelProvider(OURS, "patch_model", "ours", on=_fused, kinds=_PASSES + _SERVED),
        ModelProvider(OURS_WITH_LIGER, "patch_model, Liger's norms elsewhere", "ours", on=_fused_liger, **_NORMS),
    )
)
