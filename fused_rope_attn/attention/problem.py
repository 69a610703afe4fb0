"""One call of attention: ``Problem``, everything but the tensors' data and addresses, and ``Tensors``.

A public function makes ``Tensors`` and ``Options`` of its arguments, and ``problem_of`` makes the ``Problem`` of both.
Planning, operators and launchers take ``Problem`` and ``Tensors`` whole. ``Options``, the checks, the operators'
schemas, ``flatten`` and ``rebuild`` are derived from one table, ``runtime.options.CallOptions``, when this is imported.
"""

from __future__ import annotations

import enum
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast, get_type_hints

import torch

from fused_rope_attn.runtime import checks, device
from fused_rope_attn.runtime.options import OPERATOR_TYPES, CallOptions, rows_of

# Beyond any sequence, and far enough from 2**31 to be added to a position.
_WIDEST_WINDOW = 2**30


class Tensors(NamedTuple):
    """The tensors of one call, None for those that are not given.

    q ``(B, HQ, NQ, D)``, k and v ``(B, HKV, NK, D)``, any strides; cos and sin ``([1|B,] S, R/2 | R)``, None in calls
    that do not rotate; sinks ``(HQ,)``; kv_starts and kv_lens ``(B,)`` int32; cu_seqlens_q and cu_seqlens_k
    ``(sequences + 1,)`` int32. Packed sequences follow one another along NQ and NK, with B = 1. q_norm and k_norm
    ``(D,)``: the weights of the norms. query_starts and query_ends ``(1|B, NK)`` int32: the query rows that see each
    key. Tensors that only the device reads (sinks to query_ends, dlse) are contiguous when they reach a launcher. In a
    backward pass only: raw_q and raw_k, the caller's q and k, if there are norms and q and k are the normed and rotated
    ones; dlse ``(B, HQ, NQ)`` float32, the gradient of lse.

    With multi-head latent attention q and k hold the rotated columns alone, q ``(B, H, NQ, R)`` and k ``(B, 1, NK,
    R)``, and q_nope ``(B, H, NQ, DN)`` and k_nope ``(B, H, NK, DN)`` the columns that are not rotated; v and o have DV
    columns. Other calls have neither.
    """

    q: Any
    k: Any
    v: Any
    cos: Any = None
    sin: Any = None
    sinks: Any = None
    kv_starts: Any = None
    kv_lens: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q_norm: Any = None
    k_norm: Any = None
    query_starts: Any = None
    query_ends: Any = None
    raw_q: Any = None
    raw_k: Any = None
    dlse: Any = None
    q_nope: Any = None
    k_nope: Any = None


# Fields of ``Tensors`` that only the device reads.
_MASKS = ("kv_starts", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "query_starts", "query_ends")
READ_BY_THE_DEVICE = ("sinks", *_MASKS, "q_norm", "k_norm", "dlse")


class Saving(enum.Enum):
    """The rotated q and k that a forward pass saves for backward: none, or with packed queries in one of two layouts.

    ROWS: row by row. TILES: every sequence in whole tiles, as the sm_90 backward reads them.
    """

    NOTHING = 0
    ROWS = 1
    TILES = 2


class Outputs(NamedTuple):
    """The results of a forward pass: o like q with v's columns, lse ``(B, HQ, NQ)``, and others that were asked for.

    q_rot ``(B, HQ, NQ, D)`` and k_rot ``(B, HKV, NK, D)``, contiguous, are the operands of Q K^T: normed, rotated, in
    pair order, q times the sign of softmax_scale. With ``Saving.TILES`` q_rot has ``arguments.padded_rows`` rows.
    max_logit: float32, of ``Problem.maxima_shape``.
    """

    o: Any
    lse: Any
    q_rot: Any = None
    k_rot: Any = None
    max_logit: Any = None


