"""Count the versions of kernels that Triton would compile for several calls, without a GPU and without compiling.

Triton asks a hook before it compiles, with the key under which it keeps the kernel. The hook here notes the key and
declines. ``python -m tests.support.versions NAME WINDOW ...`` prints the numbers of keys as JSON, by kernel; a window
of -1 is a call without one. A process of its own, because the test's may have replaced the compiler by the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import torch
import triton

from tests.support.paths import ROOT
from tools import aot
from tools.jobs import int32, meta


def attend(window: tuple[int, int] | None) -> None:
    """Run the portable forward pass in bfloat16, 1000 tokens of 8 heads of 64 columns."""
    from fused_rope_attn.attention.configs import ForwardConfig, Tile
    from fused_rope_attn.attention.portable.forward import ForwardCall
    from fused_rope_attn.attention.problem import Tensors, describe

    q, k, v = (meta(2, 8, 1000, 64, dtype=torch.bfloat16) for _ in range(3))
    tensors = Tensors(q, k, v, meta(1000, 32), meta(1000, 32))
    problem = describe(tensors, rotary_dim=64, causal=True, softmax_scale=0.1, window=window)
    ForwardCall(problem.for_launch(), tensors, ForwardConfig("prepass", Tile(64, 64, 4, 2)))(tensors)


def decode(window: tuple[int, int] | None) -> None:
    """Run a generation step of one new token in bfloat16, with caches of 1000 rows of 2 heads of 64 columns."""
    from fused_rope_attn.generation.configs import decode
    from fused_rope_attn.generation.launch import step_call
    from fused_rope_attn.generation.problem import StepTensors, describe_step

    q, k, v = (meta(2, heads, 1, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    caches = (meta(2, 2, 1000, 64, dtype=torch.bfloat16) for _ in range(2))
    tensors = StepTensors(q, *caches, meta(1000, 32), meta(1000, 32), k, v, int32(2))
    options = {"rotary_dim": 64, "causal": True, "softmax_scale": 0.1, "window": window}
    problem = describe_step(tensors, cache_is_rotated=True, **options)
    step_call(problem.for_launch(), tensors, decode("sm_90", 2, 64, True))(tensors)


CALLS: dict[str, Callable[[tuple[int, int] | None], None]] = {"attend": attend, "decode": decode}


def count(call: Callable[[tuple[int, int] | None], None], windows: Iterable[int]) -> dict[str, int]:
    """Return the number of versions of each kernel that calls with these windows have, by the kernel's name."""
    keys: dict[str, set[str]] = {}

    def decline(*, key, fn, **other):
        keys.setdefault(fn.jit_function.fn.__name__, set()).add(key)
        return True

    with aot.compiling_for("sm_90"), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = decline
        for left in windows:
            call(None if left < 0 else (left, -1))
    return {name: len(found) for name, found in keys.items()}


def versions_of(name: str, *windows: int) -> dict[str, int]:
    """Return ``count`` of one of ``CALLS`` from a process with the compiler; a window of -1 is none."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.versions", name, *map(str, windows)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


if __name__ == "__main__":
    print(json.dumps(count(CALLS[sys.argv[1]], map(int, sys.argv[2:]))))
