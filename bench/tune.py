"""``python -m bench tune attention`` and ``tune decode``: time configurations of our kernels on the card they are for.

Each candidate is a provider of a suite: it is held to float64, then timed in interleaved rounds with the configuration
that the committed table has now. Candidates of the portable attention kernels change one tile; the tiles of the two
backward kernels can be combined, because their times add up. A person writes the best into ``configs.py``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bench import command
from bench.decode.providers import COPY, OURS, RAW
from bench.decode.providers import PROVIDERS as DECODE_PROVIDERS
from bench.decode.suite import DECODE, DecodeTrial
from bench.gate import Gate
from bench.names import words
from bench.suite import Entry, Options, Provider, Suite, Trial
from fused_rope_attn import testing
from fused_rope_attn.attention import configs, problem
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.generation import configs as decode_configs
from fused_rope_attn.generation import planning
from fused_rope_attn.runtime import device

Config = configs.ForwardConfig | configs.BackwardConfig
# Batch, query heads and length that represent a bucket; every one fills a large card.
SHAPES = {"tiny": (4, 16, 512), "short": (4, 16, 1024), "medium": (2, 32, 4096), "long": (1, 32, 16384)}
_SECTIONS = (0, 8 << 20, 24 << 20)
PRESENT = "(table)"  # the configuration that the committed table has


def main(argv: list[str]) -> int:
    """Tune. Exit status as of every suite."""
    suites = {"attention": POINTS, "decode": SWEEP}
    if not argv or argv[0] not in suites:
        return command.refuse("tune", f"takes {' or '.join(suites)} first; each has --help")
    return command.main(suites[argv[0]], argv[1:])


def arch_of(where: torch.device) -> str:
    """Return the architecture to tune, without a GPU the interpreter's."""
    return configs.family(device.arch(where)) or "interpreter"


@dataclass(frozen=True, kw_only=True)
class Candidate(Provider):
    """A configuration as a provider. ``config`` is a ``Config``, or for generation (raw keys, text)."""

    config: Any


# Attention


@dataclass(frozen=True)
class Point:
    """The key of a row of the portable table, with a shape to measure."""

    part: str  # "fwd" or "bwd"
    head_dim: int
    causal: bool
    bucket: str
    gqa: bool
    strategy: str
    dtype: torch.dtype

    @property
    def case(self) -> testing.Case:
        batch, heads, length = SHAPES[self.bucket]
        heads_kv = heads // 4 if self.gqa else heads
        return testing.Case(batch, heads, heads_kv, length, length, self.head_dim, causal=self.causal, dtype=self.dtype)

    @property
    def name(self) -> str:
        return f"{self.part}-{self.strategy}-{self.bucket}"

    @property
    def shape(self) -> str:
        return self.case.name

    @property
    def groups(self) -> tuple[str, ...]:
        gqa, causal = "gqa" if self.gqa else "mha", "causal" if self.causal else "full"
        return (self.part, self.strategy, self.bucket, f"d{self.head_dim}", gqa, causal)

    def present(self, arch: str) -> Config:
        """Return what the committed table holds."""
        find = portable.forward if self.part == "fwd" else portable.backward
        return find(arch, self.dtype.itemsize, self.head_dim, self.strategy, self.causal, self.bucket, self.gqa)


def candidate(config: Config, present: Config) -> Candidate:
    """Return a configuration as a provider, like ``128x64 w8 s3 tma 8MB`` (backward: dkdv tile / dq tile)."""
    tiles = [config.tile] if isinstance(config, configs.ForwardConfig) else [config.dkdv, config.dq]
    text = " / ".join(
        f"{t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages}" + (f" r{t.max_registers}" if t.max_registers else "")
        for t in tiles
    )
    text += " tma" * config.tma + (f" {config.section_bytes >> 20}MB" if config.section_bytes else "")
    label = f"{text} {PRESENT}" if config == present else text
    return Candidate(label, label, "ours" if config == present else "rival", config=config)


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


def kernels(point: Point) -> tuple[str, ...]:
    """Return the tiles that a configuration of this pass holds."""
    return ("tile",) if point.part == "fwd" else ("dkdv", "dq")


def grid(point: Point, arch: str) -> list[Config]:
    """Return the present configuration first, then those with another tile of one kernel, TMA, or size of sections."""
    present = point.present(arch)
    tma = (False, True) if point.strategy == "prepass" and arch in ("sm_90", "sm_100", "sm_120") else (False,)
    found = [
        replace(present, **{kernel: tile}, tma=flag)
        for kernel in kernels(point)
        for tile in tile_grid(point.head_dim, point.dtype.itemsize, kernel)
        for flag in tma
    ]
    sections = [replace(present, section_bytes=size) for size in _SECTIONS]
    return list(dict.fromkeys([present, *sections, *found]))


