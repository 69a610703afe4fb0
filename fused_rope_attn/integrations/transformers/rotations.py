"""Norms and rotation of a module's heads: the norms that kernels compute, the tables of a pass, and their launches.
Norms can be hooked, wrapped or replaced after patching, so each call checks them again. A norm that is not known to be
exactly ``x * rsqrt(mean(x**2) + eps) * (offset + weight)`` runs as in an unpatched model."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fused_rope_attn import apply_rope_qk
from fused_rope_attn.integrations.transformers import families
from fused_rope_attn.integrations.transformers.families import AttentionModule, Convention, Latent
from fused_rope_attn.rotation.api import rotate_checked
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.runtime.checks import named


class RmsNorm(NamedTuple):
    """The attributes and dtypes of a class of norms."""

    eps: str = "variance_epsilon"  # the attribute with its epsilon
    offset: float | str = 0.0  # a number to add to its weight, or the name of the attribute with the number
    keeps_dtype: bool = False  # its result has its input's dtype, else that to which PyTorch promotes input and weight
    autocast: bool = False  # its result is float32 under autocast


_LIGER = RmsNorm(offset="offset", keeps_dtype=True)
_GROUPS: tuple[tuple[RmsNorm, str], ...] = (
    (RmsNorm(),
        "apertus.ApertusRMSNorm dots1.Dots1RMSNorm exaone4.Exaone4RMSNorm exaone_moe.ExaoneMoeRMSNorm "
        "glm4_moe.Glm4MoeRMSNorm hy_v3.HYV3RMSNorm kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm lfm2.Lfm2RMSNorm "
        "lfm2_moe.Lfm2MoeRMSNorm mellum.MellumRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm "
        "qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm"),
    (RmsNorm(keeps_dtype=True), "afmoe.AfmoeRMSNorm flint.FlintRMSNorm"),
    (RmsNorm('eps', offset=1.0, keeps_dtype=True),
        "gemma3.Gemma3RMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm qwen3_next.Qwen3NextRMSNorm"),
)  # fmt: skip
# By name as `families.name_of` gives it.
RMS_NORMS = {families.path_of(row): norm for norm, rows in _GROUPS for row in rows.split()} | {
    "torch.nn.modules.normalization.RMSNorm": RmsNorm("eps", autocast=True),
    "liger_kernel.transformers.rms_norm.LigerRMSNorm": _LIGER,
}


class HeadNorms(NamedTuple):
    """The norms of a module's heads as the operators take them, and as in ``RmsNorm`` how its own treat dtypes."""

    q_norm: Tensor  # weights (D,)
    k_norm: Tensor
    norm_eps: float
    norm_offset: float
    keeps_dtype: bool
    autocast: bool

    @property
    def options(self) -> dict[str, Any]:
        """The norms as keywords of the operators."""
        return dict(zip(("q_norm", "k_norm", "norm_eps", "norm_offset"), self))


def head_norms(q_norm: nn.Module, k_norm: nn.Module) -> HeadNorms | str:
    """Return the norms of a module's heads, or the reason why the kernels cannot compute them."""
    if _has_any_global_hook():
        return "hooks on all modules"
    of_q, of_k = _described(q_norm), _described(k_norm)
    if isinstance(of_q, str) or isinstance(of_k, str):
        return f"q_norm {of_q}" if isinstance(of_q, str) else f"k_norm {of_k}"
    if of_q != of_k:
        return "q_norm and k_norm differ in more than their weights"
    return HeadNorms(cast(Tensor, q_norm.weight), cast(Tensor, k_norm.weight), *of_q)


def unfit_for(norms: HeadNorms, q: Tensor, cached: bool) -> str:
    """Return why norms that the kernels could compute do not fit queries (B, HQ, N, D), or "". cached: the keys go into
    a cache, which must get the result dtype of the module's own norms."""
    weights = norms.q_norm, norms.k_norm
    for weight in weights:
        if weight.shape != q.shape[3:]:
            return f"weights of shape {tuple(weight.shape)} for heads of {q.shape[3]} columns"
        if weight.device != q.device:
            return f"weights on {weight.device} for heads on {q.device}"
        if weight.dtype not in (q.dtype, torch.float32):
            return f"weights in {named(weight.dtype)} for heads in {named(q.dtype)}"
    if norms.keeps_dtype:
        return ""
    autocast = not q.is_meta and torch.is_autocast_enabled(q.device.type)
    promoted = not (weights[0].dtype is weights[1].dtype is q.dtype) or (norms.autocast and autocast)
    # The module's own norms then return float32. Autocast casts it to q's dtype for attention, but not for a cache.
    if promoted and (cached or not autocast):
        return f"norms that make {named(q.dtype)} heads float32"
    return ""


