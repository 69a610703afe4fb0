"""``python -m bench [attention]`` and ``python -m bench norm``: a case's tensors, a provider on them, and the trial."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baselines.base import dtype_name
from bench.attention import cases, providers
from bench.attention.cases import INTERVALS, MASKS, BenchCase
from bench.attention.providers import AttentionProvider, Given
from bench.gate import OF_WEIGHTS, Gate, Verdict
from bench.load import LoadClock, Nvml
from bench.report import Row
from bench.suite import Options, Suite, Times, Trial
from bench.timing import GpuClock
from verification import testing


class Problem:
    """The tensors of a case in every form, made once.

    dense: (B, H, N, D). packed: (T, H, D). padded: (B, H, longest, D), where every sequence is a batch entry that is
    padded on the right.
    """

    def __init__(self, case: testing.Case, device: torch.device):
        self.case, self.device = case, device
        self.inputs = testing.make_inputs(case, device)
        bounds = case.intervals(case.len_k) if callable(case.intervals) else ()
        for position in bounds[2:]:  # of tokens of a tree
            self.inputs = self.inputs._replace(cos=self.inputs.cos[position[0]], sin=self.inputs.sin[position[0]])
        self._forms: dict[str, list[Tensor]] = {}
        self.lengths = [n for n, _ in case.seqlens or ()]
        self.longest = max(self.lengths, default=0)
        counts = torch.tensor(self.lengths, dtype=torch.int64)
        self.ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        self.exists = (torch.arange(self.longest) < counts[:, None]).to(device)  # (sequences, longest)
        self.position = torch.cat([torch.arange(n) for n in self.lengths] or [torch.arange(case.len_k)]).to(device)

    def tensors(self, form: str) -> list[Tensor]:
        """Return q, k, v and do."""
        x = self.inputs
        if form not in self._forms:
            given = [x.q, x.k, x.v, x.do]
            if form != "dense":
                given = [t[0].transpose(0, 1) for t in given]
            if form == "padded":
                shape = self.exists.shape
                padded = [t.new_zeros(*shape, *t.shape[1:]).index_put_((self.exists,), t) for t in given]
                given = [t.transpose(1, 2) for t in padded]
            self._forms[form] = given
        return self._forms[form]

    def as_case(self, x: Tensor, form: str) -> Tensor:
        """Return an output or a gradient as the case has it: (B, H, N, D)."""
        if form == "padded":
            x = x.transpose(1, 2)[self.exists]
        return x if form == "dense" else x.transpose(0, 1)[None]


def visited(starts: Tensor, ends: Tensor) -> float:
    """Return the blocks of 128 keys that rows of a tile of 128 see, over those of causal attention. (1, N) each."""
    first = torch.arange(0, starts.shape[1], 128)[:, None]
    sees = (starts < first + 128) & (ends > first) & (starts < ends)
    return 2 * sum(int(block.any(1).sum()) for block in sees.split(128, 1)) / (len(first) * (len(first) + 1))


def corope_results(inputs: testing.Inputs, case: testing.Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return outputs and gradients of Co-RoPE by its definition, in float64 or in the dtype of the inputs."""
    q, k, v, do = (x.to(dtype or x.dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = providers.corope_definition(*leaves)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, do))))


# By the kind of a case; calls with masks and of Co-RoPE take milliseconds, so that eager calls measure the GPU.
_MODES = {"plain": ("graph",), "host": ("host",), "norm": ("graph",), "unsplit": ("graph",)}


