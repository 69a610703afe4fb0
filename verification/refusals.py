"""Illegal calls: a legal one with one argument changed must be refused by that argument's name, and write nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from verification import testing
from verification.attention import AttentionCheck, CoRopeCheck, LatentCheck
from verification.calls import Machine, copies, refusal, untouched
from verification.decode import CACHES, DecodeCheck, WriteCheck
from verification.pairs import PairCheck, Way
from verification.rotation import NORMS, RopeCheck
from verification.testing import Finding

Arguments = dict[str, Any]
Condition = Callable[[Arguments], bool]
Change = Callable[[Arguments], Arguments]
SCALES = ("k_scale", "v_scale")
ENDS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens")


@dataclass(frozen=True)
class Mutation:
    """One way to make a call illegal.

    applies: to the arguments of a legal call. change: returns those to replace. error: what must be raised, exactly.
    words: the message must begin with one of them, or quote it.
    is_seen_on_gpu: False for values that only the device knows: there the call computes nothing, ``nothing_comes_of``.
    """

    name: str
    applies: Condition
    change: Change
    error: type[Exception]
    words: tuple[str, ...]
    is_seen_on_gpu: bool = True


def _has(name: str, other: str = "") -> Condition:
    """Return whether the function has an argument, and the call passes the other one."""
    return lambda a: name in a and a.get(other or name) is not None


_rotates, _chooses, _writes_cache = _has("inverse"), _has("strategy"), _has("k_cache", "k")


def _attends(a: Arguments) -> bool:
    return "q" in a and not _rotates(a)


def _first(a: Arguments) -> str:
    """Name the tensor that sets dtype and device."""
    return next(name for name in ("x", "q", "q_rope") if name in a)


def _keys(a: Arguments) -> str:
    return next(name for name in ("k_cache", "k", "k_rope") if name in a)


def _values(a: Arguments) -> str:
    return "v_cache" if "k_cache" in a else "v"


def _other_float(x: Tensor) -> torch.dtype:
    return torch.float16 if x.dtype != torch.float16 else torch.bfloat16


def _elsewhere(x: Tensor) -> Tensor:
    """Put a tensor on another device."""
    return x.cpu() if x.is_cuda else torch.empty_like(x, device="meta")


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _ints(a: Arguments, count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=a[_first(a)].device)


def _axis(a: Arguments, name: str) -> int:
    """Return the axis of heads, "h", or of rows, "s", which are tokens in packed sequences."""
    order = a.get("layout", "thd" if "cu_seqlens_q" in a else "bhsd")
    return order.replace("t", "s").index(name)


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    return x.new_zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]))


def _each(a: Arguments, names: Iterable[str], change: Callable[[Tensor], Any]) -> Arguments:
    """Change those of the tensors that the call passes."""
    return {name: change(a[name]) for name in names if a.get(name) is not None}


def _more_heads(a: Arguments) -> Arguments:
    """Give k and v one head more than q has, so that it cannot be a multiple."""
    axis = _axis(a, "h")
    return _each(a, (_keys(a), _values(a)), lambda x: _resized(x, axis, a["q"].shape[axis] + 1))


def _needed_rows(a: Arguments) -> int:
    """Return how many rows the tables need."""
    if "max_seqlen_k" in a:
        return a["max_seqlen_k"]
    return a[_first(a) if _rotates(a) else _keys(a)].shape[_axis(a, "s")]


def _more_tokens_than_rows(a: Arguments) -> Arguments:
    axis = _axis(a, "s")
    pages = 1 if a.get("block_table") is None else a["block_table"].shape[1]
    return _each(a, ("q", "k", "v"), lambda x: _resized(x, axis, a["k_cache"].shape[axis] * pages + 1))


def _may_lack_tables(a: Arguments) -> bool:
    return a.get("cos") is not None and not _rotates(a) and "q_rope" not in a


def _without_tables(a: Arguments, **changes: Any) -> Arguments:
    """Leave the tables out, and what describes them, but for these changes."""
    none = {"cos": None, "sin": None, "rotary_dim": None, "interleaved": False, "token_tables": False}
    return {name: value for name, value in (none | changes).items() if name in a}


def _in_float64(a: Arguments) -> Arguments:
    return _each(a, ("q", "k", "v", "cos", "sin", *NORMS), Tensor.double) | _each(a, ("sinks",), Tensor.float)


def _of_320_columns(a: Arguments) -> Arguments:
    widened = _each(a, ("q", "k", "v", *NORMS), lambda x: torch.cat([x] * 160, -1)[..., :320])
    width = 0 if a["cos"] is None else a["cos"].shape[-1]
    return widened | {"rotary_dim": (width if width % 2 == 0 else 2 * width) or None}


def _out(a: Arguments, make: Callable[[Tensor], Any]) -> Arguments:
    """Pass ``out``: a tensor of apply_rope, a tuple of apply_rope_qk."""
    made = _each(a, ("x", "q", "k", "v"), make)
    return {"out": made["x"] if "x" in a else tuple(made.values())}


def _can_have_out(a: Arguments) -> bool:
    return _rotates(a) and a[_first(a)].numel() > 1


# Tensors that multi-head latent attention takes in addition to q_rope and v.
PARTS = ("q_nope", "k_nope", "k_rope")
_TENSORS = (
    "x", "q", "q_rope", "k", "v", *PARTS, "cos", "sin", *CACHES, "cache_seqlens", *ENDS, "sinks", "kv_starts",
    "kv_lens", "position_ids", *NORMS, "block_table", *SCALES, "query_starts", "query_ends",
)  # fmt: skip
_BOUNDS = ("sinks", "kv_starts", "kv_lens", "cache_seqlens")
_INTERVALS = ("query_starts", "query_ends")
_NUMBERS = ("softmax_scale", "softcap", "base", "norm_eps", "norm_offset")
_FLAGS = ("causal", "interleaved", "return_lse", "return_max_logit", "deterministic", "inverse", "cache_is_rotated")
_FUNCTIONS = (
    "rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk",
    "corope_attention", "rope_attention_mla", "rope_attention_mla_varlen",
)  # fmt: skip

# Arguments, the change of each, and the error that names it.
_EACH: tuple[tuple[tuple[str, ...], str, Callable[[Tensor], Any], type[Exception]], ...] = (
    (_TENSORS, "a list", lambda x: [1.0, 2.0], TypeError),
    (_TENSORS[3:], "on another device", _elsewhere, ValueError),  # that of x, q or q_rope is the one that counts
    (("x", "q", "q_rope", "cos", "sin"), "of integers", lambda x: x.int(), TypeError),
    (("x", "q", "q_rope", "k", "v", *PARTS, *CACHES), "of another rank", lambda x: x[None], ValueError),
    (("k", "v", *PARTS), "of another dtype", lambda x: x.to(_other_float(x)), TypeError),
    ((*_BOUNDS, *ENDS, *_INTERVALS), "of int64", lambda x: x.long(), TypeError),
    ((*_BOUNDS, *ENDS, *NORMS), "of rank 2", lambda x: x[None], ValueError),
    ((*_BOUNDS, *NORMS), "too long", lambda x: torch.cat((x, x.new_zeros(1))), ValueError),
    (_INTERVALS, "of rank 3", lambda x: x[None], ValueError),
    (_INTERVALS, "too long", lambda x: torch.cat((x, x.new_zeros(x.shape[0], 1)), 1), ValueError),
    (("block_table", *SCALES), "of another dtype", lambda x: x.double(), TypeError),
    (("block_table",), "too long", lambda x: torch.cat((x, x, x)), ValueError),
    (("block_table",), "of rank 1", lambda x: x.flatten(), ValueError),
    (NORMS, "of another dtype", lambda x: x.to(torch.int32), TypeError),
    (("position_ids",), "of floats", lambda x: x.float(), TypeError),
    (("position_ids",), "too long", lambda x: torch.cat((x, x[..., :1]), -1), ValueError),
    (("cu_seqlens_k",), "too long", lambda x: torch.cat((x, x[-1:])), ValueError),
    (("cos", "sin"), "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError),
    (("sin",), "of another shape", lambda x: torch.cat((x, x), -1), ValueError),
)
# Changes of the bounds of packed sequences; the first sequence is not empty. On a GPU only kernels read them.
_WRONG_ENDS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("that begin late", lambda x: x.clamp(min=1)),
    ("that fall", lambda x: torch.cat((x[:-1], x[:1] - 1))),
    ("past the last token", lambda x: torch.cat((x[:-1], x[-1:] + 10**6))),
    ("that are lengths", lambda x: torch.cat((x.diff(), x[:1]))),
)
_VALUES: tuple[tuple[tuple[str, ...], tuple[Any, ...], type[Exception]], ...] = (
    (("rotary_dim",), (3, 0, -2, 100000), ValueError),
    (("rotary_dim",), (4.0, True, "8"), TypeError),
    (_NUMBERS, (math.nan, math.inf, -math.inf), ValueError),
    (_NUMBERS, ("1.0", True), TypeError),
    (("softcap", "norm_eps", "norm_offset"), (None,), TypeError),
    (("softcap", "norm_eps"), (-1.0,), ValueError),
    (("base",), (0.0,), ValueError),
    (("window",), ((-2, 0), (1,), (1, 2, 3)), ValueError),
    (("window",), (5, (1.0, 0), (True, 0), "10"), TypeError),
    (_FLAGS, (1, None), TypeError),
    (("backend", "strategy", "layout"), ("fast",), ValueError),
    (("backend", "strategy", "layout"), (3,), TypeError),
    (("max_seqlen_q", "max_seqlen_k"), (-1,), ValueError),
    (("max_seqlen_q", "max_seqlen_k"), (8.0, True), TypeError),
)
_OTHERS: tuple[tuple[str, Condition, Change, type[Exception], tuple[str, ...]], ...] = (
    # name, when it applies, the arguments to replace, the error, and the words of its message
    ("q_norm is left out", _has("q_norm", "k_norm"), lambda a: {"q_norm": None}, ValueError, ("q_norm",)),
    ("k_norm is left out", _has("k_norm", "q_norm"), lambda a: {"k_norm": None}, ValueError, ("k_norm",)),
    ("v is left out", _writes_cache, lambda a: {"v": None}, ValueError, ("v",)),
    *((f"a tangent of {x}", lambda a, x=x: a.get(x) is not None and a.get("out") is None,
         lambda a, x=x: {x: forward_ad.make_dual(a[x].clone(), torch.ones_like(a[x]))}, NotImplementedError, _FUNCTIONS)
        for x in ("x", "q", "k", "sinks", *NORMS, "q_rope", *PARTS)
    ),
    *((f"{x} requires a gradient", _has("k_cache"), lambda a, x=x: {x: _leaf(a[x])}, ValueError, (x,))
        for x in ("q", *CACHES)
    ),
    # If two caches differ, the message may name either, because both may be in q's dtype or in float8.
    *((f"{x} of another dtype", _has(x), lambda a, x=x: {x: a[x].to(_other_float(a[x]))}, TypeError, CACHES)
        for x in CACHES
    ),
    *((f"{x} whose rows share memory", lambda a, x=x: _writes_cache(a) and a[x].numel() > 0,
         lambda a, x=x: {x: a[x][..., :1].expand_as(a[x])}, ValueError, CACHES)
        for x in CACHES
    ),
    # Not several times a scale, because three of one are legal for three heads.
    *((f"{x} too long", _has(x), lambda a, x=x: {x: a[x].new_ones(a["k_cache"].shape[_axis(a, "h")] + 1)}, ValueError,
         (x,))
        for x in SCALES
    ),
    ("one tensor for both caches", _has("k_cache"), lambda a: {"v_cache": a["k_cache"]}, ValueError, ("v_cache",)),
    ("more heads of k than of q", _attends, _more_heads, ValueError, ("k", "k_cache")),
    ("an odd head dim", lambda a: _attends(a) and a["q"].shape[-1] > 2,
     lambda a: _each(a, ("q", "k", "v", *CACHES), lambda x: x[..., :-1]), ValueError, ("q",)),
    ("k of other columns", lambda a: _attends(a) and a[_keys(a)].shape[-1] > 3,
     lambda a: {_keys(a): a[_keys(a)][..., :-2]}, ValueError, ("k", *CACHES)),
    ("v of another length", lambda a: _attends(a) and a[_values(a)].shape[_axis(a, "s")] > 0,
     lambda a: {_values(a): torch.cat([a[_values(a)]] * 2, _axis(a, "s"))}, ValueError, ("v", "v_cache")),
    ("k of another batch", lambda a: _attends(a) and a["q"].ndim == 4,
     lambda a: {_keys(a): _resized(a[_keys(a)], 0, len(a[_keys(a)]) + 1)}, ValueError, ("k", *CACHES)),
    ("k_rope of several heads", _has("k_rope"),
     lambda a: {"k_rope": torch.cat([a["k_rope"]] * 2, _axis(a, "h"))}, ValueError, ("k_rope",)),
    ("k_nope of other columns", _has("k_nope"), lambda a: {"k_nope": a["k_nope"][..., :-1]}, ValueError, ("k_nope",)),
    ("v of other heads", _has("v", "k_rope"),
     lambda a: {"v": torch.cat([a["v"]] * 2, _axis(a, "h"))}, ValueError, ("v",)),
    ("queries at negative positions", lambda a: "kv_lens" in a and a.get("cos") is not None and "q" in a,
     lambda a: {"q": _resized(a["q"], _axis(a, "s"), a["k"].shape[_axis(a, "s")] + 1), "causal": False,
                "kv_lens": None}, ValueError, ("q",)),
    ("cu_seqlens_q with gaps", lambda a: len(a.get("cu_seqlens_q", ())) > 1,
     lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].repeat_interleave(2)[::2]}, ValueError, ("cu_seqlens_q",)),
    ("more new tokens than rows", _writes_cache, _more_tokens_than_rows, ValueError, ("k",)),
    ("tables too short", lambda a: a.get("cos") is not None and a.get("position_ids") is None
     and a.get("cu_seqlens") is None and _needed_rows(a) > 0,
     lambda a: _each(a, ("cos", "sin"), lambda x: x[..., : _needed_rows(a) - 1, :]), ValueError, ("cos",)),
    *((f"only {x}", _may_lack_tables, lambda a, x=x: {x: None}, ValueError, ("cos", "sin")) for x in ("cos", "sin")),
    *((f"{x} without tables", lambda a, x=x: _may_lack_tables(a) and x in a,
         lambda a, x=x, value=value: _without_tables(a, **{x: value}), ValueError, (x,))
        for x, value in (("rotary_dim", 4), ("interleaved", True), ("token_tables", True))
    ),
    ("tables of another dtype", _has("cos"),
     lambda a: _each(a, ("cos", "sin"), lambda x: x.to(_other_float(a[_first(a)]))), TypeError, ("cos",)),
    ("tables of rank 1", _has("cos"), lambda a: _each(a, ("cos", "sin"), Tensor.flatten), ValueError, ("cos",)),
    ("tables of another batch", _has("cos"),
     lambda a: _each(a, ("cos", "sin"), lambda x: x.new_zeros((7, *x.shape[-2:]))), ValueError, ("cos",)),
    ("tables without columns", _has("cos"), lambda a: _each(a, ("cos", "sin"), lambda x: x[..., :0]), ValueError,
     ("cos",)),
    ("a strategy of the reference", _chooses, lambda a: {"backend": "reference", "strategy": "inline"}, ValueError,
     ("strategy",)),
    *((f"float64 for {backend}", _chooses,
         lambda a, backend=backend: _in_float64(a) | {"backend": backend, "strategy": "auto"}, NotImplementedError,
         ("q",))
        for backend in ("triton", "hopper")
    ),
    ("320 columns for kernels", _chooses, lambda a: _of_320_columns(a) | {"backend": "triton", "strategy": "auto"},
     NotImplementedError, ("q",)),
    ("packed without cu_seqlens", lambda a: a.get("layout") == "thd",
     lambda a: {"cu_seqlens": None, "position_ids": None}, ValueError, ("cu_seqlens",)),
    ("cu_seqlens without packed", lambda a: _rotates(a) and a["layout"] != "thd",
     lambda a: {"cu_seqlens": _ints(a, 2, torch.int32), "position_ids": None}, ValueError, ("cu_seqlens",)),
    ("ids and cu_seqlens", _has("cu_seqlens"), lambda a: {"position_ids": _ints(a, 1, torch.int64)}, ValueError,
     ("position_ids",)),
    ("out of another shape", _can_have_out,
     lambda a: _out(a, lambda x: x.new_zeros((*x.shape[:-1], x.shape[-1] + 1))), ValueError, ("out",)),
    ("out of another dtype", _can_have_out, lambda a: _out(a, lambda x: x.to(_other_float(x))), TypeError, ("out",)),
    ("out of shared memory", _can_have_out, lambda a: _out(a, lambda x: x.new_zeros(1).expand_as(x)), ValueError,
     ("out",)),
    ("out on another device", _can_have_out, lambda a: _out(a, _elsewhere), ValueError, ("out",)),
    ("out of no tensor", _can_have_out, lambda a: _out(a, lambda x: 1.0), TypeError, ("out",)),
    ("out of one tensor too few", lambda a: _rotates(a) and "q" in a, lambda a: {"out": (torch.zeros_like(a["q"]),)},
     ValueError, ("out",)),
    ("out, and a leaf", _rotates, lambda a: _out(a, torch.zeros_like) | {_first(a): _leaf(a[_first(a)])}, ValueError,
     ("out",)),
    ("out, and a norm that is a leaf", lambda a: _rotates(a) and a.get("q_norm") is not None,
     lambda a: _out(a, torch.zeros_like) | {"q_norm": _leaf(a["q_norm"])}, ValueError, ("out",)),
    ("an unknown keyword", lambda a: True, lambda a: {"no_such_argument": 1}, TypeError, ("no_such_argument",)),
)  # fmt: skip

MUTATIONS = (
    *(
        Mutation(f"{x} {how}", lambda a, x=x: a.get(x) is not None and a[x].numel() > 0,
                 lambda a, x=x, make=make: {x: make(a[x])}, error, (x,))
        for names, how, make, error in _EACH for x in names
    ),
    *(
        Mutation(f"{x} {how}", lambda a, x=x: a.get(x) is not None and len(a[x]) > 1 and int(a[x][1]) > 0,
                 lambda a, x=x, make=make: {x: make(a[x])}, ValueError, (x,), is_seen_on_gpu=False)
        for how, make in _WRONG_ENDS for x in ENDS
    ),
    *(
        Mutation(f"{x}={value!r}", lambda a, x=x: x in a, lambda a, x=x, value=value: {x: value}, error, (x,))
        for names, values, error in _VALUES for x in names for value in values
    ),
    *(Mutation(*other) for other in _OTHERS),
)  # fmt: skip


@dataclass(frozen=True)
class IllegalCheck:
    """A legal call, and the name of its mutation; where this does not apply, the next in the list that does."""

    legal: Any
    mutation: str
    backend: ClassVar[str] = "refused"
    size: ClassVar[str] = "small"

    function, name, dtype = (property(attrgetter(f"legal.{x}")) for x in ("function", "name", "dtype"))

    def run(self, machine: Machine) -> Iterator[Finding]:
        function, arguments = self.legal.arguments(machine.device)
        names = [mutation.name for mutation in MUTATIONS]
        first = names.index(self.mutation)
        mutation = next(one for one in MUTATIONS[first:] + MUTATIONS[:first] if one.applies(arguments))
        # Tangents exist at this level alone.
        tangents = mutation.name.startswith("a tangent")
        with forward_ad.dual_level() if tangents else contextlib.nullcontext():
            illegal = arguments | mutation.change(arguments)
            before = copies(illegal)
            unseen = machine.has_gpu and not mutation.is_seen_on_gpu
            if unseen:
                yield from nothing_comes_of(f"nothing of {mutation.name}", function, illegal)
            else:
                subject = f"refusal of {mutation.name}"
                yield refusal(subject, function, illegal, mutation.error, mutation.words)
            if not (unseen and illegal.get("out") is not None):  # else it wrote where it was told to
                yield untouched(illegal, before)


def nothing_comes_of(subject: str, function: Callable[..., Any], illegal: Arguments) -> Iterator[Finding]:
    """State that packed attention with wrong cu_seqlens, on a GPU, leaves no memory as it was: o and gradients are 0,
    lse and max_logit are -inf. A rotation by such positions may be NaN, and has only to end."""
    if _rotates(illegal):
        function(**illegal)
        torch.cuda.synchronize()
        return
    names = [name for name in ("q", "k", "v", "q_rope", *PARTS) if name in illegal]
    leaves = {name: illegal[name].detach().requires_grad_() for name in names}
    with testing.poison_empty():
        o, *maxima = function(**(illegal | leaves | {"return_lse": True}))
        found = {"o": o, **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))))}
    wrong = [name for name, x in found.items() if bool(x.any())]
    wrong += [name for name, x in zip(("lse", "max_logit"), maxima) if bool((x != -math.inf).any())]
    yield Finding(subject, not wrong, f"{', '.join(wrong)} must be 0 (lse and max_logit -inf), and are not")


# The names that a written call holds.
KINDS = (AttentionCheck, LatentCheck, DecodeCheck, WriteCheck, RopeCheck, CoRopeCheck, PairCheck, Way, IllegalCheck)
