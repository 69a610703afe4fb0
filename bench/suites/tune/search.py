"""The search of ``python -m bench tune`` over launch configurations of the portable kernels.

Every point is (pass, head dim, causal, length bucket, GQA, strategy), measured at one shape of that bucket. A candidate
is gated against float64 like everybody else, screened once, and the best few are timed again, interleaved with the
configuration that the committed table holds now. Compilation happens first, in processes of their own: a hundred
kernels at 3 s each would otherwise be most of the time.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gate import Gate
from bench.runner import sentence
from bench.suites.tune.point import Config, Point, Timed
from bench.suites.tune.proposal import describe
from bench.timing import interleave, quantile
from fused_rope_attn import testing
from fused_rope_attn.attention import configs, problem

_SECTIONS = (0, 8 << 20, 24 << 20)
_FINALISTS = 4


def tile_grid(head_dim: int, element_size: int, kernel: str) -> Iterator[configs.Tile]:
    """Tiles of one kernel ("tile" of the forward, "dkdv", "dq") whose accumulators fit the registers and whose pipeline
    may fit a block's shared memory; what does not after all is refused by the launch."""
    width = max(16, 1 << (head_dim - 1).bit_length())
    sizes = (32, 64, 128) if element_size == 2 else (16, 32, 64)
    for block_m, block_n, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3)):
        # The block that stays (queries; keys for dkdv, which adds up two gradients) and the one that streams past it.
        kept, streamed = (block_n, block_m) if kernel == "dkdv" else (block_m, block_n)
        accumulators = (2 if kernel == "dkdv" else 1) * kept * width // (32 * warps)  # registers a thread
        held = kept * (2 if kernel != "tile" else 1)  # rows that stay: q; q and do; k and v
        pipeline = (held + 2 * stages * streamed) * width * element_size
        if kept == sizes[0] or accumulators > 128 or pipeline > 232_448:
            continue
        # Eight warps on fewer than 128 rows split the columns: worth it only where the rows are wide.
        if width < 256 and (stages == 1 or (warps == 8 and kept < sizes[-1])):
            continue
        yield configs.Tile(block_m, block_n, warps, stages)
        if kernel == "tile" and element_size == 2 and (kept, warps) == (128, 8) and width <= 128:
            yield configs.Tile(block_m, block_n, warps, stages, 128)  # two blocks a multiprocessor


def candidates(point: Point, arch: str, kernel: str) -> list[Config]:
    """The current configuration with other tiles for ``kernel`` ("tile", "dkdv" or "dq"), with and without TMA."""
    current = point.current(arch)
    tma = (False, True) if point.strategy == "prepass" and arch in ("sm_90", "sm_100", "sm_120") else (False,)
    found = [
        replace(current, **{kernel: tile}, tma=flag)
        for tile in tile_grid(point.head_dim, point.dtype.itemsize, kernel)
        for flag in tma
    ]
    return [current, *(config for config in found if config != current)]


def kernels(point: Point) -> tuple[str, ...]:
    """The tiles that a configuration of this pass holds, in the order in which they are swept."""
    return ("tile",) if point.part == "fwd" else ("dkdv", "dq")


