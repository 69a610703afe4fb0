"""``python -m bench tune attention`` and ``tune decode``: time configurations of our kernels on the card they are for.

Each candidate is a provider of a suite: it is held to float64, then timed in interleaved rounds with the configuration
that the committed table has now. A candidate says which fields it changes, for example ``tile.block_m=128 tma=True`` or
``block_n=32 num_stages=3``. The two kernels of the portable backward can be tuned one after the other, because their
times add up. A person writes the best into ``configs.py``.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from bench import command
from bench.attention import cases, providers
from bench.attention import suite as attention
from bench.attention.problem import AttentionTrial
from bench.decode.pages import Run, Step
from bench.decode.providers import COPY, OURS, RAW
from bench.decode.providers import PROVIDERS as DECODE_PROVIDERS
from bench.decode.suite import DECODE, DecodeTrial
from bench.names import words
from bench.suite import Suite
from fused_rope_attn.attention import configs, problem
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.generation import configs as decode_configs
from fused_rope_attn.generation import planning
from fused_rope_attn.runtime import device

PRESENT = "(table)"  # the configuration that the committed table has
# What is tried without --configs: tiles of every kernel of a pass; one that does not fit the card fails, and says so.
_KERNELS = {"fwd": ("tile",), "bwd": ("dkdv", "dq")}
_SIZES = {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)}
# block_n, warps, stages and programs per multiprocessor of the generation kernel.
_DECODE = (
    *((64, 4, 4, 2), (64, 4, 3, 2), (64, 8, 6, 1), (32, 4, 6, 2), (32, 2, 6, 4)),
    *((128, 4, 3, 1), (128, 8, 3, 1), (16, 2, 6, 5)),
)


def main(argv: list[str]) -> int:
    """Tune. Exit status as of every suite."""
    suites = {"attention": tiles, "decode": sweep}
    if not argv or argv[0] not in suites:
        return command.refuse("tune", f"takes {' or '.join(suites)} first; each has --help")
    # The providers of the suite depend on these options.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _arguments(parser)
    given, _ = parser.parse_known_args(argv[1:])
    return command.main(suites[argv[0]](words(given.configs), given.raw), argv[1:])


def _arguments(parser: argparse.ArgumentParser) -> None:
    text = "FIELD=VALUE with spaces between, several with commas between; fields of a tile as tile.block_m"
    parser.add_argument("--configs", default="", metavar="TEXTS", help=f"{text} (default: a grid)")
    parser.add_argument("--raw", action="store_true", help="of tune decode: keys that are rotated in the loop")


def changed(config: Any, text: str) -> Any:
    """Return a configuration with other values of some fields: ``tile.block_m=128 tma=True``. ValueError names them."""
    for word in text.split():
        path, _, value = word.partition("=")
        try:
            config = _with(config, path.split("."), ast.literal_eval(value))
        except (AttributeError, SyntaxError, TypeError, ValueError):
            names = ", ".join(field.name for field in fields(config))
            raise ValueError(f"--configs takes FIELD=VALUE of {names}, not {word!r}") from None
    return config


def _with(config: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return replace(config, **{head: _with(getattr(config, head), rest, value) if rest else value})


def arch() -> str:
    """Return the architecture to tune, without a GPU the interpreter's."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return configs.family(device.arch(where)) or "interpreter"


# Attention


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


def candidates(case: cases.BenchCase, texts: Sequence[str] = ()) -> dict[str, providers.AttentionProvider]:
    """Return configurations of the pass and strategy of a case's groups as providers, that of the table as ours."""
    c, (part, strategy) = case.case, case.groups[-2:]
    key = arch(), c.dtype.itemsize, c.head_dim, strategy, c.causal, configs.bucket(c.len_k), c.heads_q != c.heads_kv
    present = {"fwd": portable.forward(*key), "bwd": portable.backward(*key)}
    grid = [" ".join(f"{{0}}.{name}={x}" for name, x in zip(_SIZES, at)) for at in itertools.product(*_SIZES.values())]
    found = {PRESENT: _provider(PRESENT, "ours", present)}
    for text in texts or [tile.format(kernel) for kernel in _KERNELS[part] for tile in grid]:
        found[text] = _provider(text, "rival", present | {part: changed(present[part], text)})
    return found


def _provider(name: str, role: str, by_pass: dict[str, Any]) -> providers.AttentionProvider:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: providers.Given) -> torch.Tensor:
        return _Configured.apply(q, k, v, given, by_pass)

    return providers.AttentionProvider(name, name, role, run=run)


class TilesTrial(AttentionTrial):
    """One pass of one case, by one strategy, as CUDA graphs: calls are prepared anew each time."""

    def modes(self) -> tuple[str, ...]:
        return ("graph",)

    def default_passes(self, mode: str) -> tuple[str, ...]:
        return (self.case.groups[-2],)


def _tiles() -> Iterator[cases.BenchCase]:
    for case, part, strategy in itertools.product(cases.PLAIN, ("fwd", "bwd"), ("prepass", "inline")):
        yield replace(case, name=f"{case.name}-{part}-{strategy}", groups=(*case.groups, part, strategy))


def tiles(texts: Sequence[str] = (), raw: bool = False) -> Suite:
    """Return the suite of the portable attention kernels."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        attention.dtype_arguments(parser)
        _arguments(parser)

    return replace(
        attention.ATTENTION,
        name="tune attention",
        description="Time configurations of the portable attention kernels.",
        cases=tuple(_tiles()),
        trial=TilesTrial,
        table=lambda case: candidates(case, texts),
        default_cases="table+prepass",
        provider_groups={},
        passes=("fwd",),
        modes=("graph",),
        round_ms=5.0,
        arguments=arguments,
        draw=None,
    )


# Generation


def steps(case: Any, texts: Sequence[str] = (), raw: bool = False) -> dict[str, Any]:
    """Return configurations of the generation kernel as providers, that of the table first, and the copy."""
    ours = DECODE_PROVIDERS[RAW if raw else OURS]
    present = decode_configs.decode(arch(), case.dtype.itemsize, case.head_dim, not raw)
    names = ("block_n", "num_warps", "num_stages", "programs_per_sm")
    found: dict[str, Any] = {PRESENT: replace(ours, name=PRESENT, label=PRESENT)}
    for text in texts or [" ".join(f"{name}={value}" for name, value in zip(names, values)) for values in _DECODE]:
        make = _configured(ours.make, changed(present, text))
        found[text] = replace(ours, name=text, label=text, role="rival", make=make)
    return found | {COPY: DECODE_PROVIDERS[COPY]}


def _configured(make: Callable[[Step], Run], config: decode_configs.DecodeConfig) -> Callable[[Step], Run]:
    """Return what makes the step with another configuration."""

    def configured(step: Step) -> Run:
        run = make(step)

        def step_once() -> torch.Tensor:
            with planning.configured(config):
                return run()

        return step_once

    return configured


class StepsTrial(DecodeTrial):
    """One case, as CUDA graphs."""

    default_modes = ("graph",)


def sweep(texts: Sequence[str] = (), raw: bool = False) -> Suite:
    """Return the suite of the generation kernel."""
    return replace(
        DECODE,
        name="tune decode",
        description="Time configurations of the generation kernel.",
        trial=StepsTrial,
        table=lambda case: steps(case, texts, raw),
        always=(),
        modes=("graph",),
        arguments=_arguments,
    )
