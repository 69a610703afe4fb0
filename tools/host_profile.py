"""Time of the host in an eager call, without a GPU: the kernels are compiled, and a driver that does nothing takes them.

    python -m tools.host_profile                            microseconds of each pass, both launchers
    python -m tools.host_profile --case hopper --profile    where they go, by cProfile

What remains is Python's share of a call, and PyTorch's: the tensors are on the CPU, the launch by the driver is an
empty C function called by ctypes, and Triton's own launcher costs nothing at all, so that its rows are a lower bound.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import ctypes.util
import io
import pstats
import statistics
import struct
import time
from collections.abc import Callable, Iterator

import torch
import triton

from fused_rope_attn.runtime import direct_launch, driver, launch
from tools import aot
from verification.table import format_table

CASES = ("hopper", "triton")
PASSES = ("forward", "forward for a gradient", "forward and backward", "generation step", "apply_rope_qk")
BATCH, HEADS, LENGTH, HEAD_DIM = 1, 4, 128, 64


class LoadingDriver(aot.CompileOnlyDriver):
    """Kernels are compiled, "loaded" and launched, and nothing runs."""

    class utils(aot.CompileOnlyDriver.utils):
        @staticmethod
        def load_binary(name, binary, shared, device):
            return 1, 1, 0, 0, 1 << 10  # module, function, registers, spills, threads of a block


class IdleDriver:
    """What ``driver.load`` gives, with a C function for the launch that looks at nothing and returns 0."""

    def __init__(self):
        self.launch = ctypes.CDLL(ctypes.util.find_library("m")).feclearexcept

    def message(self, code: int) -> str:
        return f"error {code}"


def idle_tensor_map(address: int, **_) -> bytes:
    """Stands for Triton's encoding, which needs libcuda."""
    return struct.pack("<Q120x", address)


@contextlib.contextmanager
def idle(by_driver: bool) -> Iterator[None]:
    """Within the context CPU tensors go through the kernels' launchers for sm_90, and nothing is launched."""
    load, encode, active = driver.load, direct_launch.encode_tensor_map, triton.runtime.driver._active
    found = IdleDriver()
    with aot.compiling_for("sm_90"):
        triton.runtime.driver.set_active(LoadingDriver("sm_90"))
        driver.load = lambda: found if by_driver else None
        direct_launch.encode_tensor_map = idle_tensor_map
        try:
            yield
        finally:
            driver.load, direct_launch.encode_tensor_map = load, encode
            triton.runtime.driver.set_active(active)


def steps(case: str) -> dict[str, Callable[[], object]]:
    """A call of each pass, bfloat16 and causal."""
    from fused_rope_attn import apply_rope_qk, rope_attention, rope_attention_with_kvcache

    def tensor(length: int = LENGTH) -> torch.Tensor:
        return torch.zeros(BATCH, HEADS, length, HEAD_DIM, dtype=torch.bfloat16)

    q, k, v, do = (tensor() for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cos = sin = torch.ones(LENGTH, HEAD_DIM // 2)
    new = [tensor(1) for _ in range(3)]
    lens = torch.full((BATCH,), LENGTH // 2, dtype=torch.int32)

    def forward_and_backward() -> None:
        o = rope_attention(*leaves, cos, sin, True, backend=case)
        o.backward(do)
        for x in leaves:
            x.grad = None

    calls = (
        lambda: rope_attention(q, k, v, cos, sin, True, backend=case),
        lambda: rope_attention(*leaves, cos, sin, True, backend=case),
        forward_and_backward,
        lambda: rope_attention_with_kvcache(new[0], k, v, cos, sin, new[1], new[2], cache_seqlens=lens),
        lambda: apply_rope_qk(q, k, cos, sin),
    )
    return dict(zip(PASSES, calls, strict=True))


def microseconds(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Time of the CPU in one call, of the fastest round: what others do on the machine only adds to it."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) / calls)
    return 1e6 * min(times)


def forget_calls() -> None:
    """Every call is prepared again, with the launcher that is then to be found."""
    from fused_rope_attn.attention import ops
    from fused_rope_attn.attention.hopper import backward as hopper_backward
    from fused_rope_attn.attention.hopper import forward as hopper_forward
    from fused_rope_attn.attention.portable import backward, forward
    from fused_rope_attn.generation import launch as generation
    from fused_rope_attn.generation import ops as generation_ops
    from fused_rope_attn.rotation import launch as rotation

    for calls in (
        ops._forward_calls, ops._backward_calls, hopper_forward.prepared, hopper_backward.prepared, forward.prepared,
        backward.prepared, generation.prepared, generation_ops._calls, rotation._prepared,
    ):  # fmt: skip
        calls.forget()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.host_profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="backend (default: all)")
    parser.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="pass (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500, help="calls of a round")
    parser.add_argument("--profile", action="store_true", help="functions by their own time, instead of the table")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, reports = [], []
    for by_driver in (True,) if options.profile else (True, False):
        forget_calls()
        with idle(by_driver):
            for case in options.case or CASES:
                for name, call in steps(case).items():
                    if name not in (options.passes or PASSES):
                        continue
                    with torch.set_grad_enabled("gradient" in name or "backward" in name):
                        call()
                        call()
                        if options.profile:
                            with cProfile.Profile() as profile:
                                for _ in range(options.calls):
                                    call()
                            text = io.StringIO()
                            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
                            reports.append(f"{case}, {name}, {options.calls} calls\n{text.getvalue()}")
                            continue
                        time_of_call = microseconds(call, options.rounds, options.calls)
                    launcher = "the driver" if by_driver else "Triton, idle"
                    rows.append({"backend": case, "pass": name, "launcher": launcher, "us": round(time_of_call, 1)})
    print("\n".join(reports))
    if rows:
        print(format_table(list(rows[0]), rows))


if __name__ == "__main__":
    main()
