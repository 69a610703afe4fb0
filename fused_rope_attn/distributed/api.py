"""Public functions of context parallelism: documentation, validation, plan, call; and cutting and joining tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch

from fused_rope_attn.attention import planning
from fused_rope_attn.attention.ops import needs_gradient
from fused_rope_attn.attention.problem import Options, Problem, Tensors, problem_of
from fused_rope_attn.attention.validation import check_attention
from fused_rope_attn.distributed import ops
from fused_rope_attn.distributed.documents import OF_THE_PLAN, DocumentPlan
from fused_rope_attn.distributed.groups import Group, agree, fail_together, group_of
from fused_rope_attn.distributed.layout import CpPlan, check_sharding, choose_method, chunks_of, work_of
from fused_rope_attn.runtime import checks, entry
from fused_rope_attn.runtime.differentiation import refuse_tangents
from fused_rope_attn.runtime.layouts import Layout, from_heads_first, heads_first
from fused_rope_attn.runtime.options import Backend, CpMethod, CpOptions, PackedCpOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def rope_attention_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = True, *, group: Any, return_lse: Literal[False] = False,
    **options: Unpack[CpOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def rope_attention_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = True, *, group: Any, return_lse: Literal[True],
    **options: Unpack[CpOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = True, *, group: Any, return_lse: bool,
    **options: Unpack[CpOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@entry.explain_keywords
def rope_attention_cp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    causal: bool = True,
    *,
    group: Any,
    sharding: str = "zigzag",
    total_len: int | None = None,
    method: CpMethod = "auto",
    softmax_scale: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``rope_attention`` of a sequence that the P ranks of ``group`` share; each passes and gets its own rows.

    All ranks must call it, and its backward pass, with the same options and shapes, which they compare in every call.
    With ``C = N / (2P)`` and r the rank within the group, ``"zigzag"`` gives rank r the positions ``rC`` to ``(r +
    1)C`` and ``(2P - 1 - r)C`` to ``(2P - r)C``, so that all have equal work under a causal mask.

    Args:
        q: ``(B, HQ, N / P, D)``, this rank's rows, as ``cp_shard`` cuts them.
        k, v: ``(B, HKV, N / P, D)``.
        cos, sin: as in ``rope_attention``. With N rows or more they are indexed by the position in the whole sequence;
            with exactly N / P rows they are this rank's rows, which models make from sharded position ids. Both None:
            no rotation.
        group: a ProcessGroup or a DeviceMesh of one dimension.
        sharding: ``"zigzag"``, ``"contiguous"`` (rank r has the rows from ``rN / P`` on) or another of ``cp_shard``'s.
        total_len: keys from there on do not exist, and rows from there on give 0, lse -inf and gradients 0. Default N.
        method: ``"all_gather"`` (K and V are exchanged, concurrently with the attention), ``"all_to_all"`` (heads are
            exchanged; P must divide HKV) or ``"auto"``; ``plan_cp`` says which of them that is.

    The other arguments, the results and the errors are those of ``rope_attention``. Gradients are those of the sum of
    all ranks' losses; those of sinks and of the norms' weights are this rank's part, for DDP or FSDP to add. o and lse
    are bitwise those of one GPU's call where C is a multiple of the tiles, with ``batch_invariant`` for any C, and dk
    and dv are summed in float32, in a fixed order.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``rope_attention``, on every rank, also if only one
            of them passed a wrong argument, or if they differ.
        NotImplementedError: ``batch_invariant`` without a causal mask.
    """
    tensors = Tensors(q, k, v, cos, sin, sinks, q_norm=q_norm, k_norm=k_norm)
    common, scores = (softmax_scale, interleaved, window, backend), (rotary_dim, softcap, norm_eps, norm_offset)
    options = Options(*common, *scores, batch_invariant, deterministic, causal=causal, return_lse=return_lse)
    members = group_of(group)
    o, lse = _run_together(members, _describe, tensors, options, members, sharding, total_len, method, layout)
    o = from_heads_first(o, layout)
    return (o, lse) if return_lse else o


