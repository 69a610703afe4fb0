"""Illegal calls: a legal one, changed in one argument, must be refused by that argument's name, and write nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verification.random.common import Call, Finding, Machine, changed, copies, refusal

Arguments = dict[str, Any]
CACHES = ("k_cache", "v_cache")
NORMS = ("q_norm", "k_norm")
SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Mutation:
    """One way to make a call illegal.

    change: gets the arguments of a legal call and a generator, and returns those to replace; None where it does not
    apply. errors: what must be raised, and words: of which the message must hold one.
    """

    name: str
    change: Callable[[Arguments, random.Random], Arguments | None]
    errors: tuple[type[Exception], ...]
    words: tuple[str, ...]


def _changed(
    name: str,
    how: str,
    make: Callable[[Tensor], Any],
    error: type[Exception],
    needs: Callable[[Arguments], bool] = lambda arguments: True,
) -> Mutation:
    """One argument changed, where the call has it and ``needs`` holds; the message must name it."""

    def change(arguments: Arguments, rng: random.Random) -> Arguments | None:
        if arguments.get(name) is None or not needs(arguments):
            return None
        return {name: make(arguments[name])}

    return Mutation(f"{name} {how}", change, (error,), (name,))


def _given(name: str, value: Any, needs: Callable[[Arguments], bool] = lambda a: True) -> Callable:
    """An argument that the function has, whatever it was."""
    return lambda arguments, rng: {name: value} if name in arguments and needs(arguments) else None


def _wrong(name: str, value: Any, error: type[Exception], *words: str) -> Mutation:
    return Mutation(f"{name}={value!r}"[:40], _given(name, value), (error,), words or (name,))


def _first(arguments: Arguments) -> str:
    """The tensor whose dtype and device count."""
    return "x" if "x" in arguments else "q"


def _other_float(x: Tensor) -> torch.dtype:
    return torch.float16 if x.dtype != torch.float16 else torch.bfloat16


def _elsewhere(x: Tensor) -> Tensor:
    """On another device."""
    return x.cpu() if x.is_cuda else torch.empty_like(x, device="meta")


def _head_axis(arguments: Arguments) -> int:
    if arguments["q"].ndim == 3:
        return 1
    return 2 if arguments.get("layout") == "bshd" else 1


def _row_axis(arguments: Arguments) -> int:
    if arguments["q"].ndim == 3:
        return 0
    return 1 if arguments.get("layout") == "bshd" else 2


def _more_heads_than_divide(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """K and V get one head more than q."""
    axis, names = _head_axis(arguments) if "q" in arguments else 0, ("k_cache", "v_cache")
    if "inverse" in arguments or "q" not in arguments:
        return None
    if "k_cache" not in arguments:
        names = ("k", "v")
    heads = arguments["q"].shape[axis] + 1
    found = {}
    for name in names:
        shape = list(arguments[name].shape)
        shape[axis] = heads
        found[name] = arguments[name].new_zeros(shape)
    return found


def _narrow_all(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """Odd head dims."""
    names = [name for name in ("q", "k", "v", *CACHES) if arguments.get(name) is not None]
    if "inverse" in arguments or arguments["q"].shape[-1] < 3:
        return None
    return {name: arguments[name][..., :-1] for name in names}


def _fewer_columns_of_k(arguments: Arguments, rng: random.Random) -> Arguments | None:
    if "q" not in arguments:
        return None
    name = "k_cache" if "k_cache" in arguments else "k"
    return {name: arguments[name][..., :-2]} if arguments[name].shape[-1] > 3 else None


def _v_of_other_length(arguments: Arguments, rng: random.Random) -> Arguments | None:
    name = "v_cache" if "v_cache" in arguments else "v"
    if "inverse" in arguments or arguments.get(name) is None:
        return None
    axis = _row_axis(arguments)
    return {name: torch.cat((arguments[name], arguments[name].narrow(axis, 0, 1)), axis)
            } if arguments[name].shape[axis] else None  # fmt: skip


def _another_batch(arguments: Arguments, rng: random.Random) -> Arguments | None:
    if "q" not in arguments or "inverse" in arguments or arguments["q"].ndim == 3:
        return None
    name = "k_cache" if "k_cache" in arguments else "k"
    x = arguments[name]
    return {name: x.new_zeros((x.shape[0] + 1, *x.shape[1:]))}


def _short_tables(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """One row too few."""
    if "cos" not in arguments or arguments.get("position_ids") is not None or arguments.get("cu_seqlens") is not None:
        return None
    if "inverse" in arguments:
        x, axis = arguments[_first(arguments)], {"bhsd": 2, "bshd": 1, "sbhd": 0}[arguments["layout"]]
        rows = x.shape[axis]
    elif "max_seqlen_k" in arguments:
        rows = arguments["max_seqlen_k"]
    else:
        rows = arguments["k_cache" if "k_cache" in arguments else "k"].shape[_row_axis(arguments)]
    return {name: arguments[name][..., : rows - 1, :] for name in ("cos", "sin")} if rows else None


def _negative_positions(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """More queries than keys, not causal, and no lengths."""
    if "kv_lens" not in arguments:
        return None
    axis = _row_axis(arguments)
    shape = list(arguments["q"].shape)
    shape[axis] = arguments["k"].shape[axis] + 1
    return {"q": arguments["q"].new_zeros(shape), "causal": False, "kv_lens": None}


def _pages(arguments: Arguments) -> int:
    """Pages of a sequence, or 1 for its part of a contiguous cache."""
    return 1 if arguments.get("block_table") is None else arguments["block_table"].shape[1]


def _too_many_new_tokens(arguments: Arguments, rng: random.Random) -> Arguments | None:
    if "k_cache" not in arguments or arguments["k"] is None:
        return None
    axis = _row_axis(arguments)
    found = {}
    for name in ("q", "k", "v"):
        shape = list(arguments[name].shape)
        shape[axis] = arguments["k_cache"].shape[axis] * _pages(arguments) + 1
        found[name] = arguments[name].new_zeros(shape)
    return found


def _expanded_cache(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """A cache whose rows share memory, in a call that writes it."""
    if "k_cache" not in arguments or arguments["k"] is None:
        return None
    name = rng.choice(CACHES)
    x = arguments[name]
    return {name: x[..., :1].expand_as(x)} if x.numel() else None


def _float64_for_kernels(arguments: Arguments, rng: random.Random) -> Arguments | None:
    if "backend" not in arguments:
        return None
    names = ("q", "k", "v", "cos", "sin", "q_norm", "k_norm")
    found: Arguments = {name: arguments[name].double() for name in names if arguments.get(name) is not None}
    if arguments.get("sinks") is not None:
        found["sinks"] = arguments["sinks"].float()
    return found | {"backend": rng.choice(["triton", "hopper"]), "strategy": "auto"}


def _unserved_head_dim(arguments: Arguments, rng: random.Random) -> Arguments | None:
    """Beyond 256 columns."""
    if "backend" not in arguments:
        return None
    names = [name for name in ("q", "k", "v", "q_norm", "k_norm") if arguments.get(name) is not None]
    widened = {name: torch.cat([arguments[name]] * 160, -1)[..., :320] for name in names}
    rotary = arguments["cos"].shape[-1]
    return {**widened, "rotary_dim": rotary if rotary % 2 == 0 else 2 * rotary, "backend": "triton", "strategy": "auto"}


def _tensors() -> Iterator[Mutation]:
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
        yield replace(_changed(name, "of another dtype", lambda x: x.to(_other_float(x)), TypeError), words=words)
        yield _changed(name, "of another rank", lambda x: x[None], ValueError)
    for name in ("sinks", "kv_starts", "kv_lens", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"):
        yield _changed(name, "of int64", lambda x: x.long(), TypeError)
        yield _changed(name, "of rank 2", lambda x: x[None], ValueError)
    for name in ("sinks", "kv_starts", "kv_lens", "cache_seqlens"):
        yield _changed(name, "too long", lambda x: torch.cat((x, x.new_zeros(1))), ValueError)
    for name in ("block_table", *SCALES):
        yield _changed(name, "of another dtype", lambda x: x.double(), TypeError)
        yield _changed(name, "too long", lambda x: torch.cat((x, x, x)), ValueError,
                       lambda a, name=name: a[name].shape[0] > 0)  # fmt: skip  # type: ignore[misc]
    yield _changed("block_table", "of rank 1", lambda x: x.flatten(), ValueError)
    for name, other in (NORMS, NORMS[::-1]):
        yield _changed(name, "of another dtype", lambda x: x.to(torch.int32), TypeError)
        yield _changed(name, "too long", lambda x: torch.cat((x, x.new_zeros(1))), ValueError)
        yield _changed(name, "of rank 2", lambda x: x[None], ValueError)
        alone = _given(name, None, lambda a, other=other: a.get(other) is not None)  # type: ignore[misc]
        yield Mutation(f"{other} without {name}", alone, (ValueError,), (name,))
    ids = "position_ids"
    yield _changed(ids, "of floats", lambda x: x.float(), TypeError)
    yield _changed(ids, "too long", lambda x: torch.cat((x, x[..., :1]), -1), ValueError, lambda a: a[ids].numel() > 0)
    yield _changed("cu_seqlens_k", "too long", lambda x: torch.cat((x, x[-1:])), ValueError)
    yield _changed("cu_seqlens_q", "with gaps", lambda x: x.repeat_interleave(2)[::2], ValueError,
                   lambda a: a["cu_seqlens_q"].shape[0] > 1)  # fmt: skip
    for name in ("q", *CACHES):
        yield _changed(name, "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError,
                       lambda a: "k_cache" in a)  # fmt: skip
    alone = _given("v", None, lambda a: "k_cache" in a and a["k"] is not None)
    yield Mutation("k without v", alone, (ValueError,), ("v",))


def _sizes() -> Iterator[Mutation]:
    yield Mutation("more heads of k than of q", _more_heads_than_divide, (ValueError,), ("k", "k_cache"))
    yield Mutation("an odd head dim", _narrow_all, (ValueError,), ("q",))
    yield Mutation("k of other columns", _fewer_columns_of_k, (ValueError,), ("k", *CACHES))
    yield Mutation("v of another length", _v_of_other_length, (ValueError,), ("v", "v_cache"))
    yield Mutation("k of another batch", _another_batch, (ValueError,), ("k", *CACHES))
    yield Mutation("queries at negative positions", _negative_positions, (ValueError,), ("q",))
    yield Mutation("more new tokens than rows", _too_many_new_tokens, (ValueError,), ("k",))
    yield Mutation("an expanded cache", _expanded_cache, (ValueError,), CACHES)


def _tables() -> Iterator[Mutation]:
    def both(subject: str, change: Callable[[Arguments, Tensor], Tensor], error: type[Exception]) -> Mutation:
        def changed_tables(arguments: Arguments, rng: random.Random) -> Arguments | None:
            if "cos" not in arguments:
                return None
            return {name: change(arguments, arguments[name]) for name in ("cos", "sin")}

        return Mutation(f"tables {subject}", changed_tables, (error,), ("cos",))

    yield Mutation("tables too short", _short_tables, (ValueError,), ("cos",))
    for name in ("cos", "sin"):
        yield _changed(name, "of integers", lambda x: x.int(), TypeError)
        yield _changed(name, "requires a gradient", lambda x: x.detach().requires_grad_(), ValueError)
    yield _changed("sin", "of another shape", lambda x: torch.cat((x, x), -1), ValueError)
    yield both("of another float dtype", lambda a, x: x.to(_other_float(a[_first(a)])), TypeError)
    yield both("of rank 1", lambda a, x: x.flatten(), ValueError)
    yield both("of another batch", lambda a, x: x.new_zeros((7, *x.shape[-2:])), ValueError)
    yield both("without columns", lambda a, x: x[..., :0], ValueError)
    for value in (3, 0, -2, 100000):
        yield _wrong("rotary_dim", value, ValueError)
    for wrong in (4.0, True, "8"):
        yield _wrong("rotary_dim", wrong, TypeError)


def _values() -> Iterator[Mutation]:
    for value in (math.nan, math.inf, -math.inf):
        yield _wrong("softmax_scale", value, ValueError)
        yield _wrong("softcap", value, ValueError)
        yield _wrong("base", value, ValueError)
    yield _wrong("softcap", -1.0, ValueError)
    yield _wrong("base", 0.0, ValueError)
    for name in ("norm_eps", "norm_offset"):
        for value in (math.nan, math.inf, -math.inf):
            yield _wrong(name, value, ValueError)
        yield _wrong(name, None, TypeError)
    yield _wrong("norm_eps", -1e-6, ValueError)
    for name in ("softmax_scale", "softcap", "base", "norm_eps", "norm_offset"):
        yield _wrong(name, "1.0", TypeError)
        yield _wrong(name, True, TypeError)
    yield _wrong("softcap", None, TypeError)
    for window in ((-2, 0), (1,), (1, 2, 3)):
        yield _wrong("window", window, ValueError)
    for wrong in (5, (1.0, 0), (True, 0), "10"):
        yield _wrong("window", wrong, TypeError)
    for name in ("causal", "interleaved", "return_lse", "deterministic", "inverse", "cache_is_rotated"):
        yield _wrong(name, 1, TypeError)
        yield _wrong(name, None, TypeError)
    for name in ("backend", "strategy", "layout"):
        yield _wrong(name, "fast", ValueError)
        yield _wrong(name, 3, TypeError)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        yield _wrong(name, -1, ValueError)
        yield _wrong(name, 8.0, TypeError)
        yield _wrong(name, True, TypeError)


def _combinations() -> Iterator[Mutation]:
    yield Mutation("a strategy of the reference", lambda a, rng: {"backend": "reference", "strategy": "inline"}
                   if "backend" in a else None, (ValueError,), ("strategy",))  # fmt: skip
    yield Mutation("float64 for kernels", _float64_for_kernels, (NotImplementedError,), ("q",))
    yield Mutation("320 columns for kernels", _unserved_head_dim, (NotImplementedError,), ("q",))
    yield Mutation("packed without cu_seqlens", lambda a, rng: {"cu_seqlens": None, "position_ids": None}
                   if a.get("layout") == "thd" else None, (ValueError,), ("cu_seqlens",))  # fmt: skip
    yield Mutation("cu_seqlens without packed", lambda a, rng: {
        "cu_seqlens": torch.zeros(2, dtype=torch.int32, device=a["cos"].device), "position_ids": None}
        if "inverse" in a and a["layout"] != "thd" else None, (ValueError,), ("cu_seqlens",))  # fmt: skip
    yield Mutation("ids and cu_seqlens", lambda a, rng: {
        "position_ids": torch.zeros(1, dtype=torch.int64, device=a["cos"].device)}
        if a.get("cu_seqlens") is not None else None, (ValueError,), ("position_ids",))  # fmt: skip
    for name, change, error in (
        ("another shape", lambda x: x.new_zeros((*x.shape[:-1], x.shape[-1] + 1)), ValueError),
        ("another dtype", lambda x: x.to(_other_float(x)), TypeError),
        ("shared memory", lambda x: x.new_zeros(1).expand_as(x), ValueError),
        ("another device", _elsewhere, ValueError),
        ("no tensor", lambda x: 1.0, TypeError),
    ):
        yield Mutation(f"out of {name}", _bad_out(change), (error,), ("out",))
    yield Mutation("out of a leaf", lambda a, rng: {
        _first(a): a[_first(a)].detach().requires_grad_(), "out": _outs(a, torch.zeros_like)}
        if "inverse" in a else None, (ValueError,), ("out",))  # fmt: skip
    yield Mutation("out with a norm that wants a gradient", lambda a, rng: {
        "q_norm": a["q_norm"].detach().requires_grad_(), "out": _outs(a, torch.zeros_like)}
        if a.get("q_norm") is not None and "inverse" in a else None, (ValueError,), ("out",))  # fmt: skip
    yield Mutation("out of one tensor too few", lambda a, rng: {"out": (torch.zeros_like(a["q"]),)}
                   if "inverse" in a and "q" in a else None, (ValueError,), ("out",))  # fmt: skip
    yield Mutation("an unknown keyword", lambda a, rng: {"no_such_argument": 1}, (TypeError,), ("no_such_argument",))


def _outs(arguments: Arguments, make: Callable[[Tensor], Any]) -> Any:
    if "x" in arguments:
        return make(arguments["x"])
    return tuple(make(arguments[name]) for name in ("q", "k", "v") if arguments.get(name) is not None)


def _bad_out(change: Callable[[Tensor], Any]) -> Callable[[Arguments, random.Random], Arguments | None]:
    def with_out(arguments: Arguments, rng: random.Random) -> Arguments | None:
        if "inverse" not in arguments or arguments[_first(arguments)].numel() < 2:
            return None
        return {"out": _outs(arguments, change)}

    return with_out


MUTATIONS = (*_tensors(), *_sizes(), *_tables(), *_values(), *_combinations())


@dataclass(frozen=True)
class IllegalCall:
    """A legal call, and the seed that chooses what makes it illegal."""

    legal: Call
    seed: int

    @property
    def function(self) -> str:
        return self.legal.function

    @property
    def text(self) -> str:
        return f"made illegal: {self.legal.text}"

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], Arguments]:
        return self.legal.arguments(machine)

    def run(self, machine: Machine) -> Iterator[Finding]:
        rng = random.Random(self.seed)
        function, arguments = self.legal.arguments(machine)
        while True:
            mutation = rng.choice(MUTATIONS)
            changes = mutation.change(arguments, rng)
            if changes is not None:
                break
        illegal = arguments | changes
        before = copies(illegal)
        found = refusal("refused", function, illegal, mutation.errors, mutation.words)
        yield Finding(found.backend, f"refusal of {mutation.name}", found.share, found.ok, found.detail)
        touched = changed(illegal, before)
        yield Finding.that("refused", "inputs", not touched, f"a refused call wrote {', '.join(touched)}")