class PointTrial(Trial):
    """One point; its providers are candidates."""

    case: Point
    default_modes = ("eager",)

    def __init__(self, case: Point, providers: Sequence[Candidate], clock: Any, options: Options) -> None:
        super().__init__(case, providers, clock, options)
        c = case.case
        self._inputs = testing.make_inputs(c, clock.device)
        self._gate = Gate(c, self._inputs)
        self._tensors = problem.Tensors(*self._inputs[:5])
        options_ = {"softmax_scale": c.scale, "rotary_dim": c.rotary, "interleaved": c.interleaved}
        self._problem = problem.describe(self._tensors, causal=c.causal, **options_).for_launch()
        if case.part == "bwd":
            self._o, self._lse = self._forward(replace(case, part="fwd").present(arch_of(clock.device)))

    def _forward(self, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from fused_rope_attn.attention.portable.forward import ForwardCall

        return ForwardCall(self._problem, self._tensors, config)(self._tensors)[:2]

    def default_passes(self, mode: str) -> tuple[str, ...]:
        return (self.case.part,)

    def call(self, config: Config) -> Callable[[], Any]:
        """Return the function that is timed."""
        from fused_rope_attn.attention.portable.backward import backward_call
        from fused_rope_attn.attention.portable.forward import ForwardCall

        if self.case.part == "fwd":
            forward = ForwardCall(self._problem, self._tensors, config)
            return lambda: forward(self._tensors)[:2]
        given = (self._inputs.do, self._o, self._lse, *self._tensors)
        backward = backward_call(self._problem, given, config)
        return lambda: backward(given)[:3]

    def enter(self, provider: Candidate) -> Entry:
        call = self.call(provider.config)
        names = ("o",) if self.case.part == "fwd" else ("dq", "dk", "dv")
        verdict = self._gate.judge(dict(zip(names, call())))
        facts = verdict.fields() | {"config": asdict(provider.config)}
        return Entry(provider, verdict, lambda part: call, facts)


def points() -> Iterator[Point]:
    """Yield every point of the tables."""
    heads = (64, 128, 256), (True, False), SHAPES, (False, True), ("prepass", "inline"), (torch.bfloat16, torch.float32)
    for axes in itertools.product(("fwd", "bwd"), *heads):
        yield Point(*axes)


def point_table(point: Point) -> dict[str, Candidate]:
    """Return the candidates of a point by name."""
    arch = arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = [candidate(config, point.present(arch)) for config in grid(point, arch)]
    return {each.name: each for each in found}


POINTS = Suite(
    name="tune attention",
    description="Time configurations of the portable attention kernels.",
    cases=tuple(points()),
    trial=PointTrial,
    table=point_table,
    default_cases="causal+mha+d64+bf16,causal+mha+d128+bf16",
    passes=("fwd",),
    modes=("eager",),
    round_ms=5.0,
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


class SweepTrial(DecodeTrial):
    """One case of a step of generation; providers are candidates, and the copy as the ceiling."""

    def unsupported(self, provider: Any) -> str | None:
        return None

    def enter(self, provider: Any) -> Entry:
        if not isinstance(provider, Candidate):
            return super().enter(provider)
        raw, text = provider.config
        arch = configs.family(device.arch(self.clock.device))
        present = decode_configs.decode(arch, self.case.dtype.itemsize, self.case.head_dim, not raw)
        config = present if text == PRESENT else decode_config(text, present)

        @contextmanager
        def active() -> Iterator[None]:
            with torch.no_grad(), planning.configured(config):
                yield

        with active():
            entry = super().enter(DECODE_PROVIDERS[RAW if raw else OURS])
        facts = entry.facts | {"raw": raw, "config": asdict(config)}
        return replace(entry, provider=provider, facts=facts, active=active)


def candidates(texts: Sequence[str], raw: bool) -> dict[str, Any]:
    """Return configurations of the generation kernel as providers, that of the table first, and the copy."""
    found: dict[str, Any] = {}
    for text in dict.fromkeys((PRESENT, *texts)):
        if text != PRESENT:
            decode_config(text, decode_configs.decode("sm_90", 2, 128, True))  # raises for a wrong text
        found[text] = Candidate(text, text, "ours" if text == PRESENT else "rival", config=(raw, text))
    return found | {COPY: DECODE_PROVIDERS[COPY]}


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", default=_DECODE, metavar="TEXTS", help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="keys that are rotated in the loop")


_chosen: dict[str, Any] = {}  # the providers of the command that runs


def _sweep_adapt(cases: list[Any], options: Options, args: argparse.Namespace) -> list[Any]:
    options.modes = options.modes or ("graph",)
    _chosen.clear()
    _chosen.update(candidates(words(args.configs), args.raw))
    return cases


SWEEP = replace(
    DECODE,
    name="tune decode",
    description="Time configurations of the generation kernel.",
    trial=SweepTrial,
    table=lambda case: _chosen,
    always=(),
    arguments=_sweep_arguments,
    adapt=_sweep_adapt,
)
