"""``python -m bench host``: host time of eager calls on tensors so small that the GPU waits for the host.

Beside rope_attention stand PyTorch's own attentions, which do not rotate, and two autograd functions that compute
nothing: what they take is what autograd takes of any function with a backward of its own. One thread calls; calls come
in bursts that never wait for the device (``timing.GpuClock.host_sample``), and the providers of a round are shuffled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines import BASELINES, Baseline, attentions
from bench import command, report
from bench.attention.cases import HOST_CASE, BenchCase, with_dtype
from bench.attention.providers import OURS, Provider
from bench.attention.trial import ProblemTrial
from bench.gate import Verdict
from bench.names import DTYPES, words
from bench.report import Row, not_timed, speedup, table, timed
from bench.suite import Entry, Suite, Times, never_missing, pick, provider_table
from bench.tables import markdown, provenance
from bench.timing import quantile, ratio
from fused_rope_attn.testing import Case

MINE = "fused"
PASSES = {"fwd": "forward, no gradient", "fwd_grad": "forward with gradient", "both": "forward + backward"}


class _Nothing(torch.autograd.Function):
    """Returns q, and as the gradients of q, k and v that of its output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return do, do, do


class _NothingSaved(torch.autograd.Function):
    """The same, with q, k and v saved for the backward and taken from there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, _ = ctx.saved_tensors
        return do, do, do


@dataclass(frozen=True)
class Idle:
    """An autograd function that computes nothing, as a provider of attention."""

    name: str
    label: str
    function: type[torch.autograd.Function]
    rotates: bool = False
    in_place: bool = False
    half_tables: bool = False
    backward: bool = True
    pip: tuple[str, ...] = ()

    def missing(self) -> str | None:
        return never_missing()

    def unsupported(self, case: Case) -> str | None:
        if case.heads_q != case.heads_kv or case.len_q != case.len_k:
            return "its gradients have the shape of q: needs k and v of that shape"
        return None

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool) -> Tensor:
        return self.function.apply(q, k, v)


# The context that chooses PyTorch's backend costs host time itself: once with it in every call, as the other suites
# have it, and once with the choice made outside of what is timed.
CHOSEN_ONCE = "bare_cudnn_chosen"
_CUDNN_CHOSEN = replace(attentions.CUDNN, label="cuDNN, chosen once", attend=attentions.SDPA.attend)
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        OURS[MINE],
        Baseline("bare_sdpa", None, attentions.SDPA),
        Baseline(CHOSEN_ONCE, None, _CUDNN_CHOSEN),
        BASELINES["bare_cudnn"],
        Idle("nothing", "a function that does nothing", _Nothing),
        Idle("nothing_saved", "... and saves q, k, v", _NothingSaved),
    )
}


class HostTrial(ProblemTrial):
    """One problem."""

    def enter(self, provider: Provider) -> Entry:
        active: Callable[[], AbstractContextManager] = nullcontext
        if provider.name == CHOSEN_ONCE:
            active = _cudnn
        with active():
            entry = super().enter(provider) if not isinstance(provider, Idle) else self._enter_idle(provider)
        return replace(entry, active=active)

    def _enter_idle(self, provider: Idle) -> Entry:
        """Judged by what it should return, which is no attention."""
        x = self._inputs
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        o = provider.run(*leaves, None, True)
        gradients = torch.autograd.grad(o, leaves, x.do)
        same = torch.equal(o, x.q) and all(torch.equal(gradient, x.do) for gradient in gradients)
        verdict = Verdict() if same else Verdict("failed", detail="must return q, and do as every gradient")
        return Entry(provider, verdict, self.subject(provider).make)

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Quartiles of the bursts, in ms like every time of a row."""
        return {
            name: {"p25": quantile(found.samples, 0.25), "p75": quantile(found.samples, 0.75)}
            | self.plan(PROVIDERS[name])
            for name, found in measured.items()
        }


def _cudnn() -> AbstractContextManager:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


