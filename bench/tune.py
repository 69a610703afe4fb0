"""``python -m bench tune attention`` and ``tune decode``: time configurations of our kernels on the card they are for.

Each candidate is a provider of a suite: it is held to float64, then timed in interleaved rounds with the configuration
that the committed table has now. Candidates of the portable attention kernels change one tile; the tiles of the two
backward kernels can be combined, because their times add up. A person writes the best into ``configs.py``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench import command
from bench.attention import cases, providers
from bench.attention.problem import AttentionTrial
from bench.attention.suite import ATTENTION
from bench.decode.pages import Run, Step
from bench.decode.providers import COPY, OURS, RAW
from bench.decode.providers import PROVIDERS as DECODE_PROVIDERS
from bench.decode.suite import DECODE
from bench.names import words
from bench.suite import Options
from fused_rope_attn.attention import configs, problem
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.generation import configs as decode_configs
from fused_rope_attn.generation import planning
from fused_rope_attn.runtime import device

Config = configs.ForwardConfig | configs.BackwardConfig
_SECTIONS = (0, 8 << 20, 24 << 20)
PRESENT = "(table)"  # the configuration that the committed table has


def main(argv: list[str]) -> int:
    """Tune. Exit status as of every suite."""
    suites = {"attention": TILES, "decode": SWEEP}
    if not argv or argv[0] not in suites:
        return command.refuse("tune", f"takes {' or '.join(suites)} first; each has --help")
    return command.main(suites[argv[0]], argv[1:])


def arch_of(where: torch.device) -> str:
    """Return the architecture to tune, without a GPU the interpreter's."""
    return configs.family(device.arch(where)) or "interpreter"


# Attention


def tile_grid(head_dim: int, element_size: int, kernel: str) -> Iterator[configs.Tile]:
    """Yield tiles of a kernel ("tile" of the forward, "dkdv", "dq") that may fit registers and shared memory."""
    width = max(16, 1 << (head_dim - 1).bit_length())
    sizes = (32, 64, 128) if element_size == 2 else (16, 32, 64)
    for block_m, block_n, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3)):
        # One block stays (queries; keys for dkdv, which adds up two gradients), the other is streamed.
        kept, streamed = (block_n, block_m) if kernel == "dkdv" else (block_m, block_n)
        accumulators = (2 if kernel == "dkdv" else 1) * kept * width // (32 * warps)  # registers of a thread
        held = kept * (2 if kernel != "tile" else 1)  # rows that stay: q; q and do; k and v
        pipeline = (held + 2 * stages * streamed) * width * element_size
        if kept == sizes[0] or accumulators > 128 or pipeline > 232_448:
            continue
        # Eight warps on fewer than 128 rows split the columns, which pays only where rows are wide.
        if width < 256 and (stages == 1 or (warps == 8 and kept < sizes[-1])):
            continue
        yield configs.Tile(block_m, block_n, warps, stages)
        if kernel == "tile" and element_size == 2 and (kept, warps) == (128, 8) and width <= 128:
            yield configs.Tile(block_m, block_n, warps, stages, 128)  # two blocks a multiprocessor


def grid(case: cases.BenchCase, arch: str) -> list[dict[str, Config]]:
    """Return configurations of both passes, which differ in the pass and for the strategy of the case's groups.

    First what the committed table holds, then those with another size of sections, tile of one kernel, or TMA.
    """
    c, (part, strategy) = case.case, case.groups[-2:]
    key = arch, c.dtype.itemsize, c.head_dim, strategy, c.causal, configs.bucket(c.len_k), c.heads_q != c.heads_kv
    present = {"fwd": portable.forward(*key), "bwd": portable.backward(*key)}
    changes: list[dict[str, Any]] = [{}, *({"section_bytes": size} for size in _SECTIONS)]
    for kernel in ("tile",) if part == "fwd" else ("dkdv", "dq"):
        for tile in tile_grid(c.head_dim, c.dtype.itemsize, kernel):
            changes.append({kernel: tile, "tma": False})
            if strategy == "prepass" and arch in ("sm_90", "sm_100", "sm_120"):
                changes.append({kernel: tile, "tma": True})
    found = dict.fromkeys(replace(present[part], **change) for change in changes)
    return [present | {part: config} for config in found]


