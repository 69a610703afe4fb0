"""The results of attention for a case: the reference in any dtype, and the operator in any backend."""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn.attention import reference
from fused_rope_attn.attention.problem import Tensors, describe
from fused_rope_attn.rotation import reference as rotation_reference
from verification.testing.cases import Case, Inputs, masks_of, norms_of

# Above this a score block of the reference is cut by rows: float64 and its gradient keep about eight such blocks alive.
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}


class _Results(NamedTuple):
    o: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Results(_Results):
    """Outputs and gradients; the gradients are None where they were not asked for, those of sinks and of the norms'
    weights also where the case has none. max_logit is None where an operator was not asked for it."""

    dsinks: Tensor | None = None
    dq_norm: Tensor | None = None
    dk_norm: Tensor | None = None
    max_logit: Tensor | None = None


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, causal: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Call `reference.attention` with other tensors and with options of `Problem` by name, without a check."""
    others = {name: options.pop(name) for name in Tensors._fields if name in options}
    tensors = Tensors(q, k, v, cos, sin, **others)
    return reference.attention(describe(tensors, causal=causal, **options), tensors)


def run_reference(inputs: Inputs, case: Case, dtype: torch.dtype | None = None) -> Results:
    """The reference's outputs and gradients: `ref64` with dtype=torch.float64, `eager` with None (the inputs' dtype).

    Inputs and tables are taken as given and cast, so that a low-precision table is not an error. Goes through
    batches, groups of heads and, where one head's scores are too large, blocks of rows; partial gradients are summed in
    at least float32 and rounded once.
    """
    results = _summed(inputs, case, case.dtype if dtype is None else dtype)
    if dtype != torch.float64:
        for name, weight in _weights(case, inputs.q.device).items():
            setattr(results, name, getattr(results, name).to(weight.dtype))
    return results


def _summed(inputs: Inputs, case: Case, dtype: torch.dtype) -> Results:
    """``run_reference`` in a dtype, before the gradients of sinks and of norms' weights are rounded."""
    q, k = inputs.q, inputs.k
    sums, device = torch.promote_types(dtype, torch.float32), q.device
    o, dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=device) for x in (q, q, k, k))
    lse = torch.full(q.shape[:3], -math.inf, dtype=sums, device=device)
    masks, weights = masks_of(case, device), {name: x.to(sums) for name, x in _weights(case, device).items()}
    sums_of_weights = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    sequences = list(_sequences(case))
    max_logit = lse.new_full((len(sequences), case.heads_q), -math.inf)
    group = case.heads_q // case.heads_kv
    for sequence, (b, rows_q, rows_k) in enumerate(sequences):
        len_q, len_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        if len_q == len_k == 0:  # there may be thousands
            continue
        own = slice(b, b + 1)
        seen = {name: masks[name] for name in ("kv_starts", "kv_lens", "query_starts", "query_ends")}
        seen = {name: x[own] if x is not None and len(x) > 1 else x for name, x in seen.items()}
        if case.seqlens is not None:
            # Lengths on the device: queries before position 0 see nothing, causal or not.
            seen["kv_lens"] = torch.tensor([len_k], device=device)
        cos, sin = (x[..., rows_k, :] if case.token_tables else x for x in (inputs.cos, inputs.sin))
        cos, sin = reference.normalise_tables(cos, sin, case.rotary, case.interleaved)
        cos, sin = (x[own] if len(x) > 1 else x for x in (cos, sin))
        head_bytes = max(1, group * len_q * len_k * (8 if dtype == torch.float64 else 4))
        limit = BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])
        step = max(1, limit // head_bytes)  # key-value heads at once
        rows = max(1, len_q if step > 1 else min(len_q, limit * len_q // head_bytes))
        for first in range(0, case.heads_kv, step):
            heads = slice(first * group, (first + step) * group)
            qs, kv = (own, heads, rows_q), (own, slice(first, first + step), rows_k)
            leaves = {"dq": q[qs], "dk": k[kv], "dv": inputs.v[kv]}
            leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
            for name, weight in weights.items():
                leaves[name] = (weight[heads] if name == "dsinks" else weight).detach().requires_grad_()
            upstream = [inputs.do[qs].to(dtype), *(x[qs].to(sums) for x in (inputs.dlse,) if x is not None)]
            part = _reference_heads(leaves, cos, sin, case, seen, rows, upstream)
            o[qs], lse[qs], max_logit[sequence, heads], dq[qs], dk[kv], dv[kv], *of_weights = part
            for (name, whole), gradient in zip(sums_of_weights.items(), of_weights):
                whole[heads if name == "dsinks" else slice(None)] += gradient
    results = Results(o, lse, dq, dk, dv)
    results.max_logit = max_logit
    for name, whole in sums_of_weights.items():
        setattr(results, name, whole)
    return results


def _weights(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Return the sinks and the weights of norms that a case has, by the names of their gradients."""
    given = {"sinks": masks_of(case, device)["sinks"], **norms_of(case, device)}
    return {f"d{name}": given[name] for name in ("sinks", "q_norm", "k_norm") if given.get(name) is not None}


def _sequences(case: Case) -> Iterator[tuple[int, slice, slice]]:
    """Yield the batch entry, the queries and the keys of each sequence: no mask of packed sequences is involved."""
    if case.seqlens is None:
        yield from ((b, slice(0, case.len_q), slice(0, case.len_k)) for b in range(case.batch))
        return
    first_q = first_k = 0
    for len_q, len_k in case.seqlens:
        yield 0, slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        first_q, first_k = first_q + len_q, first_k + len_k


def _reference_heads(
    leaves: dict[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    case: Case,
    masks: dict[str, Any],
    rows: int,
    upstream: list[Tensor],
) -> tuple[Tensor, ...]:
    """`reference.attention` and its gradients for a few heads, `rows` queries at a time: o, lse, max_logit, and the
    gradients of the leaves. upstream: of o, and of lse if it has one."""
    q, k, v = (leaves[name] for name in ("dq", "dk", "dv"))
    sums = torch.promote_types(q.dtype, torch.float32)
    if q.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    position, key = reference.positions(q.shape[2], k.shape[2], masks["kv_lens"], q.device)
    parts = [slice(start, start + rows) for start in range(0, max(1, q.shape[2]), rows)]

    def visible(part: slice) -> Tensor:
        pairs = position[:, part], key, case.causal
        return reference.visible_pairs(*pairs, window=case.window, first_row=part.start, **masks)

    with torch.enable_grad():
        dead = torch.cat([~visible(part).any(-1) for part in parts], 1)
        absent = ~functools.reduce(torch.logical_or, [visible(part).any(-2) for part in parts])
        q, k, v = reference.hide(q, dead), reference.hide(k, absent), reference.hide(v, absent)
        options: dict[str, Any] = {name: getattr(case, name) for name in ("interleaved", "norm_eps")}
        options["norm_offset"] = case.norms
        q = reference.norm_rotate(q, leaves.get("dq_norm"), *reference.table_rows(cos, sin, position), **options)
        k = reference.norm_rotate(k, leaves.get("dk_norm"), *reference.table_rows(cos, sin, key), **options)
        # Cut the graph at the rotated tensors: blocks of rows add up there, and the rotation is undone once.
        cut = [x.detach().requires_grad_() for x in (k, v, *(leaves[name] for name in leaves if name == "dsinks"))]
        added, found = [torch.zeros_like(x, dtype=sums) for x in cut], []
        options = {"softmax_scale": case.scale, "softcap": case.softcap, "return_max_logit": True}
        for part in parts:
            rows_q, sinks = q[:, :, part].detach().requires_grad_(), cut[2] if case.sinks else None
            given = rows_q, cut[0], cut[1], visible(part)
            o, lse, row_max = reference.masked_attention(*given, sinks=sinks, **options)
            dq, *others = torch.autograd.grad(
                (o, lse)[: len(upstream)], [rows_q, *cut], [x[:, :, part] for x in upstream]
            )
            for total, x in zip(added, others):
                total += x
            found.append((o.detach(), lse.detach(), row_max, dq))
        o, lse, row_max, dq = (torch.cat(x, 2) for x in zip(*found))
        rotated = [leaves[name] for name in leaves if name not in ("dv", "dsinks")]
        dq, dk, *dweights = torch.autograd.grad((q, k), rotated, (dq, added[0].to(k.dtype)))
    return o, lse, reference.largest(row_max), dq, dk, *added[1:], *dweights


class RotationResults(NamedTuple):
    """The output of one tensor, its gradient, and that of its norm's weight, None without a norm."""

    y: Tensor
    dx: Tensor
    dweight: Tensor | None


def run_rotation_reference(
    x: Tensor, dy: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None, **options: Any
) -> RotationResults:
    """`rotation.reference.rotation` of x (B, H, N, D) with these ``options``, and its gradients for dy: `ref64` with
    dtype=torch.float64, `eager` with None (the inputs' dtypes). Inputs, tables and weight are taken as given and cast.
    """
    if dtype is not None:
        x, dy, cos, sin = (t.to(dtype) for t in (x, dy, cos, sin))
    weight, inverse = options.pop("weight", None), options.pop("inverse", False)
    if weight is None:  # the transposed rotation, which is rounded once also where autograd would add two gradients up
        pairs = (x, inverse), (dy, not inverse)
        y, dx = (rotation_reference.rotation(t, cos, sin, inverse=other, **options) for t, other in pairs)
        return RotationResults(y, dx, None)
    with torch.enable_grad():
        leaf, weight = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight))
        y = rotation_reference.rotation(leaf, cos, sin, inverse=inverse, weight=weight, **options)
        return RotationResults(y.detach(), *torch.autograd.grad(y, (leaf, weight), dy))


def run_op(
    inputs: Inputs,
    case: Case,
    *,
    backend: str,
    strategy: str = "auto",
    deterministic: bool = False,
    grads: bool = True,
    max_logit: bool = False,
) -> Results:
    """`fused_rope_attn.rope_attention` on the inputs in their memory layout, with gradients unless `grads` is False,
    and its largest logits if `max_logit` is True."""
    from verification.attention import AttentionCheck  # here, so that inputs and references need the reference only

    options = {"deterministic": deterministic, "return_max_logit": max_logit} | ({} if grads else {"wanted": ()})
    check = AttentionCheck.of(case, **options)
    made = check.made(inputs)
    with warnings.catch_warnings():
        # A case that has more queries than keys has them on purpose.
        warnings.filterwarnings("ignore", "q .* positions and k", UserWarning)
        found = check.results(*check.call(made, (backend, strategy)), made)
    results = Results(*(found.get(name) for name in Results._fields))
    for name in ("dsinks", "dq_norm", "dk_norm", "max_logit"):
        x, is_row = found.get(name), name != "max_logit" or case.seqlens is not None
        setattr(results, name, x[0] if x is not None and is_row else x)
    return results