class Bench:
    """Inputs, gate and clock of one point."""

    def __init__(self, point: Point, clock: Any, arch: str):
        self.point, self.clock = point, clock
        case = point.case
        self.inputs = testing.make_inputs(case, clock.device)
        self.gate = Gate(case, self.inputs)
        self.tensors = problem.Tensors(*self.inputs[:5])
        self.problem = problem.describe(
            self.tensors, causal=case.causal, softmax_scale=case.scale, rotary_dim=case.rotary,
            interleaved=case.interleaved,
        ).for_launch()  # fmt: skip
        if point.part == "bwd":
            forward = replace(point, part="fwd").current(arch)
            self.o, self.lse = self._forward(forward)

    def _forward(self, config: configs.ForwardConfig) -> tuple[torch.Tensor, torch.Tensor]:
        from fused_rope_attn.attention.portable.forward import ForwardCall

        return ForwardCall(self.problem, self.tensors, config)(self.tensors)[:2]

    def call(self, config: Config) -> Callable[[], Any]:
        """The zero-argument function that is timed."""
        from fused_rope_attn.attention.portable.backward import backward_call
        from fused_rope_attn.attention.portable.forward import ForwardCall

        if self.point.part == "fwd":
            forward = ForwardCall(self.problem, self.tensors, config)
            return lambda: forward(self.tensors)[:2]
        given = (self.inputs.do, self.o, self.lse, *self.tensors)
        backward = backward_call(self.problem, given, config)
        return lambda: backward(given)[:3]

    def screen(self, config: Config, round_ms: float) -> Timed | str:
        """Gate, then a short look; the reason where it cannot run or computes something else."""
        fn = self.call(config)
        try:
            out = fn()
            names = ("o",) if self.point.part == "fwd" else ("dq", "dk", "dv")
            verdict = self.gate.judge(dict(zip(names, out)))
            if verdict.status != "ok":
                return f"FAILED the gate: {verdict.detail}"
            times = self.clock.sample(fn, self.clock.calls_for(fn, round_ms))
        except Exception as error:
            self.clock.synchronize()
            return sentence(error)
        return Timed(config, *(quantile(times, q) for q in (0.5, 0.2, 0.8)))

    def final(self, contenders: list[Config], rounds: int, round_ms: float) -> list[Timed]:
        """Interleaved rounds; fastest first."""
        fns = {str(i): self.call(config) for i, config in enumerate(contenders)}
        calls = {name: self.clock.calls_for(fn, round_ms) for name, fn in fns.items()}
        measured, _ = interleave(fns, self.clock.sample, calls, rounds, lambda: False)
        results = []
        for name, measurement in measured.items():
            median, p20, p80 = measurement.quantiles()
            results.append(Timed(contenders[int(name)], median, p20, p80, tuple(measurement.round_medians)))
        return sorted(results, key=lambda timed: timed.ms)


def search(
    point: Point,
    clock: Any,
    arch: str,
    *,
    grid: Callable[[Point, str, str], list[Config]] = candidates,
    sections: tuple[int, ...] = _SECTIONS,
    rounds: int = 5,
    round_ms: float = 5.0,
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[list[Timed], list[tuple[Config, str]]]:
    """(finalists with the current configuration among them, fastest first; candidates refused, with the reason)."""
    bench = Bench(point, clock, arch)
    current = point.current(arch)
    refused: list[tuple[Config, str]] = []
    best: list[Timed] = []

    def screen(tried: list[Config]) -> list[Timed]:
        passed = []
        for index, config in enumerate(tried):
            progress(f"{point.name}: {index + 1}/{len(tried)} {describe(config)}")
            result = bench.screen(config, round_ms)
            if isinstance(result, Timed):
                passed.append(result)
            else:
                refused.append((config, result))
        return passed

    for kernel in kernels(point):
        tried = grid(point, arch, kernel)
        if best:  # the other kernel's tile is settled, and TMA with it
            tried = [replace(best[0].config, **{kernel: getattr(config, kernel)}) for config in tried]
        best = sorted(best[:_FINALISTS] + screen(list(dict.fromkeys(tried))), key=lambda timed: timed.ms)
    others = [
        replace(timed.config, section_bytes=section)
        for timed in best[: _FINALISTS - 1]
        for section in sections
        if section != timed.config.section_bytes
    ]
    best = sorted(best + screen(others), key=lambda timed: timed.ms)
    if not best:
        return [], refused
    contenders = dict.fromkeys([timed.config for timed in best[:_FINALISTS]])
    if current not in [config for config, _ in refused]:
        contenders[current] = None
    return bench.final(list(contenders), rounds, 4 * round_ms), refused


def compile_all(points: list[Point], arch: str, jobs: int, progress: Callable[[str], None]) -> None:
    """Fill Triton's cache on the disk from several processes; each launches its share once."""
    # Neither length nor GQA is compiled in: a bucket's kernels are those of every other.
    distinct = {replace(point, bucket="tiny", gqa=False): None for point in points}
    tasks = []
    for point in distinct:
        for kernel in kernels(point):
            tried = candidates(point, arch, kernel)
            tasks += [(point, arch, tried[first::jobs]) for first in range(jobs)]
    progress(f"compiling {sum(len(task[2]) for task in tasks)} kernels in {jobs} processes")
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, _ in enumerate(pool.map(_compile_share, tasks), 1):
            progress(f"compiled {done}/{len(tasks)} shares")


def _compile_share(task: tuple[Point, str, list[Config]]) -> None:
    point, arch, tried = task
    bench = Bench(point, _Bare(torch.device("cuda", 0)), arch)
    for config in tried:
        try:
            bench.call(config)()
        except Exception:  # it will fail again where it is measured, and be reported there
            pass
    torch.cuda.synchronize()


@dataclass
class _Bare:
    """As much of a clock as a compilation needs."""

    device: torch.device
