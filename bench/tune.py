"""``python -m bench tune``: sweep launch configurations of the Triton kernels and propose rows for configs.py.

Every point is (pass, head dim, causal, length bucket, GQA, strategy), measured at one shape of that bucket. A candidate
is gated against float64 like everybody else, screened once, and the best few are timed again, interleaved with the
configuration that the committed table holds now. Compilation happens first, in processes of their own: a hundred
kernels at 3 s each would otherwise be most of the time. Nothing is written to configs.py: a person reads the proposal.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.cases import DTYPES
from bench.environment import environment
from bench.gate import Gate
from bench.timing import GpuClock, interleave, ratio
from fused_rope_attn import testing
from fused_rope_attn.attention import configs, problem
from fused_rope_attn.runtime import device

Config = configs.ForwardConfig | configs.BackwardConfig

# Batch, query heads and length that stand for a bucket; every one fills a large card.
_SHAPES = {"tiny": (4, 16, 512), "short": (4, 16, 1024), "medium": (2, 32, 4096), "long": (1, 32, 16384)}
_GQA_GROUP = 4
_SECTIONS = (0, 8 << 20, 24 << 20)
_FINALISTS = 4
_WORTH = 1.01  # a row is proposed when the current configuration takes at least this much longer


@dataclass(frozen=True)
class Point:
    """What one row of the table is looked up by, and a shape to measure it at."""

    part: str  # "fwd" or "bwd"
    head_dim: int
    causal: bool
    bucket: str
    gqa: bool
    strategy: str
    dtype: torch.dtype

    @property
    def case(self) -> testing.Case:
        batch, heads, length = _SHAPES[self.bucket]
        heads_kv = heads // _GQA_GROUP if self.gqa else heads
        return testing.Case(batch, heads, heads_kv, length, length, self.head_dim, causal=self.causal, dtype=self.dtype)

    @property
    def name(self) -> str:
        return f"{self.part} {self.strategy}, {self.bucket}: {self.case.name}"

    def current(self, arch: str) -> Config:
        """What the committed table holds."""
        find = configs.forward if self.part == "fwd" else configs.backward
        return find(arch, self.dtype.itemsize, self.head_dim, self.strategy, self.causal, self.bucket, self.gqa)


@dataclass(frozen=True)
class Timed:
    """One configuration's figures in ms; ``rounds`` are medians of interleaved rounds, empty after a screening."""

    config: Config
    ms: float
    p20: float
    p80: float
    rounds: tuple[float, ...] = ()


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
        self.gate = Gate(case, self.inputs, grads=point.part == "bwd")
        self.tensors = problem.Tensors(*self.inputs[:5])
        self.problem = problem.describe(
            self.tensors, causal=case.causal, softmax_scale=case.scale, rotary_dim=case.rotary,
            interleaved=case.interleaved,
        ).for_launch()  # fmt: skip
        if point.part == "bwd":
            forward = replace(point, part="fwd").current(arch)
            self.o, self.lse = self._forward(forward)

    def _forward(self, config: configs.ForwardConfig) -> tuple[torch.Tensor, torch.Tensor]:
        from fused_rope_attn.attention.portable.forward import attention_forward

        return attention_forward(self.problem, self.tensors, config)

    def call(self, config: Config) -> Callable[[], Any]:
        """The zero-argument function that is timed."""
        if self.point.part == "fwd":
            return lambda: self._forward(config)
        from fused_rope_attn.attention.portable.backward import attention_backward

        gradient = {"do": self.inputs.do, "o": self.o, "lse": self.lse}
        return lambda: attention_backward(self.problem, self.tensors, config, **gradient)[:3]

    def screen(self, config: Config, round_ms: float) -> Timed | str:
        """Gate, then a short look; the reason where it cannot run or computes something else."""
        fn = self.call(config)
        try:
            out = fn()
            names = ("o",) if self.point.part == "fwd" else ("dq", "dk", "dv")
            verdict = self.gate.judge(dict(zip(names, out)))
            if verdict.status != "ok":
                return f"FAILED the gate: {verdict.detail}"
            times = sorted(self.clock.sample(fn, self.clock.calls_for(fn, round_ms)))
        except Exception as error:
            self.clock.synchronize()
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        middle = times[len(times) // 2]
        return Timed(config, middle, times[len(times) // 5], times[-1 - len(times) // 5])

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


def describe(config: Config) -> str:
    """``128x64 w8 s3 tma 8MB`` (backward: dkdv tile / dq tile)."""
    tiles = [config.tile] if isinstance(config, configs.ForwardConfig) else [config.dkdv, config.dq]
    words = [" / ".join(_tile_words(tile) for tile in tiles)]
    words += ["tma"] if config.tma else []
    words += [f"{config.section_bytes >> 20}MB"] if config.section_bytes else []
    return " ".join(words)


def _tile_words(tile: configs.Tile) -> str:
    cap = f" r{tile.max_registers}" if tile.max_registers else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{cap}"


def proposal(point: Point, arch: str, best: Timed, current: Timed | None, facts: dict[str, Any]) -> str:
    """A row of ``configs.FORWARD`` or ``BACKWARD`` as Python text, with card, versions, date and reason."""
    config = best.config
    was = f", was {report.milliseconds(current.ms)} ({describe(current.config)})" if current else ""
    note = (
        f"{facts['gpu']}, triton {facts['triton']}, {str(facts['date'])[:10]}: "
        f"{report.milliseconds(best.ms)} ms at {point.case.name}{was}"
    )
    tiles = (config.tile,) if isinstance(config, configs.ForwardConfig) else (config.dkdv, config.dq)
    row = configs.Row(
        (arch,),
        point.dtype.itemsize,
        point.head_dim,
        tiles,
        note,
        strategies=(point.strategy,),
        causal=point.causal,
        buckets=(point.bucket,),
        gqa=point.gqa,
        section_bytes=config.section_bytes,
        rotate_rows=config.rotate_rows,
        tma=config.tma,
    )
    return row_text(row)


def row_text(row: configs.Row) -> str:
    """The expression that builds ``row``; fields that hold their default are left out."""
    required = {"archs": row.archs, "element_size": row.element_size, "head_dim": row.head_dim}
    words = [repr(value) for value in required.values()]
    words.append(f"({''.join(_tile_text(tile) + ', ' for tile in row.tiles).strip()})")
    words.append(f'"{row.note}"')
    for field in fields(configs.Row)[5:]:
        value = getattr(row, field.name)
        if value != field.default:
            shown = f"{value >> 20} << 20" if field.name == "section_bytes" and value % (1 << 20) == 0 else repr(value)
            words.append(f"{field.name}={shown}")
    return f"Row({', '.join(words)}),".replace("'", '"')


def _tile_text(tile: configs.Tile) -> str:
    values = [tile.block_m, tile.block_n, tile.num_warps, tile.num_stages]
    return f"Tile({', '.join(map(str, values + ([tile.max_registers] if tile.max_registers else [])))})"


def strategies(best: dict[Point, Timed]) -> str:
    """Which strategy wins where both were tuned: what ``configs.STRATEGY`` is about."""
    lines = []
    for point in best:
        other = replace(point, strategy="prepass")
        if point.strategy != "inline" or other not in best:
            continue
        a, b = best[point].ms, best[other].ms
        winner = "inline" if a < b else "prepass"
        lines.append([f"{point.part} {point.bucket} {point.case.name}", *map(report.milliseconds, (a, b)), winner])
    return report.table(["point", "inline ms", "prepass ms", "faster"], lines) if lines else ""


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


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("bench tune: no GPU here; configurations are tuned on the card they are for.", file=sys.stderr)
        return 2
    device_ = torch.device("cuda", torch.cuda.current_device())
    arch = configs.family(device.arch(device_))
    if arch is None:
        print(f"bench tune: the kernels know no {device.arch(device_)}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    points = _points(args)
    facts = environment()
    out = args.out

    def progress(message: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {message}", file=sys.stderr, flush=True)

    print(f"{facts['gpu']} as {arch}, triton {facts['triton']}, commit {facts['commit']}: {len(points)} points")
    if args.jobs > 1:
        compile_all(points, arch, args.jobs, progress)
    clock = GpuClock(device_)
    best: dict[Point, Timed] = {}
    rows: dict[str, list[str]] = {"fwd": [], "bwd": []}
    left: list[str] = []
    for point in points:
        if args.time_budget and time.monotonic() - begin > args.time_budget:
            left.append(point.name)
            continue
        progress(point.name)
        finalists, refused = search(point, clock, arch, rounds=args.rounds, round_ms=args.round_ms)
        clock.release()
        print(f"\n{point.name}: {len(refused)} refused" + _refusals(refused))
        if not finalists:
            continue
        current = next((timed for timed in finalists if timed.config == point.current(arch)), None)
        print(_finalists(finalists, current), flush=True)
        best[point] = finalists[0]
        if out is not None:
            report.write_lines(out, [_json_row(point, timed, current, facts) for timed in finalists])
        if current is None or ratio(list(current.rounds), list(finalists[0].rounds)) >= _WORTH:
            rows[point.part].append(f"    {proposal(point, arch, finalists[0], current, facts)}")
    table = strategies(best)
    if table:
        print(f"\nStrategies, each at its best:\n\n{table}")
    print("\nProposed rows, to stand before the ones that serve these points now:\n")
    for part, name in (("fwd", "FORWARD"), ("bwd", "BACKWARD")):
        print(f"{name}:\n" + ("\n".join(rows[part]) or "    nothing better than the table by 1 %"))
    if left:
        print(f"\nNot run, the time budget of {args.time_budget:g} s was spent: {'; '.join(left)}")
    return 0


def _finalists(finalists: list[Timed], current: Timed | None) -> str:
    lines = [
        [
            describe(timed.config) + ("  (current)" if timed is current else ""),
            report.milliseconds(timed.ms),
            f"{report.milliseconds(timed.p20)}-{report.milliseconds(timed.p80)}",
            report.speedup(ratio(list(current.rounds), list(timed.rounds))) if current else "",
        ]
        for timed in finalists
    ]
    return report.table(["configuration", "ms", "p20-p80", "vs current"], lines)


def _refusals(refused: list[tuple[Config, str]]) -> str:
    """Gate failures one by one, since they are bugs; everything else (shared memory, registers) by kind."""
    red = [f"\n  ! {describe(config)}: {reason}" for config, reason in refused if reason.startswith("FAILED")]
    kinds: dict[str, int] = {}
    for _, reason in refused:
        if not reason.startswith("FAILED"):
            kinds[reason.split(":")[0]] = kinds.get(reason.split(":")[0], 0) + 1
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (f" ({counted})" if counted else "") + "".join(red)


def _json_row(point: Point, timed: Timed, current: Timed | None, facts: dict[str, Any]) -> dict[str, Any]:
    about = {key: value for key, value in asdict(point).items() if key != "dtype"}
    return {
        "tune": True,
        **about,
        "dtype": str(point.dtype).removeprefix("torch."),
        "shape": point.case.name,
        "config": asdict(timed.config),
        "current": timed is current,
        "ms": timed.ms,
        "p20": timed.p20,
        "p80": timed.p80,
        "rounds": list(timed.rounds),
        **facts,
    }


def _points(args: argparse.Namespace) -> list[Point]:
    flags = {"yes": (True,), "no": (False,), "both": (True, False)}
    axes = itertools.product(
        args.passes.split(","),
        map(int, args.head_dims.split(",")),
        flags[args.causal],
        args.buckets.split(","),
        flags[args.gqa],
        args.strategies.split(","),
    )
    return [Point(*axis, DTYPES[args.dtype]) for axis in axes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench tune", description="Sweep launch configurations of the Triton kernels, propose table rows."
    )
    parser.add_argument("--passes", default="fwd,bwd")
    parser.add_argument("--head-dims", default="64,128", help="largest head dimension of a row, e.g. 64,128,256")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="yes")
    parser.add_argument("--buckets", default=",".join(_SHAPES), help=f"of {', '.join(_SHAPES)}")
    parser.add_argument("--gqa", choices=("yes", "no", "both"), default="no")
    parser.add_argument("--strategies", default="prepass,inline")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of the finalists")
    parser.add_argument("--round-ms", type=float, default=5.0, help="GPU time of one candidate's screening")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="compiling processes"
    )
    parser.add_argument("--time-budget", type=float, metavar="S", help="begin no further point after so many seconds")
    parser.add_argument("--out", type=Path, help="JSON lines of the finalists")
    return parser
