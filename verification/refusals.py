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


def _changed(
    name: str,
    how: str,
    make: Callable[[Tensor], Any],
    error: type[Exception],
    needs: Callable[[Arguments], bool] = lambda arguments: True,
    words: tuple[str, ...] = (),
    is_seen_on_gpu: bool = True,
) -> Mutation:
    """Change one argument, if the call has it and ``needs`` holds; the message must name it."""

    def change(arguments: Arguments) -> Arguments | None:
        if arguments.get(name) is None or not needs(arguments):
            return None
        return {name: make(arguments[name])}

    return Mutation(f"{name} {how}", change, error, words or (name,), is_seen_on_gpu)


def _set(
    name: str, value: Any, error: type[Exception], needs: Callable[[Arguments], bool] = lambda a: True
) -> Mutation:
    """Set an argument that the function has, whatever it was."""

    def change(arguments: Arguments) -> Arguments | None:
        return {name: value} if name in arguments and needs(arguments) else None

    return Mutation(f"{name}={value!r}"[:40], change, error, (name,))


def is_rotation(arguments: Arguments) -> bool:
    return "inverse" in arguments


def _is_attention(arguments: Arguments) -> bool:
    return "q" in arguments and not is_rotation(arguments)


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
    if is_rotation(arguments):
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
        rows = a[_first(a) if is_rotation(a) else _keys(a)].shape[_axis(a, "rows")]
    return {name: a[name][..., : rows - 1, :] for name in ("cos", "sin")} if rows else None


def _negative_positions(a: Arguments) -> Arguments | None:
    """Pass more queries than keys, not causal, and no lengths."""
    if "kv_lens" not in a:
        return None
    axis = _axis(a, "rows")
    return {"q": _resized(a["q"], axis, a["k"].shape[axis] + 1), "causal": False, "kv_lens": None}


def _writes_cache(a: Arguments) -> bool:
    return "k_cache" in a and a["k"] is not None


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


def _both_tables(subject: str, change: Callable[[Arguments, Tensor], Tensor], error: type[Exception]) -> Mutation:
    def changed(a: Arguments) -> Arguments | None:
        return {name: change(a, a[name]) for name in ("cos", "sin")} if "cos" in a else None

    return Mutation(f"tables {subject}", changed, error, ("cos",))


def _outs(a: Arguments, make: Callable[[Tensor], Any]) -> Any:
    if "x" in a:
        return make(a["x"])
    return tuple(make(a[name]) for name in ("q", "k", "v") if a.get(name) is not None)


def _bad_out(subject: str, make: Callable[[Tensor], Any], error: type[Exception]) -> Mutation:
    def changed(a: Arguments) -> Arguments | None:
        return {"out": _outs(a, make)} if is_rotation(a) and a[_first(a)].numel() > 1 else None

    return Mutation(f"out of {subject}", changed, error, ("out",))


def _out_with(name: str) -> Mutation:
    """Pass ``out`` although an argument requires a gradient: a name, or "" for the first tensor."""

    def changed(a: Arguments) -> Arguments | None:
        leaf = name or _first(a)
        if not is_rotation(a) or a.get(leaf) is None:
            return None
        return {leaf: a[leaf].detach().requires_grad_(), "out": _outs(a, torch.zeros_like)}

    return Mutation(f"out, and {name or 'a tensor'} requires a gradient", changed, ValueError, ("out",))


def _tangent_of(name: str) -> Mutation:
    """Differentiate in forward mode; the message begins with the public function's name."""

    def changed(a: Arguments) -> Arguments | None:
        if a.get(name) is None or a.get("out") is not None:
            return None
        return {name: forward_ad.make_dual(a[name].clone(), torch.ones_like(a[name]))}

    functions = ("rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache")
    functions += ("apply_rope", "apply_rope_qk", "corope_attention")
    return Mutation(f"a tangent of {name}", changed, NotImplementedError, functions)