class Gradients(NamedTuple):
    """The results of a backward pass: gradients like q, k and v, and like the other tensors if they are given."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any = None
    dq_norm: Any = None
    dk_norm: Any = None
    dq_nope: Any = None
    dk_nope: Any = None


class Saved(NamedTuple):
    """The tensors that a forward pass keeps for backward: its results and its inputs.

    is_rotated: q and k are the forward pass's ``q_rot`` and ``k_rot``. If there are norms, ``tensors.raw_q`` and
    ``raw_k`` are the caller's q and k.
    """

    o: Any
    lse: Any
    tensors: Tensors
    is_rotated: bool = False


def split_outputs(tensors: Sequence[Any], count: int) -> tuple[Tensors, tuple]:
    """Split the arguments of a pass into ``Tensors`` and the ``count`` output buffers that may follow them.

    A buffer that the caller does not give is None.
    """
    fields = len(Tensors._fields)
    return Tensors(*tensors[:fields]), (*tensors[fields:], *[None] * (fields + count - len(tensors)))


class Cache(NamedTuple):
    """The properties of a generation step's cache.

    is_rotated: the cached keys are rotated. appends: the step writes its new tokens to the cache. page_size: rows of a
    page, or None for a contiguous cache. is_float8: the caches are float8_e4m3fn.
    """

    is_rotated: bool
    appends: bool
    page_size: int | None = None
    is_float8: bool = False


class Problem(NamedTuple):
    """A call's sizes, dtype, options and masks.

    window: (left, right) keys around the diagonal, -1 for unbounded, or None. has_sinks, has_kv_starts, has_kv_lens:
    whether the call has these tensors; a generation step's cache_seqlens count as kv_lens. has_intervals: it has
    query_starts, query_ends or both. sequences: the number of packed sequences, including empty ones, or None.
    max_seqlen: an upper bound of their lengths. cache: None except in a generation step, where len_k is the cache's
    capacity. norm_eps and norm_offset: None without norms, because torch.compile would turn a number, even a default,
    into a graph input. precision: of products, see ``with_precision``. sums_keys: dk and dv are summed over several
    calls, and so are float32. token_tables: row t of the tables belongs to packed token t. value_dim: columns of v
    and o. nope_dim: columns of q_nope and k_nope, None except in multi-head latent attention, where head_dim and
    rotary_dim are both R, and heads_kv is the number of heads of k_nope and v.

    The fields from causal to return_max_logit are options, each with a row in ``CallOptions``.
    """

    dtype: torch.dtype
    head_dim: int
    device: torch.device = torch.device("cpu")
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    len_q: int = 1
    len_k: int = 1
    rotary_dim: int = 0
    value_dim: int = 0
    nope_dim: int | None = None
    max_seqlen: int = 0
    sequences: int | None = None
    has_sinks: bool = False
    has_kv_starts: bool = False
    has_kv_lens: bool = False
    has_intervals: bool = False
    cache: Cache | None = None
    token_tables: bool = False
    causal: bool = False
    softmax_scale: float = 1.0
    interleaved: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    norm_eps: float | None = None
    norm_offset: float | None = None
    deterministic: bool = False
    backend: str = "auto"
    strategy: str = "auto"
    batch_invariant: bool = False
    return_max_logit: bool = False
    precision: str = "ieee"
    sums_keys: bool = False

    @property
    def group_size(self) -> int:
        """Query heads of one key head."""
        return self.heads_q // self.heads_kv

    @property
    def cache_is_rotated(self) -> bool:
        """True in a generation step with rotated keys in its cache."""
        return self.cache is not None and self.cache.is_rotated

    @property
    def is_packed(self) -> bool:
        return self.sequences is not None

    @property
    def is_deterministic(self) -> bool:
        """True if gradients must have the same bits in every run."""
        return self.deterministic or self.batch_invariant

    @property
    def score_dim(self) -> int:
        """Columns of q and k that a score sums over."""
        return self.head_dim + (self.nope_dim or 0)

    @property
    def maxima_shape(self) -> tuple[int, int]:
        """Shape of max_logit: batch entries, or packed sequences, and query heads."""
        return (self.batch if self.sequences is None else self.sequences, self.heads_q)

    @property
    def fills_results(self) -> bool:
        """True if a launch must fill a result before the kernels write to it."""
        return self.return_max_logit

    @property
    def has_norms(self) -> bool:
        return self.norm_eps is not None

    @property
    def is_plain(self) -> bool:
        """True if kernels read q and k as they are given: nothing is rotated, normed or negated."""
        return self.rotary_dim == 0 and not self.has_norms and self.softmax_scale > 0

    @property
    def reads_lengths(self) -> int:
        """Nonzero if a query may have a negative position or see no key, or the first key may be masked.

        This is so if the device reads lengths or intervals, or if there are more queries than keys. It is 2 if queries
        at negative positions see keys: without tables, which lack their rows, and without a causal mask.
        """
        has_tensors = self.has_kv_starts or self.has_kv_lens or self.has_intervals or self.sequences is not None
        if not has_tensors and self.len_q <= self.len_k:
            return 0
        return 1 if self.rotary_dim or self.causal else 2

    @property
    def has_masks(self) -> bool:
        """True if the call has masks, in addition to the causal one, or other options that take registers."""
        return self.window is not None or self.softcap != 0.0 or self.has_sinks or self.reads_lengths > 0

    @property
    def window_left(self) -> int | None:
        """Keys before the query's own, as kernels take them: None for no bound."""
        left = -1 if self.window is None else self.window[0]
        return None if left < 0 else min(left, _WIDEST_WINDOW)

    @property
    def window_right(self) -> int | None:
        """Keys after the query's own, as kernels take them: 0 if causal, None for no bound."""
        right = 0 if self.causal else -1 if self.window is None else self.window[1]
        return None if right < 0 else min(right, _WIDEST_WINDOW)

    def longest(self, length: int) -> int:
        """Return the most rows that one sequence can have in tensors of ``length`` rows."""
        return min(self.max_seqlen, length) if self.is_packed else length

    def for_launch(self) -> Problem:
        """Return the problem as launches are prepared for it.

        The longest packed sequence is rounded up to a power of two, so that batches share their launches.
        """
        problem = self.with_precision()
        if self.sequences is not None:
            problem = problem._replace(max_seqlen=1 << max(0, self.max_seqlen - 1).bit_length())
        return problem

    def with_precision(self) -> Problem:
        """Return the problem with the precision of float32 products that PyTorch's settings ask for now."""
        if self.dtype is not torch.float32:
            return self
        return self._replace(precision=device.dot_precision(self.dtype))