class AttentionTrial(Trial):
    """One case of any kind."""

    def open(self) -> None:
        case = self.case
        self.problem = Problem(case.case, self.clock.device)
        heads = None
        if case.kind == "corope":  # its definition takes long: one group of heads
            heads = [(case.case.batch - 1, case.case.heads_kv - 1)]
        reference = corope_results if case.kind == "corope" else testing.run_reference
        self.gate = Gate(case.case, self.problem.inputs, heads=heads, reference=reference)
        self._given: dict[str, Given] = {}  # by provider, because FlexAttention's masks are made once for each tensor
        self.default_modes = _MODES.get(case.kind, ("eager",))
        if "host" in self.modes():
            self.default_passes = ("fwd", "fwd_grad", "both")

    def modes(self) -> tuple[str, ...]:
        """Time the case of host time on the host, and others on the host only where nothing else was asked for."""
        asked = super().modes()
        of_host = self.case.kind == "host"
        return tuple(mode for mode in asked if (mode == "host") == of_host) or asked

    def unsupported(self, provider: AttentionProvider) -> str | None:
        return provider.unsupported(self.case.case)

    def _prepared(self, provider: AttentionProvider) -> Given:
        """Return the arguments of a provider in addition to q, k and v."""
        problem, case = self.problem, replace(self.problem.case, **provider.variant)
        cos, sin = problem.inputs.cos, problem.inputs.sin
        if provider.form == "packed" and not provider.ours:  # these rotate each token by its own row
            cos, sin = cos[problem.position], sin[problem.position]
        masks = testing.masks_of(case, problem.device) if provider.form == "dense" else {}
        # Leave defaults out, because host time is that of a call as a user writes it.
        found = {name: value for name, value in masks.items() if value is not None and (name != "softcap" or value)}
        found |= testing.norms_of(case, problem.device)
        weights = {name: found.pop(name) for name in ("q_norm", "k_norm") if name in found}
        tables = provider.prepare(cos, sin, case.dtype)
        return Given(case, tables, {**found, **provider.options}, weights, problem.ends, problem.longest)

    def call(self, provider: AttentionProvider, part: str) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
        if provider.name not in self._given:
            self._given[provider.name] = self._prepared(provider)
        given = self._given[provider.name]

        def run(q: Tensor, k: Tensor, v: Tensor, *of_heads: Tensor) -> Tensor:
            own = given._replace(weights=dict(zip(given.weights, of_heads))) if of_heads else given
            return provider.run(q, k, v, own)

        q, k, v, do = self.problem.tensors(provider.form)
        if provider.in_place:
            q, k = q.clone(), k.clone()
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *given.weights.values())]
        return run, leaves, self.gate.do if part == "gate" and provider.form == "dense" else do

    def judge(self, provider: AttentionProvider, out: Tensor, grads: Sequence[Tensor]) -> Verdict:
        x, rows = self.problem.inputs, (self.problem.as_case(y, provider.form) for y in (out.detach(), *grads[:3]))
        found = dict(zip(("o", "dq", "dk", "dv"), rows))
        if provider.role == "ceiling":  # no attention: q, and the gradient as it came
            right = torch.equal(found.pop("o"), x.q) and all(torch.equal(grad, x.do) for grad in found.values())
            return Verdict() if right else Verdict("failed", detail="must return q, and do as every gradient")
        tables = "none" if not provider.rotates else "half" if provider.half_tables else "float32"
        found |= dict(zip(OF_WEIGHTS, grads[3:]))
        return self.gate.judge(found, tables, case=self._given[provider.name].case, forgiving=not provider.ours)

    def gated(self) -> None:
        self.gate.release()

    def fields(self) -> Row:
        names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim", "causal")
        row = {"family": self.case.family, "dtype": dtype_name(self.case.case.dtype)}
        if self.case.kind in INTERVALS:
            row["visited"] = visited(*self.case.case.intervals(self.case.case.len_k)[:2])  # type: ignore[operator]
        return row | {name: getattr(self.case.case, name) for name in names}

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Return TFLOP/s, where no mask hides some of the work."""
        if mode == "host" or self.case.kind in (*MASKS, *INTERVALS, "corope"):
            return {}
        flops = self.case.flops(part)
        return {name: {"tflops": flops / found.quantiles(0.5)[0] * 1e-9} for name, found in measured.items()}


# The suites

# Under load ours and the strongest of any case, because a provider costs some seconds at each case.
LOAD_USUAL = ("fused", "bare_fused", "liger_cudnn", "liger_fa3", "liger_fa4", "bare_cudnn", "bare_fa3", "bare_fa4")


def _adapt(chosen: list[BenchCase], options: Options, args: argparse.Namespace) -> list[BenchCase]:
    """Choose cases and providers by the mode where no option does."""
    modes = options.modes or ()
    if "load" in modes and len(modes) > 1:
        raise ValueError("--mode load has a clock of its own: it takes no other mode with it")
    if modes == ("load",) and not args.providers:
        args.providers = ",".join(LOAD_USUAL)
    if not args.cases and modes:
        kinds = {mode == "host" for mode in modes}  # the case of host time is for that mode
        chosen = [case for case in chosen if (case.kind == "host") in kinds]
    return chosen


def clock(device: torch.device, options: Options) -> GpuClock | LoadClock:
    """Return the clock of a mode. RuntimeError where this machine lacks what it needs."""
    return LoadClock(device, Nvml(device)) if options.modes == ("load",) else GpuClock(device)


ATTENTION = Suite(
    name="attention",
    description="Time rope_attention and every rival on equal inputs.",
    cases=cases.CASES,
    trial=AttentionTrial,
    table=lambda case: providers.table(case.kind),
    default_cases="table,host",
    passes=("fwd", "fwd_grad", "bwd", "both"),
    modes=("eager", "graph", "host", "load"),
    round_ms=20.0,
    adapt=_adapt,
    clock=clock,
)
NORM = Suite(
    name="norm",
    description="Time attention with norms of q and k, inside and outside of it.",
    cases=cases.NORMED,
    trial=AttentionTrial,
    table=lambda case: providers.table(case.kind),
)
