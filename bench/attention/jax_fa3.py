"""``python -m bench fa3``: FlashAttention-3 with its backward, which is installed for JAX alone, next to ours.

The package dew-flash-attn-cu13 has the kernels of FlashAttention-3 for sm_90a as targets of XLA's foreign functions.
XLA launches them one by one and cannot record them in a CUDA graph, so that they have a table of their own, where 32
calls follow one another.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from baselines import BASELINES
from bench.attention import cases
from bench.attention.providers import OURS, AttentionProvider, rival
from bench.attention.suite import AttentionTrial, Problem
from bench.load import CALLS, LoadClock
from bench.suite import Entry, Suite, by_name
from bench.timing import Measurement

FA3 = "bare_fa3_jax"
_PIP, _PACKAGE, _LIBRARY = "dew-flash-attn-cu13", "dew_flash_attn", "libdew_flash_attn3.so"
_FORWARD, _BACKWARD = "dew_flash3_mha_fwd", "dew_flash3_mha_bwd"


def _missing() -> str | None:
    """Return why the library cannot run here, or None. Its package is not imported: it would load more."""
    if importlib.util.find_spec("jax") is None:
        return "pip install jax[cuda13]"
    return None if _library() else f"pip install {_PIP} (no {_LIBRARY})"


def _library() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder) / _LIBRARY).exists()), None)


@functools.cache
def _jax() -> Any:
    """Return JAX, with the library's targets registered. PyTorch has loaded the CUDA runtime that the library needs."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.dlpack
    import jax.ffi

    library = ctypes.CDLL(str(_library()))
    for name in (_FORWARD, _BACKWARD):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")
    return jax


def _call(target: str, shapes: list[Any], causal: bool, head_dim: int, *given: Any) -> tuple[Any, ...]:
    """Call a target. It counts as an effect, so that equal calls are not merged and unused ones not dropped."""
    jax = _jax()
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    call = jax.ffi.ffi_call(target, results, has_side_effect=True)
    window = {f"window_size_{side}": numpy.int64(-1) for side in ("left", "right")}
    return call(*given, softmax_scale=numpy.float64(head_dim**-0.5), is_causal=causal, **window)


def forward(causal: bool, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Return o (B, N, HQ, D) and lse (B, HQ, N) float32 of JAX arrays (B, N, H, D)."""
    batch, length, heads, head_dim = q.shape
    shapes = [(q.shape, q.dtype), ((batch, heads, length), "float32"), ((1,) * 4, "float32"), ((1,) * 3, "float32")]
    return _call(_FORWARD, shapes, causal, head_dim, q, k, v)[:2]


def backward(causal: bool, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv."""
    batch, length, heads, head_dim = q.shape
    workspace = ((heads * (batch * length + 128 * (batch + 1)),), "float32")  # of delta, and of lse in base 2
    shapes = [*((x.shape, q.dtype) for x in (q, k, v)), workspace, workspace]
    return _call(_BACKWARD, shapes, causal, head_dim, do, q, k, v, o, lse)[:3]


def _to_jax(x: Tensor) -> Any:
    """Return (B, H, N, D) as an array (B, N, H, D) of the same memory, or of a copy where the order differs."""
    torch.cuda.synchronize()
    return _jax().dlpack.from_dlpack(x.detach().transpose(1, 2).contiguous())


def _to_torch(x: Any) -> Tensor:
    return torch.from_dlpack(_jax().block_until_ready(x)).transpose(1, 2)


class _Fa3(torch.autograd.Function):
    """FlashAttention-3 for the gate, which waits for every call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        given = [_to_jax(x) for x in (q, k, v)]
        ctx.causal, ctx.saved = causal, (*given, *forward(causal, *given))
        return _to_torch(ctx.saved[3])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        return (*map(_to_torch, backward(ctx.causal, *ctx.saved, _to_jax(do))), None)


def executable(problem: Problem, part: str) -> Callable[[], Any]:
    """Return a function that enqueues CALLS calls of a pass, and returns an array of the last one."""
    jax, causal = _jax(), problem.case.causal
    q, k, v, do = map(_to_jax, problem.tensors("dense"))
    given: tuple[Any, ...] = (q, k, v)
    if part == "bwd":
        given = (q, k, v, *jax.jit(functools.partial(forward, causal))(q, k, v), do)
    one = functools.partial(backward if part == "bwd" else forward, causal)

    def several(*given: Any) -> Any:
        for _ in range(CALLS - 1):
            one(*given)
        return one(*given)[0]

    return functools.partial(jax.jit(several).lower(*given).compile(), *given)


class BackToBackClock(LoadClock):
    """Times blocks of calls by the wall clock, from an idle device to an idle device."""

    measurement = Measurement

    def sample(self, fn: Callable[[], Any], calls: int) -> Any:
        """Return the ms of a call, the mean of ``calls`` executions of CALLS calls each, in a list."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            last = fn()
        if hasattr(last, "block_until_ready"):  # of JAX, which launches from threads of its own
            last.block_until_ready()
        self.synchronize()
        return [1e3 * (time.perf_counter() - begin) / (calls * CALLS)]

    def calls_for(self, fn: Callable[[], Any], round_ms: float) -> int:
        fn()
        return max(1, round(round_ms / (self.sample(fn, 1)[0] * CALLS)))


class Fa3Trial(AttentionTrial):
    """One case."""

    def enter(self, provider: AttentionProvider) -> Entry:
        entry = super().enter(provider)
        if provider.name == FA3:
            entry.make, entry.captures = functools.partial(executable, self.problem), False
            del entry.facts["peak_mib"]  # JAX has an allocator of its own
        return entry


PROVIDERS = by_name(
    (
        OURS,
        rival(BASELINES["bare_fa4"]),
        AttentionProvider(
            *(FA3, "bare FA3, from JAX", "bare", _missing),
            run=lambda q, k, v, given: _Fa3.apply(q, k, v, given.case.causal),
            rotates=False,
        ),
    )
)
FA3_SUITE = Suite(
    name="fa3",
    description="Time FlashAttention-3 with its backward, which is installed for JAX alone.",
    cases=cases.PLAIN,
    trial=Fa3Trial,
    table=lambda case: PROVIDERS,
    default_cases="Small-1K,Llama7B-2K,Llama7B-4K,Llama3-8B-4K,Llama3-8B-16K",
    modes=("load",),
    rounds=4,
    round_ms=50.0,
    clock=lambda device, options: BackToBackClock(device),
)
