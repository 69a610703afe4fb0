"""Time of the host in an eager call of attention, without a GPU: a driver that does nothing takes the kernels.

    python -m tools.host_profile                            microseconds of each pass, both launchers
    python -m tools.host_profile --case hopper --profile    where they go, by cProfile

The call is the smallest of docs/experiments/host.md: (1, 4/4, 128, 64), bfloat16, causal.

The rest is Python's share of a call, and PyTorch's: the tensors are on the CPU, the launch by the driver is an
empty C function called by ctypes, and Triton's own launcher costs nothing at all, so that its rows are a lower bound.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import io
import pstats
import time
from collections.abc import Callable, Iterator

import torch
import triton

from fused_rope_attn.runtime import driver
from fused_rope_attn.runtime.calls import Calls
from tools import aot
from verification.table import format_table

CASES = ("hopper", "triton")
PASSES = ("forward", "forward for a gradient", "forward and backward")
BATCH, HEADS, LENGTH, HEAD_DIM = 1, 4, 128, 64


class LoadingDriver(aot.CompileOnlyDriver):
    """Kernels are compiled, "loaded" and launched, and nothing runs."""

    class utils(aot.CompileOnlyDriver.utils):
        @staticmethod
        def load_binary(name, binary, shared, device):
            return 1, 1, 0, 0, 1 << 10  # module, function, registers, spills, threads of a block


class AnySizes:
    """Equal to the sizes of any kernel's parameters."""

    def __eq__(self, other: object) -> bool:
        return True


class IdleDriver:
    """A driver as ``driver.load`` gives it, with a C function for the launch that reads nothing and returns 0."""

    def __init__(self):
        self.launch = self.encode = ctypes.CDLL("libm.so.6").feclearexcept

    def parameter_sizes(self, function) -> AnySizes:
        return AnySizes()

    def message(self, code: int) -> str:
        return f"error {code}"


@contextlib.contextmanager
def idle(by_driver: bool) -> Iterator[None]:
    """Within the context CPU tensors go through the kernels' launchers for sm_90, and nothing is launched."""
    load, active = driver.load, triton.runtime.driver._active
    found = IdleDriver()
    with aot.compiling_for("sm_90"):
        triton.runtime.driver.set_active(LoadingDriver("sm_90"))
        driver.load = lambda: found if by_driver else None
        try:
            yield
        finally:
            driver.load = load
            triton.runtime.driver.set_active(active)


def steps(case: str) -> dict[str, Callable[[], object]]:
    """A call of each pass, bfloat16 and causal."""
    from fused_rope_attn import rope_attention

    q, k, v, do = (torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cos, sin = torch.ones(2, LENGTH, HEAD_DIM // 2)

    def forward_and_backward() -> None:
        o = rope_attention(*leaves, cos, sin, True, backend=case)
        o.backward(do)
        for x in leaves:
            x.grad = None

    calls = (
        lambda: rope_attention(q, k, v, cos, sin, True, backend=case),
        lambda: rope_attention(*leaves, cos, sin, True, backend=case),
        forward_and_backward,
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.host_profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="backend (default: all)")
    parser.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="pass (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500, help="calls of a round")
    parser.add_argument("--profile", action="store_true", help="functions by their own time, instead of the table")
    options = parser.parse_args(argv)
    from fused_rope_attn.attention import eager

    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    reports: list[str] = []
    for by_driver in (True,) if options.profile else (True, False):
        Calls.forget_all()
        eager.forget()
        with idle(by_driver):
            for case in options.case or CASES:
                for name, call in steps(case).items():
                    if name not in (options.passes or PASSES):
                        continue
                    with torch.set_grad_enabled("gradient" in name or "backward" in name):
                        for _ in range(4):  # until every pass is a known call's replay
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
