"""Illegal calls: a legal one with one argument changed must be refused by that argument's name, and write nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_rope_attn import testing
from verification.calls import Check, Finding, Machine, copies, refusal, untouched

Arguments = dict[str, Any]
CACHES = ("k_cache", "v_cache")
NORMS = ("q_norm", "k_norm")
SCALES = ("k_scale", "v_scale")
ENDS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens")


@dataclass(frozen=True)
class Mutation:
    """One way to make a call illegal.

    change: gets the arguments of a legal call, and returns those to replace; None if it does not apply.
    error: what must be raised, exactly. words: the message must begin with one of them, or quote it.
    is_seen_on_gpu: False for values that only the device knows: there the call computes nothing, ``nothing_comes_of``.
    """

    name: str
    change: Callable[[Arguments], Arguments | None]
    error: type[Exception]
    words: tuple[str, ...]
    is_seen_on_gpu: bool = True


def _of(name: str, change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments | None]:
    """Change one tensor, if the call has it; ``change`` returns None where it does not apply."""

    def changed(a: Arguments) -> Arguments | None:
        value = None if a.get(name) is None else change(a[name])
        return None if value is None else {name: value}

    return changed


def _set(name: str, value: Any) -> Callable[[Arguments], Arguments | None]:
    """Set an argument that the function has, whatever it was."""
    return lambda a: {name: value} if name in a else None


def _is_rotation(arguments: Arguments) -> bool:
    return "inverse" in arguments


def _is_attention(arguments: Arguments) -> bool:
    return "q" in arguments and not _is_rotation(arguments)


def _first(arguments: Arguments) -> str:
    """Name the tensor whose dtype and device count."""
    return "x" if "x" in arguments else "q"


def _keys(arguments: Arguments) -> str:
    return "k_cache" if "k_cache" in arguments else "k"


def _other_float(x: Tensor) -> torch.dtype:
    return torch.float16 if x.dtype != torch.float16 else torch.bfloat16


def _elsewhere(x: Tensor) -> Tensor:
    """Put a tensor on another device."""
    return x.cpu() if x.is_cuda else torch.empty_like(x, device="meta")


def _longer(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1)))


def _axis(arguments: Arguments, of: str) -> int:
    """Return the axis of q's, k's and v's "heads" or "rows"."""
    if _is_rotation(arguments):
        return {"bhsd": 2, "bshd": 1, "sbhd": 0, "thd": 0}[arguments["layout"]]
    if arguments["q"].ndim == 3:
        return {"heads": 1, "rows": 0}[of]
    return {"heads": 1, "rows": 2}[of] if arguments.get("layout") != "bshd" else {"heads": 2, "rows": 1}[of]


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    return x.new_zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]))


def _indivisible_heads(a: Arguments) -> Arguments | None:
    """Give k and v one head more than q has."""
    if not _is_attention(a):
        return None
    axis = _axis(a, "heads")
    return {x: _resized(a[x], axis, a["q"].shape[axis] + 1) for x in (CACHES if "k_cache" in a else ("k", "v"))}


def _odd_head_dim(a: Arguments) -> Arguments | None:
    if not _is_attention(a) or a["q"].shape[-1] < 3:
        return None
    return {name: a[name][..., :-1] for name in ("q", "k", "v", *CACHES) if a.get(name) is not None}


def _longer_v(a: Arguments) -> Arguments | None:
    name = "v_cache" if "v_cache" in a else "v"
    if not _is_attention(a) or a.get(name) is None:
        return None
    axis = _axis(a, "rows")
    return {name: _resized(a[name], axis, a[name].shape[axis] + 1)} if a[name].shape[axis] else None


def _other_batch(a: Arguments) -> Arguments | None:
    if not _is_attention(a) or a["q"].ndim == 3:
        return None
    return {_keys(a): _resized(a[_keys(a)], 0, a[_keys(a)].shape[0] + 1)}


def _short_tables(a: Arguments) -> Arguments | None:
    """Take one row too many from the tables."""
    if "cos" not in a or a.get("position_ids") is not None or a.get("cu_seqlens") is not None:
        return None
    if "max_seqlen_k" in a:
        rows = a["max_seqlen_k"]
    else:
        rows = a[_first(a) if _is_rotation(a) else _keys(a)].shape[_axis(a, "rows")]
    return {name: a[name][..., : rows - 1, :] for name in ("cos", "sin")} if rows else None


def _negative_positions(a: Arguments) -> Arguments | None:
    """Pass more queries than keys, not causal, and no lengths."""
    if "kv_lens" not in a:
        return None
    axis = _axis(a, "rows")
    return {"q": _resized(a["q"], axis, a["k"].shape[axis] + 1), "causal": False, "kv_lens": None}