def _mutations() -> Iterator[Mutation]:
    required = ("x", "q", "k", "v", "cos", "sin", *CACHES, "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k")
    optional = ("sinks", "kv_starts", "kv_lens", "position_ids", "cu_seqlens", *NORMS, "block_table", *SCALES)
    for name in (*required, *optional):
        yield _changed(name, "a list", lambda x: [1.0, 2.0], TypeError)
        if name not in ("x", "q"):  # their device is the one that counts
            yield _changed(name, "on another device", _elsewhere, ValueError)
    for name in ("x", "q"):
        yield _changed(name, "of integers", lambda x: x.int(), TypeError)
        yield _changed(name, "of another rank", lambda x: x[None], ValueError)
    for name in ("k", "v", *CACHES):
        # Of two caches that differ, either may be meant: both may be of q's dtype, or of float8.
        words = CACHES if name in CACHES else (name,)
        yield _changed(name, "of another dtype", lambda x: x.to(_other_float(x)), TypeError, words=words)
        yield _changed(name, "of another rank", lambda x: x[None], ValueError)
    for name in ("sinks", "kv_starts", "kv_lens", "cache_seqlens", *ENDS):
        yield _changed(name, "of int64", lambda x: x.long(), TypeError)
        yield _changed(name, "of rank 2", lambda x: x[None], ValueError)
    for name in ("sinks", "kv_starts", "kv_lens", "cache_seqlens"):
        yield _changed(name, "too long", _longer, ValueError)
    for name in ("block_table", *SCALES):
        yield _changed(name, "of another dtype", lambda x: x.double(), TypeError)
        yield _changed(
            name, "too long", lambda x: torch.cat((x, x, x)), ValueError, lambda a, name=name: len(a[name]) > 0
        )
    yield _changed("block_table", "of rank 1", lambda x: x.flatten(), ValueError)
    for name, other in (NORMS, NORMS[::-1]):
        yield _changed(name, "of another dtype", lambda x: x.to(torch.int32), TypeError)
        yield _changed(name, "too long", _longer, ValueError)
        yield _changed(name, "of rank 2", lambda x: x[None], ValueError)
        yield _set(name, None, ValueError, lambda a, other=other: a.get(other) is not None)
    yield _changed("position_ids", "of floats", lambda x: x.float(), TypeError)
    yield _changed(
        "position_ids", "too long", lambda x: torch.cat((x, x[..., :1]), -1), ValueError,
        lambda a: a["position_ids"].numel() > 0,
    )  # fmt: skip
    for name in ("q", *CACHES):
        yield _changed(
            name, "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError, lambda a: "k_cache" in a
        )
    yield _set("v", None, ValueError, _writes_cache)
    # cu_seqlens
    yield _changed("cu_seqlens_k", "too long", lambda x: torch.cat((x, x[-1:])), ValueError)
    yield _changed(
        "cu_seqlens_q", "with gaps", lambda x: x.repeat_interleave(2)[::2], ValueError,
        lambda a: len(a["cu_seqlens_q"]) > 1,
    )  # fmt: skip
    for name in ENDS:
        for how, make in (
            ("that begin late", lambda x: x.clamp(min=1)),
            ("that fall", lambda x: torch.cat((x[:-1], x[:1] - 1))),
            ("past the last token", lambda x: torch.cat((x[:-1], x[-1:] + 10**6))),
            ("that are lengths", lambda x: torch.cat((x.diff(), x[:1]))),
        ):
            yield _changed(
                name, how, make, ValueError, lambda a, name=name: len(a[name]) > 1 and int(a[name][1]) > 0,
                is_seen_on_gpu=False,
            )  # fmt: skip
    # sizes
    yield Mutation("more heads of k than of q", _indivisible_heads, ValueError, ("k", "k_cache"))
    yield Mutation("an odd head dim", _odd_head_dim, ValueError, ("q",))
    for name in ("k", "k_cache"):
        yield _changed(
            name, "of other columns", lambda x: x[..., :-2], ValueError,
            lambda a, name=name: name == _keys(a) and a[name].shape[-1] > 3, words=("k", *CACHES),
        )  # fmt: skip
    yield Mutation("v of another length", _longer_v, ValueError, ("v", "v_cache"))
    yield Mutation("k of another batch", _other_batch, ValueError, ("k", *CACHES))
    yield Mutation("queries at negative positions", _negative_positions, ValueError, ("q",))
    yield Mutation("more new tokens than rows", _too_many_new_tokens, ValueError, ("k",))
    for name in CACHES:
        yield _changed(
            name, "whose rows share memory", lambda x: x[..., :1].expand_as(x), ValueError,
            lambda a, name=name: _writes_cache(a) and a[name].numel() > 0, words=CACHES,
        )  # fmt: skip
    # tables
    yield Mutation("tables too short", _short_tables, ValueError, ("cos",))
    for name in ("cos", "sin"):
        yield _changed(name, "of integers", lambda x: x.int(), TypeError)
        yield _changed(name, "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError)
    yield _changed("sin", "of another shape", lambda x: torch.cat((x, x), -1), ValueError)
    yield _both_tables("of another float dtype", lambda a, x: x.to(_other_float(a[_first(a)])), TypeError)
    yield _both_tables("of rank 1", lambda a, x: x.flatten(), ValueError)
    yield _both_tables("of another batch", lambda a, x: x.new_zeros((7, *x.shape[-2:])), ValueError)
    yield _both_tables("without columns", lambda a, x: x[..., :0], ValueError)
    # values
    infinite = (math.nan, math.inf, -math.inf)
    wrong: list[tuple[tuple[str, ...], tuple[Any, ...], type[Exception]]] = [
        (("rotary_dim",), (3, 0, -2, 100000), ValueError),
        (("rotary_dim",), (4.0, True, "8"), TypeError),
        (("softmax_scale", "softcap", "base", "norm_eps", "norm_offset"), infinite, ValueError),
        (("softmax_scale", "softcap", "base", "norm_eps", "norm_offset"), ("1.0", True), TypeError),
        (("softcap", "norm_eps", "norm_offset"), (None,), TypeError),
        (("softcap", "norm_eps"), (-1.0,), ValueError),
        (("base",), (0.0,), ValueError),
        (("window",), ((-2, 0), (1,), (1, 2, 3)), ValueError),
        (("window",), (5, (1.0, 0), (True, 0), "10"), TypeError),
        (("causal", "interleaved", "return_lse", "deterministic", "inverse", "cache_is_rotated"), (1, None), TypeError),
        (("backend", "strategy", "layout"), ("fast",), ValueError),
        (("backend", "strategy", "layout"), (3,), TypeError),
        (("max_seqlen_q", "max_seqlen_k"), (-1,), ValueError),
        (("max_seqlen_q", "max_seqlen_k"), (8.0, True), TypeError),
    ]
    for names, values, error in wrong:
        for name in names:
            yield from (_set(name, value, error) for value in values)
    # combinations
    yield Mutation(
        "a strategy of the reference",
        lambda a: {"backend": "reference", "strategy": "inline"} if "backend" in a else None, ValueError, ("strategy",),
    )  # fmt: skip
    for backend in ("triton", "hopper"):
        yield Mutation(f"float64 for {backend}", _float64_for(backend), NotImplementedError, ("q",))
    yield Mutation("320 columns for kernels", _wide_heads, NotImplementedError, ("q",))
    yield Mutation(
        "packed without cu_seqlens",
        lambda a: {"cu_seqlens": None, "position_ids": None} if a.get("layout") == "thd" else None, ValueError,
        ("cu_seqlens",),
    )  # fmt: skip
    yield Mutation(
        "cu_seqlens without packed",
        lambda a: {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device=a["cos"].device), "position_ids": None}
        if is_rotation(a) and a["layout"] != "thd" else None, ValueError, ("cu_seqlens",),
    )  # fmt: skip
    yield Mutation(
        "ids and cu_seqlens",
        lambda a: {"position_ids": torch.zeros(1, dtype=torch.int64, device=a["cos"].device)}
        if a.get("cu_seqlens") is not None else None, ValueError, ("position_ids",),
    )  # fmt: skip
    yield _bad_out("another shape", lambda x: x.new_zeros((*x.shape[:-1], x.shape[-1] + 1)), ValueError)
    yield _bad_out("another dtype", lambda x: x.to(_other_float(x)), TypeError)
    yield _bad_out("shared memory", lambda x: x.new_zeros(1).expand_as(x), ValueError)
    yield _bad_out("another device", _elsewhere, ValueError)
    yield _bad_out("no tensor", lambda x: 1.0, TypeError)
    yield _out_with("")
    yield _out_with("q_norm")
    yield Mutation(
        "out of one tensor too few",
        lambda a: {"out": (torch.zeros_like(a["q"]),)} if is_rotation(a) and "q" in a else None, ValueError, ("out",),
    )  # fmt: skip
    yield Mutation("an unknown keyword", lambda a: {"no_such_argument": 1}, TypeError, ("no_such_argument",))
    for name in ("x", "q", "k", "v", "sinks", *NORMS):
        yield _tangent_of(name)


MUTATIONS = tuple(_mutations())


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
    if is_rotation(illegal):
        function(**illegal)
        torch.cuda.synchronize()
        return
    leaves = {name: illegal[name].detach().requires_grad_() for name in ("q", "k", "v")}
    with testing.poison_empty():
        o, lse = function(**(illegal | leaves | {"return_lse": True}))
        found = {"o": o, **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))))}
    wrong = [name for name, x in found.items() if bool(x.any())] + ["lse"] * bool((lse != -math.inf).any())
    yield Finding.that("refused", subject, not wrong, f"{', '.join(wrong)} must be 0 (lse -inf), and are not")