def _described(norm: nn.Module) -> tuple[float, float, bool, bool] | str:
    """Return (eps, offset, keeps_dtype, autocast) of a norm, or the reason why the kernels cannot compute it."""
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return "has hooks"
    own = "forward" in norm.__dict__
    form = _form_of_instance(norm) if own else _form_of(type(norm))
    if form is None:
        return "has a forward of its own" if own else f"is {type(norm).__name__}, or a changed form of it"
    weight, eps = norm.weight, getattr(norm, form.eps)
    if type(weight) not in (nn.Parameter, Tensor):
        return f"has a weight of type {type(weight).__name__}"
    if not isinstance(eps, float):  # PyTorch's default is the dtype's own
        return f"has an eps of {eps}"
    if form is _LIGER and norm.casting_mode not in ("llama", "gemma"):  # others compute in the input's dtype
        return f"has the casting mode {norm.casting_mode}"
    offset = getattr(norm, form.offset) if isinstance(form.offset, str) else form.offset
    return eps, float(cast(float, offset)), form.keeps_dtype, form.autocast


# Graphs of torch.compile assume that the methods of a class never change, and so may assume this result.
@torch.compiler.assume_constant_result
def _form_of(cls: type[nn.Module]) -> RmsNorm | None:
    """Return the ``RmsNorm`` of a class; None if it is another kind of norm, or none."""
    # The kernels replace the norm's call, so refuse a class that does something else in ``__call__``.
    return families.row_of(cls, RMS_NORMS) if cls.__call__ is nn.Module.__call__ else None


def _form_of_instance(norm: nn.Module) -> RmsNorm | None:
    """Return the ``RmsNorm`` of an instance by its own forward, because Liger replaces the forward of instances."""
    forward = norm.__dict__["forward"]
    if torch.compiler.is_compiling() or not isinstance(forward, MethodType) or forward.__self__ is not norm:
        return None
    function = forward.__func__
    name, _, method = f"{function.__module__}.{function.__qualname__}".rpartition(".")
    # A wrapper has the wrapped function's names, but not its globals.
    own = isinstance(function, FunctionType) and function.__globals__.get("__name__") == function.__module__
    own = own and method == "forward" and type(norm).__call__ is nn.Module.__call__
    return _LIGER if own and RMS_NORMS.get(name) is _LIGER else None


# Tables of a pass that are kept at a time: two kinds of layers, on a few devices.
_MOST_TABLES = 8