ROWS = rows_of(CallOptions)
_OPTIONS = {name: row.default for name, row in ROWS.items() if name not in Tensors._fields}
# The options other than tensors, as a caller gave them, in the order of the table.
Options = cast(Any, namedtuple)("Options", _OPTIONS, defaults=_OPTIONS.values(), module=__name__)
# The options that a ``Problem`` holds, and that operators take.
DESCRIBED = Problem._fields[Problem._fields.index("causal") : Problem._fields.index("precision")]


def forms_of(record: Any) -> tuple[tuple[int, str, checks.Form], ...]:
    """Return the options that are fields of a record of tensors: (place, name, form)."""
    forms = {name: row.check for name, row in ROWS.items() if isinstance(row.check, checks.Form)}
    return tuple((i, name, forms[name]) for i, name in enumerate(record._fields) if name in forms)


_FORMS = forms_of(Tensors)


def check_options(tensors: Any, options: Any, sizes: tuple[int, int, int, int], forms: Any = _FORMS) -> None:
    """Check every option against its row.

    tensors: in the caller's layout, q checked before. sizes: B, HQ, NK and D. forms: of the tensors' record.
    """
    # Skip defaults in eager calls. Not in traced calls, where the comparison would make each option a graph input.
    every = torch.compiler.is_compiling()
    for value, (name, default) in zip(options, _OPTIONS.items()):
        if every or not (value is default or (type(value) is type(default) and value == default)):
            check = ROWS[name].check
            if check is not None:
                check(name, value, tensors)  # type: ignore[operator]
    if (tensors.q_norm is None) != (tensors.k_norm is None):
        checks.refuse_one_of_two(q_norm=tensors.q_norm, k_norm=tensors.k_norm)
    for row in forms:
        if (x := tensors[row[0]]) is not None:
            _, name, form = row
            form.check(name, x, "q", tensors.q, dict(zip(("B", "HQ", "NK", "D"), sizes)))


