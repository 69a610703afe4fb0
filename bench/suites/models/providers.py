"""Who runs a model's attention: transformers, Liger, and this project, each switched on and off on the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from baselines.rotations import LIGER
from bench.suite import never_missing

OURS = "fused"
# Beside all else that Liger has for norms, which is what its users would compare with.
OURS_BESIDE_LIGER = "fused_liger"
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
    """Liger's rotation in the place of transformers', as its own patches set it: for the module, hence undone."""
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
    """Liger's RMSNorm in the norms of heads, or in all of a model, as its patches bind it to modules; undone."""
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
    """Patched, with the norms of heads outside of the kernels, because they have hooks."""
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


@dataclass(frozen=True)
class Provider:
    """A way to run a model's attention: ``on(model)`` is in force while a round of it runs.

    norms: it is about norms of heads, for models that have them. against: whom of ours its time is set against. kinds:
    of works that it takes part in. manager: what it asks of the manager of continuous batching.
    """

    name: str
    label: str
    on: Callable[[nn.Module], Any]
    missing: Callable[[], str | None] = never_missing
    norms: bool = False
    against: str = OURS
    kinds: tuple[str, ...] = _PASSES
    manager: Mapping[str, Any] = field(default_factory=dict)


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("eager", "eager", lambda model: _attention(model, "eager"), kinds=("serve",)),
        Provider(
            "eager_graphs", "eager, CUDA graphs", lambda model: _attention(model, "eager"), kinds=("serve",),
            manager=_GRAPHS,
        ),
        Provider("sdpa", "sdpa", lambda model: _attention(model, "sdpa"), kinds=_ALL),
        Provider(
            "sdpa_graphs", "sdpa, CUDA graphs", lambda model: _attention(model, "sdpa"), kinds=("serve",),
            manager=_GRAPHS,
        ),
        Provider(
            "flash_2", "flash_attention_2", lambda model: _attention(model, "flash_attention_2"), _flash_missing,
            kinds=_ALL,
        ),
        Provider("liger", "Liger's rotation + sdpa", _liger, LIGER.missing),
        Provider(
            "liger_norm", "Liger's norms of heads, rotation + sdpa",
            lambda model: _with_liger_norms(model, False, _liger), LIGER.missing, norms=True,
        ),
        Provider(
            "liger_all", "Liger's norms everywhere, rotation + sdpa",
            lambda model: _with_liger_norms(model, True, _liger), LIGER.missing, norms=True, against=OURS_BESIDE_LIGER,
        ),
        Provider("own_norms", "patch_model, norms of heads outside", _own_norms, norms=True),
        Provider(OURS, "patch_model", _fused, kinds=_ALL),
        Provider(
            OURS_BESIDE_LIGER, "patch_model, Liger's norms elsewhere",
            lambda model: _with_liger_norms(model, True, _fused), LIGER.missing, norms=True, against=OURS_BESIDE_LIGER,
        ),
    )
}  # fmt: skip
