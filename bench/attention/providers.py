"""Providers of attention for each kind of case: ours, rivals from ``baselines``, functions that do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_rope_attn
from baselines import BASELINES, Baseline, attentions, masked, rotations
from baselines.masked import MaskedAttention
from baselines.norms import NORMED, Norms
from bench.attention.cases import INTERVALS
from bench.suite import Provider, by_name, keep_tables
from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import reference as corope_reference
from verification import testing


class Given(NamedTuple):
    """The arguments of a call in addition to q, k and v.

    case: the problem with the provider's variant. tables: what its ``prepare`` made. options: keywords of
    ``rope_attention``. weights: of norms, by keyword. ends, longest: of packed sequences.
    """

    case: testing.Case
    tables: Any
    options: dict[str, Any]
    weights: dict[str, Tensor]
    ends: Tensor
    longest: int


@dataclass(frozen=True, kw_only=True)
class AttentionProvider(Provider):
    """``run(q, k, v, given) -> o``; shapes as in ``baselines/base.py``, packed as in ``baselines/masked.py``.

    prepare: brings (N, D/2) float32 tables into its form before any clock runs. variant: fields of the case that it
    changes, for example its mask. form: how tensors are handed over, see ``suite.Problem``. options: further
    keywords of ours. unsupported: why it does not serve a case.
    """

    run: Callable[[Tensor, Tensor, Tensor, Given], Tensor]
    prepare: Callable[[Tensor, Tensor, torch.dtype], Any] = keep_tables
    variant: Mapping[str, Any] = field(default_factory=dict)
    form: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)
    unsupported: Callable[[testing.Case], str | None] = lambda case: None
    in_place: bool = False
    half_tables: bool = False
    rotates: bool = True


# Ours


def fused(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
    """Call ``rope_attention`` as a user does."""
    return fused_rope_attn.rope_attention(q, k, v, *given.tables, given.case.causal, **given.options, **given.weights)


def _varlen(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
    limits = given.ends, given.ends, given.longest, given.longest
    return fused_rope_attn.rope_attention_varlen(q, k, v, *given.tables, *limits, True, **given.options)


def ours(name: str, label: str, **fields: Any) -> AttentionProvider:
    """Return ours."""
    return AttentionProvider(name, label, "ours", **{"run": fused} | fields)


OURS = ours("fused", "fused (auto)")
# Ours over this is the cost of the rotation.
BARE = ours("bare_fused", "ours, without rotation", prepare=lambda *tables: (None, None), rotates=False)


# Rivals


def rival(b: Baseline) -> AttentionProvider:
    """Return a baseline as a provider."""

    def run(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
        case, norms = given.case, None
        if b.norm:
            assert case.norms is not None
            norms = Norms(given.weights["q_norm"], given.weights["k_norm"], case.norm_eps, case.norms)
        return b.run(q, k, v, given.tables, case.causal, norms)

    names = ("prepare", "unsupported", "in_place", "half_tables", "rotates", "backward")
    role = "rival" if b.rotates else "bare"
    fields = {name: getattr(b, name) for name in names}
    return AttentionProvider(b.name, b.label, role, b.missing, run=run, **fields)


def masked_rival(attention: MaskedAttention, kind: str, rotation: Any) -> AttentionProvider:
    """Return a rotation in place and an attention with a "window", of "packed" sequences, or with "intervals"."""
    attend: Any = getattr(attention, kind)

    def run(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
        if kind == "packed":
            turned = rotation.rotate(*(x.transpose(0, 1)[None] for x in (q, k)), given.tables)
            return attend(*(x[0].transpose(0, 1) for x in turned), v, given.ends, given.longest)
        options = given.options
        bounds = options["window"][:1] if kind == "window" else (options["query_starts"], options["query_ends"])
        return attend(*rotation.rotate(q, k, given.tables), v, *bounds)

    return AttentionProvider(
        attention.name,
        f"{rotation.label} + {attention.label}",
        "rival",
        lambda: rotation.missing() or attention.missing(),
        run=run,
        prepare=rotation.prepare,
        variant={"seqlens": None} if kind == "intervals" else {},
        form="packed" if kind == "packed" else "dense",
        in_place=True,
    )


# A function that does nothing, as a floor of host time


class _Nothing(torch.autograd.Function):
    """Return q, and as the gradients of q, k and v that of the output. All of them have the same shape."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return do, do, do


# Co-RoPE, which is held to its own definition

_BASE = 10000.0


def _corope(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
    return corope_attention(q, k, v, base=_BASE)


def corope_definition(q: Tensor, k: Tensor, v: Tensor, given: Given | None = None, **options: Any) -> Tensor:
    """Compute Co-RoPE in eager PyTorch, in chunks of angles."""
    return corope_reference.corope(q, k, v, base=_BASE, softmax_scale=q.shape[3] ** -0.5, **options)


# The table


@functools.cache
def table(kind: str) -> dict[str, AttentionProvider]:
    """Return the providers of a kind of cases by name. Labels depend on what is installed, hence a function."""
    return by_name(_providers(kind))


def _providers(kind: str) -> list[AttentionProvider]:
    if kind == "plain":
        return [OURS, BARE, *map(rival, BASELINES.values())]
    if kind == "host":
        # PyTorch's context that chooses cuDNN costs host time, so that it is entered before the calls.
        chosen = replace(attentions.CUDNN, label="cuDNN, chosen once", attend=attentions.SDPA.attend)
        active = functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        nothing = "nothing", "a function that does nothing", "ceiling"
        return [
            OURS,
            rival(Baseline("bare_sdpa", None, attentions.SDPA)),
            replace(rival(Baseline("bare_cudnn_chosen", None, chosen)), active=active),
            AttentionProvider(*nothing, run=lambda q, k, v, given: _Nothing.apply(q, k, v)),
        ]
    mask = "intervals" if kind in INTERVALS else kind
    masks = [masked_rival(each, mask, rotations.LIGER) for each in masked.MASKED if getattr(each, mask, None)]
    if kind == "window":
        full = ours("causal", "ours, full causal", variant={"window": None})
        return [ours("window", "ours, window"), full, *masks]
    if kind == "packed":
        return [
            ours("packed", "ours, packed", run=_varlen, form="packed"),
            ours("padded", "ours, padded right, causal", form="padded"),
            *masks,
        ]
    if kind in INTERVALS:
        return [ours("intervals", "ours, intervals", variant={"seqlens": None}), *masks]
    if kind == "norm":
        return [
            ours("fused", "fused, with norms"),
            ours("fused_without", "fused, without norms", variant={"norms": None}),
            *map(rival, NORMED.values()),
        ]
    if kind == "unsplit":
        rivals = (Baseline(name, rotations.APART, attention) for name, attention in attentions.UNSPLIT.items())
        same = ours("fused_same_bits", "fused, batch_invariant", options={"batch_invariant": True})
        return [OURS, same, *map(rival, rivals)]
    assert kind == "corope"
    # There are N squared angles: 1024 tokens take about 20 GiB at once.
    dense = AttentionProvider(
        *("dense", "eager, at once"),
        run=functools.partial(corope_definition, chunk_angles=1 << 62),
        unsupported=lambda case: "for at most 1024 tokens here" if case.len_q > 1024 else None,
    )
    return [ours("corope", "`corope_attention`", run=_corope), dense]