def problem_of(tensors: Tensors, options: Any, rotary_dim: int, max_seqlen: int = 0, **more: Any) -> Problem:
    """Return the ``Problem`` of checked ``Options``; the other arguments are those of ``describe``."""
    values: dict[str, Any] = {}
    for name in DESCRIBED:
        normalise, value = ROWS[name].normalise, getattr(options, name)
        values[name] = value if normalise is None else normalise(value, tensors)
    return describe(tensors, rotary_dim, max_seqlen, **more, **values)


def describe(
    tensors: Tensors,
    rotary_dim: int,
    max_seqlen: int = 0,
    cache: Cache | None = None,
    token_tables: bool = False,
    **options: Any,
) -> Problem:
    """Return the ``Problem`` of these tensors, and of options as it holds them.

    rotary_dim: as the check has found it.
    """
    q, _, v, _, _, sinks, kv_starts, kv_lens, cu_seqlens = tensors[:9]
    batch, heads_q, len_q, head_dim = q.shape
    _, heads_kv, len_k, value_dim = v.shape
    nope_dim = None if tensors.q_nope is None else tensors.q_nope.shape[3]
    sizes = (batch, heads_q, heads_kv, len_q, len_k, rotary_dim, value_dim, nope_dim, checks.as_int(max_seqlen))
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    has_intervals = tensors.query_starts is not None or tensors.query_ends is not None
    given = (sinks is not None, kv_starts is not None, kv_lens is not None, has_intervals)
    return Problem(q.dtype, head_dim, q.device, *sizes, sequences, *given, cache, token_tables, **options)


class OperatorArguments:
    """The arguments of an operator: every field of a record of tensors, then fields of ``Problem``.

    Args:
        tensors: the record's class; a field with a default may be None.
        options: names of the other arguments. ``describe(tensors, **options)`` returns the ``Problem``.
        written: tensors that the operator changes.
    """

    def __init__(
        self, tensors: Any, options: Iterable[str], describe: Callable[..., Problem], written: Sequence[str] = ()
    ):
        self._tensors, self._options, self._describe = tensors, tuple(options), describe
        types = {name: "Tensor?" if name in tensors._field_defaults else "Tensor" for name in tensors._fields}
        types |= {name: f"Tensor({alias}!)" for name, alias in zip(written, "ab")}
        types |= {name: _OPERATOR_TYPES[name] for name in self._options}
        self.schema: str = ", ".join(f"{kind} {name}" for name, kind in types.items())

    def flatten(self, problem: Problem, tensors: Any) -> tuple:
        """Return the arguments in the order of the schema."""
        return (*tensors, *[getattr(problem, name) for name in self._options])

    def rebuild(self, *arguments: Any) -> tuple[Problem, Any]:
        """Undo ``flatten``. The dispatcher makes lists of tuples."""
        count = len(self._tensors._fields)
        tensors = self._tensors(*arguments[:count])
        values = [tuple(x) if isinstance(x, list) else x for x in arguments[count:]]
        return self._describe(tensors, **dict(zip(self._options, values))), tensors


_HINTS = get_type_hints(Problem) | {"cache_is_rotated": bool}
_OPERATOR_TYPES = {name: OPERATOR_TYPES[kind] for name, kind in _HINTS.items() if kind in OPERATOR_TYPES}
_OPERATOR_TYPES["max_seqlen"] = "SymInt"
_ARGUMENTS = OperatorArguments(Tensors, ("rotary_dim", "max_seqlen", "token_tables", *DESCRIBED), describe)
SCHEMA, flatten, rebuild = _ARGUMENTS.schema, _ARGUMENTS.flatten, _ARGUMENTS.rebuild
