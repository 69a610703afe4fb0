"""One call of attention: ``Problem``, everything but the tensors' data and addresses, and ``Tensors``.

A public function describes its call once, by ``describe``. Planning, operators and launchers take both records whole;
only ``flatten`` and ``rebuild`` know the order in which they pass through an operator's schema.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch

from fused_rope_attn.kernels.arguments import WIDEST_WINDOW, dot_precision
from fused_rope_attn.runtime.checks import as_int


class Tensors(NamedTuple):
    """The tensors of one call, None where it has none.

    q ``(B, HQ, NQ, D)``, k and v ``(B, HKV, NK, D)``, any strides; cos and sin ``([1|B,] S, R/2 | R)``; sinks
    ``(HQ,)``; kv_starts and kv_lens ``(B,)`` int32; cu_seqlens_q and cu_seqlens_k ``(sequences + 1,)`` int32. Packed
    sequences lie along NQ and NK, with B = 1. q_norm and k_norm ``(D,)``: the weights of the norms. What only the
    device reads (sinks to k_norm) is contiguous when it reaches a launcher. raw_q and raw_k: q and k as they came,
    where a backward pass has norms and q and k are those that the forward pass has normed and rotated.
    """

    q: Any
    k: Any
    v: Any
    cos: Any
    sin: Any
    sinks: Any = None
    kv_starts: Any = None
    kv_lens: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q_norm: Any = None
    k_norm: Any = None
    raw_q: Any = None
    raw_k: Any = None

    def given(self) -> list[Any]:
        """Those that the call has, in their order."""
        return [x for x in self if x is not None]


# Of ``Tensors``: what only the device reads.
READ_BY_THE_DEVICE = ("sinks", "kv_starts", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "q_norm", "k_norm")


class Saving(enum.Enum):
    """What a forward pass keeps of rotated q and k for backward: nothing, or q_rot and k_rot, packed queries of q_rot
    row by row, or in the sm_90 backward's whole tiles."""

    NOTHING = 0
    ROWS = 1
    TILES = 2


class Outputs(NamedTuple):
    """What a forward pass returns: o like q, lse ``(B, HQ, NQ)``, and the rotated copies where they were asked for.

    q_rot ``(B, HQ, NQ, D)`` and k_rot ``(B, HKV, NK, D)``, contiguous, are what the products took: normed, rotated,
    in pair order, q times the sign of softmax_scale. Packed queries that the sm_90 backward reads lie in q_rot as
    ``arguments.padded_rows`` says.
    """

    o: Any
    lse: Any
    q_rot: Any = None
    k_rot: Any = None


