"""``python -m bench tune attention`` and ``tune decode``: time configurations of our kernels on the card they are for.

Each candidate is a provider of a suite: it is held to float64, then timed in interleaved rounds with the configuration
that the committed table has now. A candidate says which fields it changes: ``block_n=32|64 num_warps=4|8`` are four of
them. One that does not fit the card fails, and says so.

The two kernels of the portable backward can be tuned one after the other, because their times add up. A person writes
the best configuration into ``configs.py``.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from bench import command
from bench.attention import cases, providers
from bench.attention import suite as attention
from bench.attention.problem import AttentionTrial
from bench.decode import providers as decode_providers
from bench.decode import suite as decode
from bench.suite import Suite, by_name
from fused_rope_attn.attention import configs, problem
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.attention.portable.backward import backward_call
from fused_rope_attn.attention.portable.forward import ForwardCall
from fused_rope_attn.generation import configs as decode_configs
from fused_rope_attn.generation import planning
from fused_rope_attn.runtime import device

PRESENT = "(table)"  # the configuration that the committed table has


def main(argv: list[str]) -> int:
    """Tune. Exit status as of every suite."""
    ours = {"decode": decode_providers.OURS, "decode-raw": decode_providers.RAW}
    parser = argparse.ArgumentParser("python -m bench tune", description=__doc__.split("\n\n")[1])
    parser.add_argument("suite", choices=("attention", *ours), help="the other options are those of the suite")
    text = "for example 'tile.block_m=64|128 tma=True'; --dry-run lists the candidates"
    parser.add_argument("--configs", nargs="+", required=True, metavar="FIELD=VALUE|VALUE", help=text)
    args, rest = parser.parse_known_args(argv)
    suite = steps(args.configs, ours[args.suite]) if args.suite in ours else tiles(args.configs)
    return command.main(suite, rest)


def changed(config: Any, text: str) -> Any:
    """Return a configuration with other values of some fields: ``tile.block_m=128 tma=True``. ValueError names them."""
    for word in text.split():
        path, _, value = word.partition("=")
        name, _, rest = path.partition(".")
        try:
            new = changed(getattr(config, name), f"{rest}={value}") if rest else ast.literal_eval(value)
            config = replace(config, **{name: new})
        except (AttributeError, SyntaxError, TypeError, ValueError):
            names = ", ".join(field.name for field in fields(config))
            raise ValueError(f"--configs takes FIELD=VALUE of {names}, not {word!r}") from None
    return config


def _family() -> str:
    """Return the architecture to tune, without a GPU the interpreter's."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return configs.family(device.arch(where)) or "interpreter"


def choices(provider: Callable[[str, str, Any], Any], present: Any, texts: Iterable[str]) -> dict[str, Any]:
    """Return ``provider(name, role, configuration)`` of the table's configuration as ours, then of each candidate."""
    found = [provider(PRESENT, "ours", present)]
    for text in texts:
        fields_of = [word.partition("=") for word in text.split()]
        values_of = [[f"{name}{sign}{value}" for value in values.split("|")] for name, sign, values in fields_of]
        for candidate in map(" ".join, itertools.product(*values_of)):
            found.append(provider(candidate, "rival", changed(present, candidate)))
    return by_name(found)


class _Configured(torch.autograd.Function):
    """Attention by the portable kernels with given configurations."""

    @staticmethod
    def forward(ctx: Any, by_pass: dict[str, Any], q: Any, k: Any, v: Any, given: providers.Given) -> torch.Tensor:
        case, tensors = given.case, problem.Tensors(q, k, v, *given.tables)
        options = {"softmax_scale": case.scale, "rotary_dim": case.rotary, "interleaved": case.interleaved}
        ctx.problem = problem.describe(tensors, causal=case.causal, **options).for_launch()
        ctx.config = by_pass["bwd"]
        o, lse = ForwardCall(ctx.problem, tensors, by_pass["fwd"])(tensors)[:2]
        ctx.save_for_backward(o, lse, *tensors[:5])
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        o, lse, *tensors = ctx.saved_tensors
        given = (do, o, lse, *problem.Tensors(*tensors))
        return (None, *backward_call(ctx.problem, given, ctx.config)(given)[:3], None)


def candidates(case: cases.BenchCase, texts: Iterable[str]) -> dict[str, providers.AttentionProvider]:
    """Return configurations of the pass and strategy of a case's groups as providers, that of the table as ours."""
    c, (part, strategy) = case.case, case.groups[-2:]
    key = _family(), c.dtype.itemsize, c.head_dim, strategy, c.causal, configs.bucket(c.len_k), c.heads_q != c.heads_kv
    present = {"fwd": portable.forward(*key), "bwd": portable.backward(*key)}

    def provider(name: str, role: str, config: Any) -> providers.AttentionProvider:
        run = partial(_Configured.apply, present | {part: config})
        return providers.AttentionProvider(name, name, role, run=run)

    return choices(provider, present[part], texts)


class TilesTrial(AttentionTrial):
    """One pass of one case, by one strategy: calls are prepared anew each time."""

    def default_passes(self, mode: str) -> tuple[str, ...]:
        return (self.case.groups[-2],)


def tiles(texts: Iterable[str]) -> Suite:
    """Return the suite of the portable attention kernels: a case for each pass and strategy of those of attention."""
    every = itertools.product(cases.PLAIN, ("fwd", "bwd"), ("prepass", "inline"))
    made = [replace(c, name=f"{c.name}-{part}-{by}", groups=(*c.groups, part, by)) for c, part, by in every]
    return replace(
        attention.ATTENTION,
        name="tune attention",
        cases=made,
        trial=TilesTrial,
        table=lambda case: candidates(case, texts),
        default_cases="table+fwd+prepass",
        passes=("fwd",),
        modes=("graph",),
        draw=None,
    )


def steps(texts: Iterable[str], name: str) -> Suite:
    """Return the suite of the generation kernel: the configurations of one of our providers, then the copy."""
    ours, copy = (decode_providers.PROVIDERS[each] for each in (name, decode_providers.COPY))

    def provider(text: str, role: str, config: decode_configs.DecodeConfig) -> decode_providers.DecodeProvider:
        make = planning.configured(config)
        return replace(ours, name=text, label=text, role=role, make=lambda step: make(ours.make(step)))

    def table(case: decode.DecodeCase) -> dict[str, Any]:
        present = decode_configs.decode(_family(), case.dtype.itemsize, case.head_dim, not ours.raw)
        return choices(provider, present, texts) | {copy.name: copy}

    return replace(decode.DECODE, name="tune decode", table=table, modes=("graph",))