@overload
def rope_attention_varlen_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    plan: DocumentPlan, causal: bool = True, *, return_lse: Literal[False] = False, **options: Unpack[PackedCpOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def rope_attention_varlen_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    plan: DocumentPlan, causal: bool = True, *, return_lse: Literal[True], **options: Unpack[PackedCpOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention_varlen_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    plan: DocumentPlan, causal: bool = True, *, return_lse: bool, **options: Unpack[PackedCpOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@entry.explain_keywords
def rope_attention_varlen_cp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    plan: DocumentPlan,
    causal: bool = True,
    *,
    method: CpMethod = "auto",
    softmax_scale: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``rope_attention_varlen`` of a packed stream that several ranks share, cut whatever its documents.

    Args:
        q: ``(T / P, HQ, D)``, this rank's tokens, as ``cp_shard`` cuts the stream.
        k, v: ``(T / P, HKV, D)``.
        cos, sin: as in ``rope_attention_varlen``: row i is for position i of every document; at least as many rows as
            the longest document has tokens. Both None: no rotation.
        plan: of this batch, by ``plan_varlen_cp``, which knows the group and the sharding.

    The other arguments are those of ``rope_attention_cp``; results as in ``rope_attention_varlen``, of this rank's
    tokens.
    """
    tensors = Tensors(q, k, v, cos, sin, sinks, q_norm=q_norm, k_norm=k_norm)
    common, scores = (softmax_scale, interleaved, window, backend), (rotary_dim, softcap, norm_eps, norm_offset)
    options = Options(*common, *scores, batch_invariant, deterministic, causal=causal, return_lse=return_lse)
    if not isinstance(plan, DocumentPlan):
        raise TypeError(f"plan must be what plan_varlen_cp returns, but is {checks.kind_of(plan)}")
    o, lse = _run_together(plan.group, _describe_packed, tensors, options, plan, method)
    o = from_heads_first(o, "thd")
    return (o, lse.squeeze(0)) if return_lse else o


def plan_cp(*arguments: Any, **options: Any) -> CpPlan:
    """Return the method of ``rope_attention_cp`` for the same arguments, with the reason, its bytes and its flops.

    Communicates nothing, so that one rank alone may ask; raises what ``rope_attention_cp`` would raise on this rank.
    """
    return entry.plan_of_call(rope_attention_cp, *arguments, **options)


_LOCAL = checks.Forms(q="B HQ N/P D", k="B HKV N/P D", v="B HKV N/P D")
_check_method = checks.check_choice(get_args(CpMethod))
# The cut of a call on these ranks, its problem and tensors, and the plan.
_Described = tuple[ops.Cut, Problem, Tensors, CpPlan]


def _run_together(
    members: Group, describe: Callable[..., _Described], *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the call ``describe(*arguments)``, once all ranks agree; if one raises, the others raise."""
    if torch.compiler.is_compiling():
        return ops.parallel_attention(*describe(*arguments)[:3])
    if entry.is_dry_run():
        raise entry.Planned(describe(*arguments)[-1])
    try:
        cut, problem, tensors, _ = describe(*arguments)
    except Exception as error:
        fail_together(members, error)
    agree(members, {**ops.signature(cut, problem), "whether gradients are wanted": needs_gradient(tensors)})
    return ops.parallel_attention(cut, problem, tensors)


def _describe(tensors: Tensors, options: Any, members: Group, sharding, total_len, method, layout) -> _Described:
    """Check the records of a call of ``rope_attention_cp`` and describe it."""
    check_sharding("sharding", sharding, members.size)
    _check_method("method", method, None)
    checks.check_layout(layout)
    tensors = entry.autocast(tensors, ("q", "k", "v"))
    q, k, v, cos = tensors[:4]
    parts, size = len(chunks_of(0, members.size, sharding)), members.size
    local = _LOCAL.check(layout, (q, k, v))[2]
    rows = cos.shape[-2] if isinstance(cos, torch.Tensor) and cos.ndim > 1 else 0
    tables_are_local = size > 1 and rows == local
    problem, tensors = _checked(tensors, options, local if tables_are_local else local * size, layout)
    if local % parts:
        raise ValueError(
            f"q must have a multiple of {parts} rows on every rank for sharding={sharding!r}, but has {local}: pad the "
            f"sequence to a multiple of {parts * size}, and say by total_len where it ends"
        )
    total: Any = local * size if total_len is None else checks.check_int("total_len", total_len, "an int or None")
    if not 0 <= total <= local * size:
        raise ValueError(f"total_len must be from 0 to the {local * size} rows of all ranks, but is {total}")
    chosen = choose_method(problem, method, work_of(size, sharding, local, total, problem.causal, problem.window))
    cut = ops.Cut(members.name, str(sharding), chosen.method, int(total), 0, tables_are_local)
    return cut, problem, tensors, chosen


def _describe_packed(tensors: Tensors, options: Any, plan: DocumentPlan, method) -> _Described:
    """Check the records of a call of ``rope_attention_varlen_cp`` and describe it."""
    _check_method("method", method, None)
    tensors = entry.autocast(tensors, ("q", "k", "v"))
    q = tensors.q
    local = _LOCAL.check("thd", tensors[:3])[2]
    if local != plan.local:
        raise ValueError(f"q must have the {plan.local} tokens that the plan gives a rank, but has {local}")
    if plan.cu_seqlens.device != q.device:
        raise ValueError(f"plan must be on q's device {q.device}, but is on {plan.cu_seqlens.device}: give device=")
    tensors = tensors._replace(cu_seqlens_q=plan.cu_seqlens, cu_seqlens_k=plan.cu_seqlens)
    problem, tensors = _checked(tensors, options, plan.max_seqlen, "thd", plan.max_seqlen)
    if torch.compiler.is_compiling():
        # A graph is for many plans.
        chosen = CpPlan(method, "chosen when the graph runs", 0, 0.0, 0)
    else:
        chosen = choose_method(problem, method, plan.work(problem.causal, problem.window))
    cut = ops.Cut(plan.group.name, OF_THE_PLAN, chosen.method, plan.total, plan.number, False)
    return cut, problem, tensors, chosen


def _checked(tensors: Tensors, options: Any, rows: int, layout: str, longest: int = 0) -> tuple[Problem, Tensors]:
    """Return the ``Problem`` of the local rows, and the tensors as (B, H, N, D).

    rows: how many the tables must have. longest: of packed sequences.
    """
    rotary_dim = check_attention(tensors, options, layout, rows=rows)
    tensors = heads_first(tensors, layout, ("q", "k", "v"))
    problem = problem_of(tensors, options, rotary_dim, longest)
    planning.choose_backend(problem)  # raises if an explicit one cannot run
    if problem.batch_invariant and not problem.causal:
        raise NotImplementedError(
            "causal must be True with batch_invariant=True, but is False: each rank has another order of the keys then"
        )
    refuse_tangents("rope_attention_cp", tensors)  # here the error reaches all ranks
    return problem, tensors


def _own_chunks(
    name: str, x: Any, dim: Any, group: Any, sharding: str, *, is_shard: bool = False
) -> tuple[Group, int, int, tuple[int, ...]]:
    """Check arguments of the functions below; return (group, axis counted from 0, rows of a chunk, own chunks).

    name: of x in messages. is_shard: x has the rows of one rank instead of all.
    """
    members = group_of(group)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, but is {checks.kind_of(x)}")
    dim = checks.check_int("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be an axis of {name}, which has shape {checks.shown(x.shape)}, but is {dim}")
    check_sharding("sharding", sharding, members.size)
    owned = chunks_of(members.rank, members.size, sharding)
    rows, count = x.shape[dim], len(owned) * (1 if is_shard else members.size)
    if rows % count:
        raise ValueError(
            f"{name} must have a multiple of {count} rows along dim {dim} for {members.size} ranks and "
            f"sharding={sharding!r}, but has {rows}"
        )
    return members, dim % x.ndim, rows // count, owned


def cp_shard(x: torch.Tensor, dim: int, *, group: Any, sharding: str = "zigzag") -> torch.Tensor:
    """This rank's rows of a tensor that every rank has whole: N rows along ``dim`` become N / P. Differentiable.

    A copy, or with ``"contiguous"`` a view. Gradients are those of the sum of all ranks' losses with respect to this
    rank's x: zero in the rows of other ranks.

    Args:
        x: any tensor; its rows, a multiple of 2P of them (``"contiguous"``: of P), belong to the sequence.
        dim: the axis of the rows.
        group: a ProcessGroup or a DeviceMesh of one dimension, of P ranks.
        sharding: ``"zigzag"``: of 2P chunks rank r has number r and number 2P - 1 - r; ``"contiguous"``: P chunks;
            ``"dealt:0,1,1,0"``, which is ``plan_varlen_cp(..., sharding="balanced").sharding``: the rank of each chunk.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _, dim, chunk, owned = _own_chunks("x", x, dim, group, sharding)
    parts = [x.narrow(dim, c * chunk, chunk) for c in owned]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def cp_unshard(x: torch.Tensor, dim: int, *, group: Any, sharding: str = "zigzag") -> torch.Tensor:
    """All ranks' rows, in the order of the sequence, on every rank: inverse of ``cp_shard``. Differentiable.

    Every rank must call it. Gradients are those of the sum of all ranks' losses: what each rank's loss says of these
    rows is added up, in float32 at least and in the order of the ranks. Arguments as in ``cp_shard``.
    """
    members, dim, _, _ = _own_chunks("x", x, dim, group, sharding, is_shard=True)
    return ops.unshard(x, dim, members.name, sharding, False)


def cp_positions(
    total_len: int, *, group: Any, sharding: str = "zigzag", device: torch.device | str | None = None
) -> torch.Tensor:
    """(N / P,) int64: the positions, in the whole sequence of ``total_len`` = N rows, of this rank's rows.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    total_len = checks.check_int("total_len", total_len)
    if total_len < 0:
        raise ValueError(f"total_len must be at least 0, but is {total_len}")
    positions = torch.arange(total_len, device=device)
    _, _, chunk, owned = _own_chunks("total_len", positions, 0, group, sharding)
    return torch.cat([positions[c * chunk : (c + 1) * chunk] for c in owned])


def cp_shift_labels(
    labels: torch.Tensor,
    *,
    group: Any,
    sharding: str = "zigzag",
    dim: int = -1,
    ignore_index: int = -100,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of labels that are shifted already: the label of a token is the token after it.

    Causal language models shift their labels against their logits; on a shard the token after a chunk's last one is
    another rank's. So labels are shifted while they are whole, here, and the loss takes them as they are: in
    transformers pass them as ``shift_labels``.

    Args:
        labels: (..., N), the whole sequence on every rank, not shifted.
        dim: the axis of the sequence.
        ignore_index: the label of the last token, because no token follows it.
        cu_seqlens: (documents + 1,), of packed documents: the last token of each gets ``ignore_index``.

    The other arguments are those of ``cp_shard``.
    """
    _, dim, _, _ = _own_chunks("labels", labels, dim, group, sharding)
    shifted = torch.full_like(labels, ignore_index)
    length = labels.shape[dim]
    if length > 1:
        shifted.narrow(dim, 0, length - 1).copy_(labels.narrow(dim, 1, length - 1))
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(labels.device).long() - 1
        shifted.index_fill_(dim, ends[ends >= 0], ignore_index)
    return cp_shard(shifted, dim, group=group, sharding=sharding)