def _writes_cache(a: Arguments) -> bool:
    return "k_cache" in a and a["k"] is not None


def _shared_cache(name: str) -> Callable[[Arguments], Arguments | None]:
    def change(a: Arguments) -> Arguments | None:
        return {name: a[name][..., :1].expand_as(a[name])} if _writes_cache(a) and a[name].numel() else None

    return change


def _fewer_columns(a: Arguments) -> Arguments | None:
    """Take two columns from k or from k_cache."""
    if not _is_attention(a) or a[_keys(a)].shape[-1] < 4:
        return None
    return {_keys(a): a[_keys(a)][..., :-2]}


def _without(name: str, other: str) -> Callable[[Arguments], Arguments | None]:
    """Leave out one of two arguments that come together."""
    return lambda a: {name: None} if name in a and a.get(other) is not None else None


def _cached_leaf(name: str) -> Callable[[Arguments], Arguments | None]:
    """Let a tensor of a call without gradients require one."""
    return lambda a: {name: a[name].detach().requires_grad_()} if "k_cache" in a else None


def _too_many_new_tokens(a: Arguments) -> Arguments | None:
    if not _writes_cache(a):
        return None
    axis = _axis(a, "rows")
    pages = 1 if a.get("block_table") is None else a["block_table"].shape[1]
    return {name: _resized(a[name], axis, a["k_cache"].shape[axis] * pages + 1) for name in ("q", "k", "v")}


def _float64_for(backend: str) -> Callable[[Arguments], Arguments | None]:
    def change(a: Arguments) -> Arguments | None:
        if "backend" not in a:
            return None
        names = ("q", "k", "v", "cos", "sin", *NORMS)
        found: Arguments = {name: a[name].double() for name in names if a.get(name) is not None}
        if a.get("sinks") is not None:
            found["sinks"] = a["sinks"].float()
        return found | {"backend": backend, "strategy": "auto"}

    return change


def _wide_heads(a: Arguments) -> Arguments | None:
    if "backend" not in a:
        return None
    names = [name for name in ("q", "k", "v", *NORMS) if a.get(name) is not None]
    widened = {name: torch.cat([a[name]] * 160, -1)[..., :320] for name in names}
    width = a["cos"].shape[-1]
    return widened | {"rotary_dim": width if width % 2 == 0 else 2 * width, "backend": "triton", "strategy": "auto"}


def _tables(change: Callable[[Arguments, Tensor], Tensor]) -> Callable[[Arguments], Arguments | None]:
    return lambda a: {name: change(a, a[name]) for name in ("cos", "sin")} if "cos" in a else None


def _outs(a: Arguments, make: Callable[[Tensor], Any]) -> Any:
    if "x" in a:
        return make(a["x"])
    return tuple(make(a[name]) for name in ("q", "k", "v") if a.get(name) is not None)


def _out(make: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments | None]:
    return lambda a: {"out": _outs(a, make)} if _is_rotation(a) and a[_first(a)].numel() > 1 else None


def _leaf_with_out(name: str) -> Callable[[Arguments], Arguments | None]:
    """Pass ``out`` although an argument requires a gradient: a name, or "" for the first tensor."""

    def change(a: Arguments) -> Arguments | None:
        leaf = name or _first(a)
        if not _is_rotation(a) or a.get(leaf) is None:
            return None
        return {leaf: a[leaf].detach().requires_grad_(), "out": _outs(a, torch.zeros_like)}

    return change


def _with_tangent(name: str) -> Callable[[Arguments], Arguments | None]:
    """Differentiate in forward mode."""

    def change(a: Arguments) -> Arguments | None:
        if a.get(name) is None or a.get("out") is not None:
            return None
        return {name: forward_ad.make_dual(a[name].clone(), torch.ones_like(a[name]))}

    return change


def _short_out(a: Arguments) -> Arguments | None:
    return {"out": (torch.zeros_like(a["q"]),)} if _is_rotation(a) and "q" in a else None


def _reference_strategy(a: Arguments) -> Arguments | None:
    return {"backend": "reference", "strategy": "inline"} if "backend" in a else None


def _packed_without_ends(a: Arguments) -> Arguments | None:
    return {"cu_seqlens": None, "position_ids": None} if a.get("layout") == "thd" else None


def _ends_without_packed(a: Arguments) -> Arguments | None:
    if not _is_rotation(a) or a["layout"] == "thd":
        return None
    return {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device=a["cos"].device), "position_ids": None}


