"""The results of attention for a case: the reference in any dtype, and the operator in any backend."""

import functools
import math
import warnings
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fused_rope_attn.attention import reference
from fused_rope_attn.attention.problem import Tensors, describe
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
    dtype = case.dtype if dtype is None else dtype
    if case.seqlens is None:
        results = _reference(inputs, case, dtype)
    else:
        results = _reference_packed(inputs, case, case.seqlens, dtype)
    if dtype != torch.float64:
        if case.sinks:
            results.dsinks = cast(Tensor, results.dsinks).to(case.sinks_dtype)
        if case.norms is not None:
            results.dq_norm, results.dk_norm = (
                cast(Tensor, x).to(case.norm_dtype) for x in (results.dq_norm, results.dk_norm)
            )
    return results


def _reference(inputs: Inputs, case: Case, dtype: torch.dtype) -> Results:
    """``run_reference`` of sequences in a batch. The gradients of sinks and of norms' weights are not rounded."""
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    wide = dtype == torch.float64
    cos, sin = reference.normalise_tables(inputs.cos, inputs.sin, case.rotary, case.interleaved)
    if wide:
        cos, sin = cos.double(), sin.double()

    lse_dtype = torch.float64 if wide else torch.float32
    o, dq = (torch.zeros(q.shape, dtype=dtype, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(k.shape, dtype=dtype, device=q.device) for _ in range(2))
    lse = torch.zeros(q.shape[:3], dtype=lse_dtype, device=q.device)
    max_logit = torch.zeros(q.shape[:2], dtype=lse_dtype, device=q.device)
    masks = masks_of(case, q.device)
    dsinks = torch.zeros(case.heads_q, dtype=lse_dtype, device=q.device)
    weights = _weights(case, q.device, lse_dtype)
    dweights = [torch.zeros_like(weight) for weight in weights]

    group = case.heads_q // case.heads_kv
    head_bytes = max(1, group * case.len_q * case.len_k * (8 if wide else 4))
    limit = BLOCK_BYTES.get(q.device.type, BLOCK_BYTES["cpu"])
    step = max(1, limit // head_bytes)  # key-value heads at once
    rows = max(1, case.len_q if step > 1 else min(case.len_q, limit * case.len_q // head_bytes))
    for b in range(case.batch):
        table = slice(b, b + 1) if cos.shape[0] > 1 else slice(0, 1)
        for first in range(0, case.heads_kv, step):
            kv = (slice(b, b + 1), slice(first, first + step))
            qs = (slice(b, b + 1), slice(first * group, (first + step) * group))
            q_block, k_block, v_block, do_block = (x.detach().to(dtype) for x in (q[qs], k[kv], v[kv], do[qs]))
            part = {name: x if x is None else x[b : b + 1] for name, x in masks.items() if name.startswith("kv_")}
            for name in ("query_starts", "query_ends"):
                x = masks[name]
                part[name] = x if x is None or x.shape[0] == 1 else x[b : b + 1]
            part["dlse"] = None if inputs.dlse is None else inputs.dlse[qs].to(lse_dtype)
            if case.sinks:
                part["sinks"] = masks["sinks"][qs[1]].to(lse_dtype)
            o[qs], lse[qs], dq[qs], dk[kv], dv[kv], max_logit[qs], dsinks_part, *dweights_part = _reference_heads(
                q_block, k_block, v_block, do_block, cos[table], sin[table], case, rows, weights, **part
            )
            for whole, of_part in zip(dweights, dweights_part):
                whole += of_part
            if dsinks_part is not None:
                dsinks[qs[1]] += dsinks_part
    results = Results(o, lse, dq, dk, dv)
    results.max_logit = max_logit
    results.dsinks = dsinks if case.sinks else None
    if weights:
        results.dq_norm, results.dk_norm = dweights
    return results


def _weights(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The weights of the case's norms, of q and of k, none where it has no norms, in ``dtype``."""
    given = norms_of(case, device)
    return [given[name].to(dtype) for name in ("q_norm", "k_norm")] if given else []


def _reference_packed(inputs: Inputs, case: Case, seqlens: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Results:
    """``_reference`` of each sequence by itself: no mask of packed sequences is involved. Rows after the last one see
    nothing."""
    q, k = inputs.q, inputs.k
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    o, dq = (torch.zeros(q.shape, dtype=dtype, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(k.shape, dtype=dtype, device=q.device) for _ in range(2))
    lse = torch.full(q.shape[:3], -math.inf, dtype=lse_dtype, device=q.device)
    max_logit = torch.full((len(seqlens), case.heads_q), -math.inf, dtype=lse_dtype, device=q.device)
    dsinks = torch.zeros(case.heads_q, dtype=lse_dtype, device=q.device)
    dweights = [torch.zeros_like(weight) for weight in _weights(case, q.device, lse_dtype)]
    first_q = first_k = 0
    for sequence, (len_q, len_k) in enumerate(seqlens):
        if len_q == len_k == 0:  # there may be thousands
            continue
        # Lengths on the device: queries before position 0 see nothing, causal or not.
        one = replace(case, seqlens=None, token_tables=False, len_q=len_q, len_k=len_k, kv_lens=(len_k,))
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        some_q, some_k = (x[:, :, rows_q] for x in (q, inputs.do)), (x[:, :, rows_k] for x in (k, inputs.v))
        (q_part, do_part), (k_part, v_part) = some_q, some_k
        dlse = None if inputs.dlse is None else inputs.dlse[:, :, rows_q]
        cos, sin = (x[..., rows_k, :] if case.token_tables else x for x in (inputs.cos, inputs.sin))
        part_inputs = Inputs(q_part, k_part, v_part, cos, sin, do_part).with_dlse(dlse)
        part = _reference(part_inputs, one, dtype)
        for whole, x, rows in zip((o, lse, dq, dk, dv), part, (rows_q, rows_q, rows_q, rows_k, rows_k)):
            whole[:, :, rows] = cast(Tensor, x)
        max_logit[sequence] = cast(Tensor, part.max_logit)[0]
        if part.dsinks is not None:
            dsinks += part.dsinks
        for whole_weight, of_part in zip(dweights, (part.dq_norm, part.dk_norm)):
            whole_weight += cast(Tensor, of_part)
        first_q, first_k = first_q + len_q, first_k + len_k
    results = Results(o, lse, dq, dk, dv)
    results.max_logit = max_logit
    results.dsinks = dsinks if case.sinks else None
    if dweights:
        results.dq_norm, results.dk_norm = dweights
    return results


def _reference_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    cos: Tensor,
    sin: Tensor,
    case: Case,
    rows: int,
    weights: list[Tensor],
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    query_starts: Tensor | None = None,
    query_ends: Tensor | None = None,
    **bounds: Tensor | None,
) -> tuple[Any, ...]:
    """`reference.attention` and its gradients for a few heads, `rows` queries at a time: o, lse, dq, dk, dv, max_logit,
    dsinks or None, and where there are ``weights`` of norms, in the dtype of sums, theirs."""
    with torch.enable_grad():
        q, k = q.requires_grad_(), k.requires_grad_()
        position, key = reference.positions(case.len_q, case.len_k, bounds.get("kv_lens"), q.device)
        masks: dict[str, Any] = bounds | {"window": case.window, "query_starts": query_starts, "query_ends": query_ends}
        parts = [slice(start, start + rows) for start in range(0, case.len_q, rows)]

        def visible(part: slice) -> Tensor:
            return reference.visible_pairs(position[:, part], key, case.causal, **masks, first_row=part.start)

        q_seen, k_seen = q, k
        if parts:
            q_seen = reference.hide(q, torch.cat([~visible(part).any(-1) for part in parts], 1))
            absent = ~functools.reduce(torch.logical_or, [visible(part).any(-2) for part in parts])
            k_seen, v = reference.hide(k, absent), reference.hide(v, absent)
        weights = [weight.detach().requires_grad_() for weight in weights]
        q_norm, k_norm = weights or (None, None)
        options: dict[str, Any] = {
            "interleaved": case.interleaved,
            "norm_eps": case.norm_eps,
            "norm_offset": case.norms,
        }
        q_rot = reference.norm_rotate(q_seen, q_norm, *reference.table_rows(cos, sin, position), **options)
        k_rot = reference.norm_rotate(k_seen, k_norm, *reference.table_rows(cos, sin, key), **options)
        # Cut the graph at the rotated tensors: blocks of rows add up there, and the rotation is undone once.
        leaves = [x.detach().requires_grad_() for x in (q_rot, k_rot, v)]
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        dsinks = None
        if sinks is not None:
            leaves.append(sinks.detach().requires_grad_())
            dsinks = torch.zeros_like(sinks)
        o, dq_rot = torch.zeros_like(q, requires_grad=False), torch.zeros_like(q, requires_grad=False)
        lse = torch.zeros(q.shape[:3], device=q.device, dtype=sum_dtype)
        max_logit = lse.new_full(q.shape[:2], -math.inf)
        dk_rot, dv = (torch.zeros(k.shape, dtype=sum_dtype, device=k.device) for _ in range(2))
        for part in parts:
            o_part, lse_part, row_max = reference.masked_attention(
                leaves[0][:, :, part],
                leaves[1],
                leaves[2],
                visible(part),
                softmax_scale=case.scale,
                softcap=case.softcap,
                sinks=leaves[3] if sinks is not None else None,
                return_max_logit=True,
            )
            max_logit = torch.maximum(max_logit, reference.largest(row_max))
            outputs, upstream = [o_part], [do[:, :, part]]
            if dlse is not None:
                outputs, upstream = [*outputs, lse_part], [*upstream, dlse[:, :, part]]
            dq_part, dk_part, dv_part, *sinks_part = torch.autograd.grad(outputs, leaves, upstream)
            if dsinks is not None:
                dsinks += sinks_part[0]
            o[:, :, part], lse[:, :, part] = o_part.detach(), lse_part.detach()
            dq_rot += dq_part
            dk_rot += dk_part
            dv += dv_part
        dq, dk, *dweights = torch.autograd.grad((q_rot, k_rot), (q, k, *weights), (dq_rot, dk_rot.to(k.dtype)))
    return o, lse, dq, dk, dv, max_logit, dsinks, *dweights


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
    import fused_rope_attn  # here, so that inputs and references need the reference only

    q, k, v = (x.detach().requires_grad_(grads) for x in (inputs.q, inputs.k, inputs.v))
    masks, norms = masks_of(case, q.device), norms_of(case, q.device)
    weights = {"dsinks": masks["sinks"], "dq_norm": norms.get("q_norm"), "dk_norm": norms.get("k_norm")}
    weights = {name: weight.requires_grad_(grads) for name, weight in weights.items() if weight is not None}
    options: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "rotary_dim": case.rotary_dim,
        "interleaved": case.interleaved,
        "return_lse": True,
        "return_max_logit": max_logit,
        "deterministic": deterministic,
        "backend": backend,
        "strategy": strategy,
        **masks,
        **norms,
    }
    if case.seqlens is None:
        with warnings.catch_warnings():
            # A case that has more queries than keys has them on purpose.
            warnings.filterwarnings("ignore", "q .* positions and k", UserWarning)
            o, lse, *more = fused_rope_attn.rope_attention(q, k, v, inputs.cos, inputs.sin, case.causal, **options)
    else:
        q_packed, k_packed, v_packed = (x[0].transpose(0, 1) for x in (q, k, v))
        lengths = torch.tensor(case.seqlens, dtype=torch.int32).reshape(-1, 2)
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(q.device)
        max_seqlen_q, max_seqlen_k = (max((n[i] for n in case.seqlens), default=0) for i in range(2))
        for name in ("kv_starts", "kv_lens", "query_starts", "query_ends"):
            del options[name]
        options["token_tables"] = case.token_tables
        o, lse, *more = fused_rope_attn.rope_attention_varlen(
            q_packed,
            k_packed,
            v_packed,
            inputs.cos,
            inputs.sin,
            ends[:, 0].contiguous(),
            ends[:, 1].contiguous(),
            max_seqlen_q,
            max_seqlen_k,
            case.causal,
            **options,
        )
        o, lse = o.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    if not grads:
        results = Results(o, lse)
        results.max_logit = more[0] if more else None
        return results
    outputs, upstream = [o], [inputs.do]
    if inputs.dlse is not None:
        outputs, upstream = [o, lse], [inputs.do, inputs.dlse]
    dq, dk, dv, *dweights = torch.autograd.grad(outputs, (q, k, v, *weights.values()), upstream)
    results = Results(o.detach(), lse.detach(), dq, dk, dv)
    results.max_logit = more[0] if more else None
    for name, gradient in zip(weights, dweights):
        setattr(results, name, gradient)
    return results