class Tables:
    """cos and sin (1|B, N, R/2) of a batch's tokens, or None, and the operators' options for these tables."""

    def __init__(self, cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False):
        self.arrays: tuple[Any, Any] = (cos, sin)
        rotary_dim = None if cos is None else 2 * cos.shape[-1]
        self.options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved}
        self.joined: tuple[Any, Any] | None = None  # the tables of all ranks that share the sequence

    def mapped(self, function: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
        """Return function(cos) and function(sin), or None and None."""
        cos, sin = self.arrays
        return (None, None) if cos is None else (function(cos), function(sin))

    def long(self, rows: int) -> tuple[Any, Any]:
        """Expand tables of one row to (1|B, rows, R/2), all rows the same."""
        return self.mapped(lambda table: table.expand(-1, rows, -1))


class Kept:
    """Tables that the layers of one forward pass share. They live exactly as long as the pass's Batch."""

    # Not a dict, because accelerate and others take containers apart to move the tensors in them.
    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: dict[Any, tuple[Tables, Any]] = {}


def _once(kept: Kept | None, sources: tuple, options: tuple, make: Callable[[], Tables]) -> Tables:
    """Return what ``make`` returns, the same for all layers of a pass that have these sources and options. Keep the
    sources alive so that their ids stay unique. A compiled graph asks for no id, because it would break."""
    if kept is None:
        return make()
    key = (*map(id, sources), *options)
    if key not in kept.tables:
        if len(kept.tables) >= _MOST_TABLES:  # something between the layers makes new ones for each
            kept.tables.clear()
        kept.tables[key] = make(), sources
    return kept.tables[key][0]


class Tokens(NamedTuple):
    """The new tokens of one layer: q (B, HQ, N, D), k and v (B, HKV, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables  # of the rotation that q and k still need, if they need one
    norms: HeadNorms | None = None  # those that the kernels compute before it
    latent: Latent | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that attention takes before the tables."""
        if self.latent is None:
            return self.q, self.k, self.v
        return self.latent.q_nope, self.q, self.latent.k_nope, self.k, self.v

    @property
    def options(self) -> dict[str, Any]:
        """The operators' options for the tables and the norms."""
        if self.latent is not None:  # all columns of q and k are rotated
            return {"interleaved": self.tables.options["interleaved"]}
        return self.tables.options if self.norms is None else self.tables.options | self.norms.options

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return () if self.norms is None else (self.norms.q_norm, self.norms.k_norm)

    def turning(self, kept: Kept | None) -> Tables:
        """Return the tables, or those of angle 0 if there are none, for launches that norm and rotate."""
        if self.tables.arrays[0] is not None:
            return self.tables
        return Tables(*identity_row(self.k.device, kept).long(self.k.shape[2]))

    def rotated(self, kept: Kept | None) -> Tokens:
        """Norm and rotate q and k, by one launch. The result needs neither, but latent attention has no calls without
        tables: there it has tables of one row, of angle 0."""
        if self.tables.arrays[0] is None and self.norms is None:
            return self
        given = self._replace(tables=self.turning(kept))
        q, k = apply_rope_qk(self.q, self.k, *given.tables.arrays, **given.options)
        tables = Tables()
        if self.latent is not None:  # all columns are rotated, but the tables have one pair
            row = identity_row(q.device, kept)
            tables = Tables(*row.mapped(lambda table: table.expand(-1, -1, q.shape[-1] // 2)))
        return Tokens(q, k, self.v, tables, latent=self.latent)

    def rotated_keys(self, kept: Kept | None, out: Tensor | None = None) -> Tensor:
        """Return normed and rotated k. Call this only after attention has checked the tokens."""
        if self.tables.arrays[0] is None and self.norms is None:
            return self.k if out is None else out.copy_(self.k)
        tables = self.turning(kept)
        options = RotationOptions(**tables.options, inverse=False, layout="bhsd")
        outs = None if out is None else [out]
        tensors = RotationTensors([self.k], outs, *tables.arrays, position_ids=None, cu_seqlens=None)
        if self.norms is not None:
            options = options._replace(norm_eps=self.norms.norm_eps, norm_offset=self.norms.norm_offset)
            tensors = tensors._replace(weights=[self.norms.k_norm])
        return rotate_checked(options, tensors)[0]


def tables_for(
    module: AttentionModule, convention: Convention, embeddings: Any, q: Tensor, kept: Kept | None
) -> Tables:
    """Return the tables for q (B, HQ, N, D). embeddings: (cos, sin) of the model's rotary embedding, or cos + i sin. A
    layer that does not rotate ignores them; they may then be None, and it has no tables."""
    if not convention.rotates_in(module, embeddings):
        return Tables()
    interleaved = convention.is_interleaved(module)
    sources = (embeddings,) if isinstance(embeddings, Tensor) else embeddings
    sections = convention.sections_of(module, sources[0])

    def make() -> Tables:
        arrays = (embeddings.real, embeddings.imag) if isinstance(embeddings, Tensor) else embeddings
        cos, sin = convention.half_widths(arrays, sections)
        if cos.dtype not in (torch.float32, q.dtype):  # autocast may have given q another dtype than the model's
            cos, sin = cos.float(), sin.float()
        return Tables(cos, sin, interleaved)

    # One pair serves all layers, or, as in Gemma 3, all of one kind.
    options = q.dtype, convention.half_width, interleaved, sections
    return _once(kept, sources, options, make)


def identity_row(device: torch.device, kept: Kept | None) -> Tables:
    """Return tables of one row that rotate one pair by the angle 0, which is exact in every dtype, the same for all
    layers of a pass."""
    shape = (1, 1, 1)
    return _once(
        kept, (), (device,), lambda: Tables(torch.ones(shape, device=device), torch.zeros(shape, device=device))
    )