def _ids_and_ends(a: Arguments) -> Arguments | None:
    if a.get("cu_seqlens") is None:
        return None
    return {"position_ids": torch.zeros(1, dtype=torch.int64, device=a["cos"].device)}


_TENSORS = (
    "x", "q", "k", "v", "cos", "sin", *CACHES, "cache_seqlens", *ENDS, "sinks", "kv_starts", "kv_lens", "position_ids",
    *NORMS, "block_table", *SCALES,
)  # fmt: skip
_BOUNDS = ("sinks", "kv_starts", "kv_lens", "cache_seqlens")
_NUMBERS = ("softmax_scale", "softcap", "base", "norm_eps", "norm_offset")
_FLAGS = ("causal", "interleaved", "return_lse", "deterministic", "inverse", "cache_is_rotated")
_FUNCTIONS = (
    "rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk",
    "corope_attention",
)  # fmt: skip

# Of each argument: how it is changed, and the error that names it.
_EACH: tuple[tuple[tuple[str, ...], str, Callable[[Tensor], Any], type[Exception]], ...] = (
    (_TENSORS, "a list", lambda x: [1.0, 2.0], TypeError),
    (_TENSORS[2:], "on another device", _elsewhere, ValueError),  # that of x or q is the one that counts
    (("x", "q", "cos", "sin"), "of integers", lambda x: x.int(), TypeError),
    (("x", "q", "k", "v", *CACHES), "of another rank", lambda x: x[None], ValueError),
    (("k", "v"), "of another dtype", lambda x: x.to(_other_float(x)), TypeError),
    ((*_BOUNDS, *ENDS), "of int64", lambda x: x.long(), TypeError),
    ((*_BOUNDS, *ENDS, *NORMS), "of rank 2", lambda x: x[None], ValueError),
    ((*_BOUNDS, *NORMS), "too long", _longer, ValueError),
    (("block_table", *SCALES), "of another dtype", lambda x: x.double(), TypeError),
    (("block_table", *SCALES), "too long", lambda x: torch.cat((x, x, x)) if len(x) else None, ValueError),
    (("block_table",), "of rank 1", lambda x: x.flatten(), ValueError),
    (NORMS, "of another dtype", lambda x: x.to(torch.int32), TypeError),
    (("position_ids",), "of floats", lambda x: x.float(), TypeError),
    (("position_ids",), "too long", lambda x: torch.cat((x, x[..., :1]), -1) if x.numel() else None, ValueError),
    (("cu_seqlens_k",), "too long", lambda x: torch.cat((x, x[-1:])), ValueError),
    (("cu_seqlens_q",), "with gaps", lambda x: x.repeat_interleave(2)[::2] if len(x) > 1 else None, ValueError),
    (("cos", "sin"), "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError),
    (("sin",), "of another shape", lambda x: torch.cat((x, x), -1), ValueError),
)
# Bounds of packed sequences, of which the first is not empty: only the device knows what they hold.
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
_OTHERS: tuple[tuple[str, Callable[[Arguments], Arguments | None], type[Exception], tuple[str, ...]], ...] = (
    # Of two caches that differ, either may be meant: both may be of q's dtype, or of float8.
    *((f"{name} of another dtype", _of(name, lambda x: x.to(_other_float(x))), TypeError, CACHES) for name in CACHES),
    *((f"{name} whose rows share memory", _shared_cache(name), ValueError, CACHES) for name in CACHES),
    *((f"{name} requires a gradient", _cached_leaf(name), ValueError, (name,)) for name in ("q", *CACHES)),
    *((f"{b} without {a}", _without(a, b), ValueError, (a,)) for a, b in (NORMS, NORMS[::-1], ("v", "k"))),
    *(
        (f"a tangent of {x}", _with_tangent(x), NotImplementedError, _FUNCTIONS)
        for x in ("x", "q", "k", "sinks", *NORMS)
    ),
    ("more heads of k than of q", _indivisible_heads, ValueError, ("k", "k_cache")),
    ("an odd head dim", _odd_head_dim, ValueError, ("q",)),
    ("k of other columns", _fewer_columns, ValueError, ("k", *CACHES)),
    ("v of another length", _longer_v, ValueError, ("v", "v_cache")),
    ("k of another batch", _other_batch, ValueError, ("k", *CACHES)),
    ("queries at negative positions", _negative_positions, ValueError, ("q",)),
    ("more new tokens than rows", _too_many_new_tokens, ValueError, ("k",)),
    ("tables too short", _short_tables, ValueError, ("cos",)),
    ("tables of another dtype", _tables(lambda a, x: x.to(_other_float(a[_first(a)]))), TypeError, ("cos",)),
    ("tables of rank 1", _tables(lambda a, x: x.flatten()), ValueError, ("cos",)),
    ("tables of another batch", _tables(lambda a, x: x.new_zeros((7, *x.shape[-2:]))), ValueError, ("cos",)),
    ("tables without columns", _tables(lambda a, x: x[..., :0]), ValueError, ("cos",)),
    ("a strategy of the reference", _reference_strategy, ValueError, ("strategy",)),
    ("float64 for triton", _float64_for("triton"), NotImplementedError, ("q",)),
    ("float64 for hopper", _float64_for("hopper"), NotImplementedError, ("q",)),
    ("320 columns for kernels", _wide_heads, NotImplementedError, ("q",)),
    ("packed without cu_seqlens", _packed_without_ends, ValueError, ("cu_seqlens",)),
    ("cu_seqlens without packed", _ends_without_packed, ValueError, ("cu_seqlens",)),
    ("ids and cu_seqlens", _ids_and_ends, ValueError, ("position_ids",)),
    ("out of another shape", _out(lambda x: x.new_zeros((*x.shape[:-1], x.shape[-1] + 1))), ValueError, ("out",)),
    ("out of another dtype", _out(lambda x: x.to(_other_float(x))), TypeError, ("out",)),
    ("out of shared memory", _out(lambda x: x.new_zeros(1).expand_as(x)), ValueError, ("out",)),
    ("out on another device", _out(_elsewhere), ValueError, ("out",)),
    ("out of no tensor", _out(lambda x: 1.0), TypeError, ("out",)),
    ("out of one tensor too few", _short_out, ValueError, ("out",)),
    ("out, and a leaf", _leaf_with_out(""), ValueError, ("out",)),
    ("out, and a norm that is a leaf", _leaf_with_out("q_norm"), ValueError, ("out",)),
    ("an unknown keyword", lambda a: {"no_such_argument": 1}, TypeError, ("no_such_argument",)),
)

MUTATIONS = (
    *(Mutation(f"{x} {how}", _of(x, make), error, (x,)) for names, how, make, error in _EACH for x in names),
    *(
        Mutation(f"{x} {how}", _of(x, lambda x, make=make: make(x) if len(x) > 1 and x[1] > 0 else None), ValueError,
                 (x,), is_seen_on_gpu=False)
        for how, make in _WRONG_ENDS for x in ENDS
    ),
    *(
        Mutation(f"{x}={value!r}", _set(x, value), error, (x,))
        for names, values, error in _VALUES for x in names for value in values
    ),
    *(Mutation(*other) for other in _OTHERS),
)  # fmt: skip


@dataclass(frozen=True)
class IllegalCheck:
    """A legal call, and the name of its mutation; where this does not apply, the next in the list that does."""

    legal: Check
    mutation: str

    @property
    def function(self) -> str:
        return self.legal.function

    def run(self, machine: Machine) -> Iterator[Finding]:
        function, arguments = self.legal.arguments(machine.device)
        names = [mutation.name for mutation in MUTATIONS]
        first = names.index(self.mutation)
        # Tangents exist at this level alone.
        tangents = forward_ad.dual_level() if self.mutation.startswith("a tangent") else contextlib.nullcontext()
        with tangents:
            for mutation in MUTATIONS[first:] + MUTATIONS[:first]:
                changes = mutation.change(arguments)
                if changes is not None:
                    break
            illegal = arguments | changes
            before = copies(illegal)
            if machine.has_gpu and not mutation.is_seen_on_gpu:
                yield from nothing_comes_of(f"nothing of {mutation.name}", function, illegal)
            else:
                subject = f"refusal of {mutation.name}"
                yield refusal("refused", subject, function, illegal, (mutation.error,), mutation.words)
            yield untouched("refused", illegal, before)


def nothing_comes_of(subject: str, function: Callable[..., Any], illegal: Arguments) -> Iterator[Finding]:
    """State that packed attention with wrong cu_seqlens, on a GPU, leaves no memory as it was: o is 0, lse -inf,
    gradients are 0. A rotation by such positions may be NaN, and has only to end."""
    if _is_rotation(illegal):
        function(**illegal)
        torch.cuda.synchronize()
        return
    leaves = {name: illegal[name].detach().requires_grad_() for name in ("q", "k", "v")}
    with testing.poison_empty():
        o, lse = function(**(illegal | leaves | {"return_lse": True}))
        found = {"o": o, **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))))}
    wrong = [name for name, x in found.items() if bool(x.any())] + ["lse"] * bool((lse != -math.inf).any())
    yield Finding.that("refused", subject, not wrong, f"{', '.join(wrong)} must be 0 (lse -inf), and are not")