class _Configured(torch.autograd.Function):
    """Attention by the portable kernels with given configurations."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, given: providers.Given, by_pass: dict[str, Any]) -> torch.Tensor:
        from fused_rope_attn.attention.portable.forward import ForwardCall

        case, tensors = given.case, problem.Tensors(q, k, v, *given.tables)
        options = {"softmax_scale": case.scale, "rotary_dim": case.rotary, "interleaved": case.interleaved}
        ctx.problem = problem.describe(tensors, causal=case.causal, **options).for_launch()
        ctx.config = by_pass["bwd"]
        o, lse = ForwardCall(ctx.problem, tensors, by_pass["fwd"])(tensors)[:2]
        ctx.save_for_backward(o, lse, *tensors[:5])
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        from fused_rope_attn.attention.portable.backward import backward_call

        o, lse, *tensors = ctx.saved_tensors
        given = (do, o, lse, *problem.Tensors(*tensors))
        return (*backward_call(ctx.problem, given, ctx.config)(given)[:3], None, None)


def named(config: Config) -> str:
    """Return a name like ``128x64 w8 s3 tma 8MB`` (backward: dkdv tile / dq tile)."""
    tiles = [config.tile] if isinstance(config, configs.ForwardConfig) else [config.dkdv, config.dq]
    text = " / ".join(
        f"{t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages}" + (f" r{t.max_registers}" if t.max_registers else "")
        for t in tiles
    )
    return text + " tma" * config.tma + (f" {config.section_bytes >> 20}MB" if config.section_bytes else "")


def candidates(case: cases.BenchCase) -> dict[str, providers.AttentionProvider]:
    """Return the configurations of a case as providers, that of the table as ours."""
    found: dict[str, providers.AttentionProvider] = {}
    for by_pass in grid(case, arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))):
        name = named(by_pass[case.groups[-2]]) + ("" if found else f" {PRESENT}")
        role = "rival" if found else "ours"
        found[name] = providers.AttentionProvider(name, name, role, run=functools.partial(_run, by_pass))
    return found


def _run(by_pass: dict[str, Config], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: providers.Given) -> Any:
    return _Configured.apply(q, k, v, given, by_pass)


class TilesTrial(AttentionTrial):
    """One pass of one case, by one strategy, as CUDA graphs: calls are prepared anew each time."""

    def modes(self) -> tuple[str, ...]:
        return ("graph",)

    def default_passes(self, mode: str) -> tuple[str, ...]:
        return (self.case.groups[-2],)


TILES = replace(
    ATTENTION,
    name="tune attention",
    description="Time configurations of the portable attention kernels.",
    cases=tuple(
        replace(case, name=f"{case.name}-{part}-{strategy}", groups=(*case.groups, part, strategy))
        for case in cases.PLAIN
        for part in ("fwd", "bwd")
        for strategy in ("prepass", "inline")
    ),
    trial=TilesTrial,
    table=candidates,
    default_cases="table+prepass",
    provider_groups={},
    passes=("fwd",),
    modes=("graph",),
    round_ms=5.0,
    draw=None,
)


# Generation

# block_n x warps x stages x programs per multiprocessor that are tried without --configs.
_DECODE = (
    "64x4x4x2,64x4x3x2,64x4x3x3r168,32x4x4x3r168,32x4x6x2,32x4x4x4r128,128x4x3x1,128x8x3x1,128x8x2x2r128,"
    "64x8x4x2r128,64x8x3x2r128,64x8x6x1,32x2x6x4,16x2x6x5r192"
)


def decode_config(text: str, base: decode_configs.DecodeConfig) -> decode_configs.DecodeConfig:
    """Parse ``block_n x warps x stages x programs per multiprocessor[rREGISTERS][lLEAST_TILES]``: ``64x4x4x2r168``.

    Other fields are as in ``base``. ValueError for other texts.
    """
    rest, least = text.split("l") if "l" in text else (text, base.least_tiles)
    rest, registers = rest.split("r") if "r" in rest else (rest, None)
    try:
        block_n, num_warps, num_stages, programs = map(int, rest.split("x"))
        sizes = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, "programs_per_sm": programs}
        registers = None if registers is None else int(registers)
        return replace(base, **sizes, least_tiles=int(least), max_registers=registers)
    except ValueError:
        raise ValueError(f"a configuration looks like 64x4x4x2, 64x4x4x3r168 or 64x4x4x2l4, not {text!r}") from None


def steps(texts: Sequence[str], raw: bool) -> dict[str, Any]:
    """Return configurations of the generation kernel as providers, that of the table first, and the copy."""
    ours = DECODE_PROVIDERS[RAW if raw else OURS]
    found: dict[str, Any] = {PRESENT: replace(ours, name=PRESENT, label=PRESENT)}
    for text in texts:
        decode_config(text, decode_configs.decode("sm_90", 2, 128, True))  # raises for a wrong text
        found[text] = replace(ours, name=text, label=text, role="rival", make=_configured(ours.make, text, raw))
    return found | {COPY: DECODE_PROVIDERS[COPY]}


def _configured(make: Callable[[Step], Run], text: str, raw: bool) -> Callable[[Step], Run]:
    """Return what makes the step with another configuration."""

    def configured(step: Step) -> Run:
        arch, run = arch_of(step.q.device), make(step)
        present = decode_configs.decode(arch, step.q.element_size(), step.q.shape[3], not raw)
        config = decode_config(text, present)

        def step_once() -> torch.Tensor:
            with planning.configured(config):
                return run()

        return step_once

    return configured


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", default=_DECODE, metavar="TEXTS", help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="keys that are rotated in the loop")


_chosen: dict[str, Any] = {}  # the providers of the command that runs


def _sweep_adapt(cases: list[Any], options: Options, args: argparse.Namespace) -> list[Any]:
    options.modes = options.modes or ("graph",)
    _chosen.clear()
    _chosen.update(steps(words(args.configs), args.raw))
    return cases


SWEEP = replace(
    DECODE,
    name="tune decode",
    description="Time configurations of the generation kernel.",
    table=lambda case: _chosen,
    always=(),
    arguments=_sweep_arguments,
    adapt=_sweep_adapt,
)