class Gradients(NamedTuple):
    """What a backward pass returns: gradients like q, k, v and, where the call has them, sinks and weights of norms."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any = None
    dq_norm: Any = None
    dk_norm: Any = None


# Where a caller wants results written: o of a forward pass; dq, dk and dv of a backward pass; None for memory of their
# own.
Rooms = tuple[Any, ...]
NO_ROOM: Rooms = (None,)
NO_ROOMS: Rooms = (None, None, None)


def split_rooms(tensors: tuple) -> tuple[Tensors, Rooms]:
    """(the call's tensors, the rooms behind them, if there are any) of the tensors by which launches are prepared."""
    count = len(Tensors._fields)
    return Tensors(*tensors[:count]), tensors[count:]


class Cache(NamedTuple):
    """What a generation step has and attention has not: whether the cached keys are rotated, and whether it appends.

    page_size: rows of a page, or None of a cache that is not in pages. is_float8: the caches hold float8_e4m3fn.
    """

    is_rotated: bool
    appends: bool
    page_size: int | None = None
    is_float8: bool = False


class Problem(NamedTuple):
    """A call's sizes, dtype, options and masks.

    window: (left, right) keys around the diagonal, -1 for unbounded, or None. has_sinks, has_kv_starts, has_kv_lens:
    whether the call has these tensors, for a generation step's cache_seqlens has_kv_lens. sequences: how many packed
    sequences there are, empty ones included, or None; max_seqlen: the longest of them, or more. cache: of a generation
    step, whose len_k is the cache's capacity. norm_eps and norm_offset: of the norms of q and k, None without; a
    number, even a default, would be an input to who traces the call. precision: of products, as ``with_precision``
    finds it. sums_keys: dk and dv are parts of sums over several calls, and come in float32.
    """

    dtype: torch.dtype
    device: torch.device
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    causal: bool
    softmax_scale: float
    rotary_dim: int
    interleaved: bool
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    has_kv_starts: bool = False
    has_kv_lens: bool = False
    sequences: int | None = None
    max_seqlen: int = 0
    cache: Cache | None = None
    norm_eps: float | None = None
    norm_offset: float | None = None
    precision: str = "ieee"
    deterministic: bool = False
    backend: str = "auto"
    strategy: str = "auto"
    sums_keys: bool = False

    @property
    def group_size(self) -> int:
        """Query heads of one key head."""
        return self.heads_q // self.heads_kv

    @property
    def is_packed(self) -> bool:
        return self.sequences is not None

    @property
    def has_norms(self) -> bool:
        return self.norm_eps is not None

    @property
    def reads_lengths(self) -> bool:
        """Whether queries may lie before position 0, or keys begin after the first: by lengths that the device reads,
        or because there are more queries than keys."""
        return self.has_kv_starts or self.has_kv_lens or self.sequences is not None or self.len_q > self.len_k

    @property
    def has_masks(self) -> bool:
        """Whether the call has anything that takes registers beside the diagonal: bounds of keys, a cap, sinks."""
        return self.window is not None or self.softcap != 0.0 or self.has_sinks or self.reads_lengths

    @property
    def window_left(self) -> int | None:
        """Keys before the query's own, as kernels take them: None for no bound."""
        if self.window is None or self.window[0] < 0:
            return None
        return min(self.window[0], WIDEST_WINDOW)

    @property
    def window_right(self) -> int | None:
        """Keys after the query's own, as kernels take them: 0 if causal, None for no bound."""
        if self.causal:
            return 0
        if self.window is None or self.window[1] < 0:
            return None
        return min(self.window[1], WIDEST_WINDOW)

    def longest(self, length: int) -> int:
        """Rows of one sequence at most, in tensors of ``length`` rows."""
        return min(self.max_seqlen, length) if self.is_packed else length

    def for_launch(self) -> Problem:
        """The problem as launches are prepared for it.

        The longest packed sequence is rounded up to a power of two, so that batches share their launches.
        """
        problem = self.with_precision()
        if self.sequences is not None:
            problem = problem._replace(max_seqlen=1 << max(0, self.max_seqlen - 1).bit_length())
        return problem

    def with_precision(self) -> Problem:
        """The problem with the precision of float32 products that PyTorch's settings ask for now."""
        if self.dtype is not torch.float32:
            return self
        return self._replace(precision=dot_precision(self.dtype))


def describe(
    tensors: Tensors,
    *,
    causal: bool,
    softmax_scale: float,
    rotary_dim: int,
    interleaved: bool,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    max_seqlen: int = 0,
    cache: Cache | None = None,
    norm_eps: float | None = None,
    norm_offset: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    strategy: str = "auto",
) -> Problem:
    """The ``Problem`` of a call whose arguments were checked; norm_eps and norm_offset only where it has norms."""
    q, k, _, _, _, sinks, kv_starts, kv_lens, cu_seqlens = tensors[:9]
    batch, heads_q, len_q, head_dim = q.shape
    _, heads_kv, len_k, _ = k.shape
    if window is not None and window[0] < 0 and window[1] < 0:
        window = None
    # By position, in the order of the fields: this is on the path of every eager call.
    return Problem(
        q.dtype, q.device, batch, heads_q, heads_kv, len_q, len_k, head_dim, causal, softmax_scale, rotary_dim,
        interleaved, None if window is None else (as_int(window[0]), as_int(window[1])), softcap, sinks is not None,
        kv_starts is not None, kv_lens is not None, None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        as_int(max_seqlen), cache, norm_eps, norm_offset, "ieee", deterministic, backend, strategy,
    )  # fmt: skip


# The arguments of the operators in the order of ``flatten``. window_left, window_right: -1 for unbounded.
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? sinks, Tensor? kv_starts, Tensor? kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? q_norm, Tensor? k_norm, Tensor? raw_q, Tensor? raw_k, "
    "bool causal, float softmax_scale, int rotary_dim, bool interleaved, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt max_seqlen, float? norm_eps, float? norm_offset, bool deterministic, str backend, "
    "str strategy"
)


def flatten(problem: Problem, tensors: Tensors) -> tuple:
    """The operators' arguments, as ``SCHEMA`` names them."""
    left, right = (-1, -1) if problem.window is None else problem.window
    return (
        *tensors, problem.causal, problem.softmax_scale, problem.rotary_dim, problem.interleaved, left, right,
        problem.softcap, problem.max_seqlen, problem.norm_eps, problem.norm_offset, problem.deterministic,
        problem.backend, problem.strategy,
    )  # fmt: skip


def rebuild(
    q, k, v, cos, sin, sinks, kv_starts, kv_lens, cu_seqlens_q, cu_seqlens_k, q_norm, k_norm, raw_q, raw_k, causal,
    softmax_scale, rotary_dim, interleaved, window_left, window_right, softcap, max_seqlen, norm_eps, norm_offset,
    deterministic, backend, strategy,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """Inverse of ``flatten``."""
    tensors = Tensors(
        q, k, v, cos, sin, sinks, kv_starts, kv_lens, cu_seqlens_q, cu_seqlens_k, q_norm, k_norm, raw_q, raw_k
    )
    problem = describe(
        tensors, window=(window_left, window_right), max_seqlen=max_seqlen, causal=causal, softmax_scale=softmax_scale,
        rotary_dim=rotary_dim, interleaved=interleaved, softcap=softcap, norm_eps=norm_eps, norm_offset=norm_offset,
        deterministic=deterministic, backend=backend, strategy=strategy,
    )  # fmt: skip
    return problem, tensors
