"""The results of attention for a case: the reference in any dtype, and the operator in any backend."""

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fused_rope_attn.attention import reference
from fused_rope_attn.attention.problem import Tensors, describe
from fused_rope_attn.rotation.reference import rotation
from verification.testing.cases import ROWS, Case, Inputs, LatentCase, LatentInputs, bounds_of, masks_of, norms_of

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


def run_reference(inputs: Inputs, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The reference's outputs and gradients by name: `ref64` with dtype=torch.float64, `eager` with None (the inputs'
    dtype). Gradients of sinks and of norms' weights are one row; max_logit of a packed case has a batch.

    Inputs and tables are taken as given and cast, so that a low-precision table is not an error. Goes through
    sequences, groups of heads and, where one head's scores are too large, blocks of rows; partial gradients are summed
    in at least float32 and rounded once.
    """
    dtype = case.dtype if dtype is None else dtype
    device, sums = inputs.q.device, torch.promote_types(dtype, torch.float32)
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in zip("qkv", inputs)}
    given = masks_of(case, device)
    weights = {"sinks": given["sinks"], **norms_of(case, device)}
    weights = {name: weights[name] for name in ("sinks", "q_norm", "k_norm") if weights.get(name) is not None}
    wide = {name: x.detach().to(sums).requires_grad_() for name, x in weights.items()}
    tables = reference.normalise_tables(inputs.cos, inputs.sin, case.rotary, case.interleaved)
    cos, sin = (x if x is None or dtype != torch.float64 else x.double() for x in tables)
    masks = {name: given[name] for name in ("kv_starts", "kv_lens", "query_starts", "query_ends")}
    masks["has_tables"] = cos is not None
    lengths = [(case.len_q, case.len_k)]
    if case.seqlens is not None:  # queries after the last sequence are one without keys
        lengths = [*case.seqlens, (case.len_q - sum(len_q for len_q, _ in case.seqlens), 0)]
    of_q, of_k = ([pair[i] for pair in lengths] for i in range(2))
    of_k.append(case.len_k - sum(of_k))
    found, first_k = [], 0
    with torch.enable_grad():
        for q, k, v in zip(*(x.split(sizes, 2) for x, sizes in zip(leaves.values(), (of_q, of_k, of_k)))):
            own = slice(first_k, first_k + k.shape[2]) if case.token_tables else slice(None)
            first_k += k.shape[2]
            if q.shape[2] == k.shape[2] == 0:  # there may be thousands
                found.append((q, q[..., 0].to(sums), q.new_full(q.shape[:2], -math.inf, dtype=sums)))
                continue
            if case.seqlens is not None:
                # Lengths on the device: with tables, queries before position 0 see nothing, causal or not.
                masks = masks | {"kv_lens": torch.tensor([k.shape[2]], device=device)}
            of_own = (None, None) if cos is None else (cos[:, own], sin[:, own])
            found.append(_attend((q, k, v), of_own, case, masks, wide))
        o, lse = (torch.cat(x, 2) for x in list(zip(*found))[:2])
    max_logit = torch.cat([x for *_, x in found])
    results = _results(o, lse, leaves | wide, inputs)
    results["max_logit"] = max_logit if case.seqlens is None else max_logit[None, :-1]
    for name, weight in weights.items():
        row = results[f"d{name}"][None]
        results[f"d{name}"] = row if dtype == torch.float64 else row.to(weight.dtype)
    return results


def _results(o: Tensor, lse: Tensor, leaves: dict[str, Tensor], inputs: Inputs | LatentInputs) -> dict[str, Tensor]:
    """Return o, lse and the gradients of the leaves for those of o and of lse, by name."""
    upstream = [inputs.do.to(o.dtype), *(x.to(lse.dtype) for x in (inputs.dlse,) if x is not None)]
    of = list(leaves.values())
    gradients = torch.autograd.grad((o, lse)[: len(upstream)], of, upstream, materialize_grads=True)
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{name}": x for name, x in zip(leaves, gradients)}


def _attend(
    rows: Sequence[Tensor], tables: tuple[Any, Any], case: Case, masks: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, lse and max_logit of `reference.attention` for q, k and v, a few heads and rows of q at a time."""
    q, k, v = rows
    dtype, sums, group = q.dtype, torch.promote_types(q.dtype, torch.float32), case.heads_q // case.heads_kv
    position, key = reference.positions(q.shape[2], k.shape[2], masks["kv_lens"], q.device)
    limit = BLOCK_BYTES.get(q.device.type, BLOCK_BYTES["cpu"])
    head_bytes = max(1, len(q) * group * q.shape[2] * k.shape[2] * sums.itemsize)
    step = max(1, limit // head_bytes)  # key-value heads at once
    size = max(1, q.shape[2] if step > 1 else min(q.shape[2], limit * q.shape[2] // head_bytes))  # queries at once

    def visible(first: int) -> Tensor:
        pairs = position[:, first : first + size], key, case.causal
        return reference.visible_pairs(*pairs, window=case.window, first_row=first, **masks)

    def block(first: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
        given = q, k.to(dtype), v.to(dtype), visible(first)
        scores: dict[str, Any] = {"softmax_scale": case.scale, "softcap": case.softcap, "return_max_logit": True}
        return reference.masked_attention(*given, sinks=sinks, **scores)

    blocks = range(0, max(1, q.shape[2]), size)
    dead = torch.cat([~visible(first).any(-1) for first in blocks], 1)
    absent = ~functools.reduce(torch.logical_or, [visible(first).any(-2) for first in blocks])
    q, k, v = reference.hide(q, dead), reference.hide(k, absent), reference.hide(v, absent)
    options: dict[str, Any] = {"interleaved": case.interleaved, "norm_eps": case.norm_eps, "norm_offset": case.norms}
    q = reference.norm_rotate(q, weights.get("q_norm"), *reference.table_rows(*tables, position), **options)
    k = reference.norm_rotate(k, weights.get("k_norm"), *reference.table_rows(*tables, key), **options)
    # Several blocks are computed again, because their scores do not fit the memory, and because `RandomRounding` wants
    # the backward pass of a block after its forward pass.
    is_whole = case.seqlens is None and len(blocks) == 1 and step >= case.heads_kv
    run = block if is_whole else functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    sinks = weights["sinks"].split(step * group) if case.sinks else itertools.repeat(None)
    found = []
    # In ``sums``, so that autograd adds the gradients of blocks up in it.
    for queries, *others in zip(q.split(step * group, 1), k.to(sums).split(step, 1), v.to(sums).split(step, 1), sinks):
        parts = [run(first, part, *others) for first, part in zip(blocks, queries.split(size, 2))]
        found.append([torch.cat(x, 2) for x in zip(*parts)])
    o, lse, row_max = (torch.cat(x, 1) for x in zip(*found))
    return o, lse, reference.largest(row_max)


def run_rotation_reference(
    given: Sequence[Tensor], dtype: torch.dtype | None, *, weight: Any = None, inverse: bool = False, **options: Any
) -> list[Tensor]:
    """Return `rotation.reference.rotation` of x (B, H, N, D) with these ``options``, its gradient for dy, and that of
    the ``weight``, one row: `ref64` with dtype=torch.float64, `eager` with None. given: x, dy, cos and sin.
    """
    x, dy, *tables = (t.detach().to(dtype or t.dtype) for t in given)
    if weight is None:  # the transposed rotation, which is rounded once also where autograd would add two gradients up
        return [rotation(t, *tables, inverse=to, **options) for t, to in ((x, inverse), (dy, not inverse))]
    with torch.enable_grad():
        leaves = x.requires_grad_(), weight.detach().to(dtype or weight.dtype).requires_grad_()
        y = rotation(x, *tables, inverse=inverse, weight=leaves[1], **options)
        dx, dweight = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), dx, dweight[None]]


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


def run_latent_reference(inputs: LatentInputs, case: LatentCase, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return o, lse and gradients by name: `ref64` with dtype=torch.float64, `eager` with None (the inputs' dtype)."""
    dtype = case.dtype if dtype is None else dtype
    leaves = {name: getattr(inputs, name).detach().to(dtype).requires_grad_() for name in ROWS}
    cos, sin = (x.double() if dtype == torch.float64 else x for x in (inputs.cos, inputs.sin))
    options: dict[str, Any] = {name: getattr(case, name) for name in ("causal", "interleaved", "window")}
    options |= {"softmax_scale": case.scale, "rotary_dim": case.head_dim} | bounds_of(case, inputs.v.device)
    renamed = {{"q_rope": "q", "k_rope": "k"}.get(name, name): x for name, x in leaves.items()}
    o, lse = reference_attention(**renamed, cos=cos, sin=sin, **options)
    return _results(o, lse, leaves, inputs)


def run_latent_op(inputs: LatentInputs, case: LatentCase, *, backend: str, deterministic: bool = False) -> list[Tensor]:
    """Return o, lse and gradients of ``rope_attention_mla``, or of ``rope_attention_mla_varlen`` if it is packed."""
    from verification.attention import LatentCheck  # here, as above

    check = LatentCheck.of(case, deterministic=deterministic)
    made = check.made(inputs)
    return list(check.results(*check.call(made, (backend, "auto")), made).values())