@dataclass
class Host(Suite):
    """``grads``: whether the gate looks at gradients."""

    providers: list[Provider]
    grads: bool = True

    command = "host"
    description = "Time the host in eager calls of tiny tensors; nobody is timed before float64 agrees."
    all_passes = tuple(PASSES)
    passes = tuple(PASSES)
    modes = ("host",)
    mode = "host"
    rounds = 25
    round_option = None

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        c = HOST_CASE.case
        shape = f"{c.batch},{c.heads_q},{c.heads_kv},{c.len_q},{c.head_dim}"
        add("--shape", default=shape, metavar="B,HQ,HKV,N,D", help="causal (default: %(default)s)")
        add("--providers", default="", metavar="NAMES", help="default: everybody; ours always runs")
        add("--dtype", choices=tuple(DTYPES), default="bf16")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Host, list[BenchCase]]:
        measured = pick(PROVIDERS, words(args.providers), always=(MINE,))
        return cls(measured, words(args.passes) != ["fwd"]), [with_dtype(case_of(args.shape), DTYPES[args.dtype])]

    def listing(self, cases: list[BenchCase]) -> str:
        return f"{report.table(['shape'], [[case.shape] for case in cases])}\n\n{provider_table(self.providers)}"

    def title(self, case: BenchCase) -> str:
        return case.shape

    def open(self, case: BenchCase, clock: Any) -> HostTrial:
        return HostTrial(self.providers, case, clock, grads=self.grads)

    def summary(self, rows: list[Row]) -> str:
        return summary(rows)


def case_of(shape: str) -> BenchCase:
    """The case of ``B,HQ,HKV,N,D``. ValueError where that is no shape."""
    sizes = words(shape)
    if len(sizes) != 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--shape takes five positive integers B,HQ,HKV,N,D, not {shape!r}")
    batch, heads_q, heads_kv, length, head_dim = map(int, sizes)
    if heads_q % heads_kv:
        raise ValueError(f"--shape must have HQ a multiple of HKV, not {heads_q} and {heads_kv}")
    return replace(HOST_CASE, case=Case(batch, heads_q, heads_kv, length, length, head_dim))


def summary(rows: list[Row]) -> str:
    """A line for each provider: µs of every pass with the quartiles of the bursts, and over them ours."""
    header, lines = ["host time, µs"], []
    parts = [part for part in PASSES if timed(rows, part)]
    for part in parts:
        header += [PASSES[part], "p25-p75", "theirs / ours"]
    for name in dict.fromkeys(row["provider"] for row in timed(rows)):
        found = {row["pass"]: row for row in timed(rows) if row["provider"] == name}
        line = [next(iter(found.values()))["label"]]
        for part in parts:
            row, mine = found.get(part), next((row for row in timed(rows, part) if row["provider"] == MINE), None)
            if row is None:
                line += ["-", "", ""]
                continue
            line += [f"{1e3 * row['ms']:.1f}", f"{1e3 * row['p25']:.1f}-{1e3 * row['p75']:.1f}"]
            line.append(_against(row, mine) if mine and name != MINE else "")
        lines.append(line)
    blocks = [f"{rows[0]['shape']}, eager calls, one thread"] if rows else []
    blocks.append(table(header, lines) if lines else "nothing was timed")
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows))])])


def results(rows: list[Row]) -> str:
    """The generated table of the documents. ValueError without times of ours."""
    found = {(row["provider"], row["pass"]): row for row in timed(rows)}
    if not any(name == MINE for name, _ in found):
        raise ValueError(f"no host time of {MINE}")
    parts = [part for part in PASSES if (MINE, part) in found]
    lines = []
    for name in PROVIDERS:
        here = [found.get((name, part)) for part in parts]
        if any(here):
            label = "`rope_attention`" if name == MINE else next(row["label"] for row in here if row)
            lines.append([label, *(_quartiles(row) for row in here)])
    header = [f"host time, µs (quartiles), at {rows[0]['shape']}", *(PASSES[part] for part in parts)]
    return f"{markdown(header, lines)}\n\nEager calls of one thread. {provenance(rows, 'cuDNN')}"


def _quartiles(row: Row | None) -> str:
    return "" if row is None else f"{1e3 * row['ms']:.1f} ({1e3 * row['p25']:.1f} to {1e3 * row['p75']:.1f})"


def _against(row: Row, mine: Row) -> str:
    """Their time over ours; to take longer than a function that computes nothing is no loss."""
    value = ratio(row["rounds"], mine["rounds"])
    return f"{value:.2f}x" if isinstance(PROVIDERS[row["provider"]], Idle) else speedup(value)


def main(argv: list[str]) -> int:
    return command.main(Host, argv)
