"""``python -m bench masks``: what windows, packed sequences, caps, sinks and lengths cost.

Three figures. window: the cost of a visited block beside full causal attention of the same call. packed: sequences of
mixed lengths packed, against the same batch padded and against a separate rotation + a variable-length attention.
overhead: every mask at a model's shape against plain causal attention.

As everywhere here: equal inputs, tables prepared before the clock runs, nobody timed before float64 agrees, rounds
interleaved in one process, losses printed like wins.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from baselines.masked import MASKED, MaskedAttention
from baselines.rotations import LIGER
from bench import report
from bench.environment import ROOT, card, environment
from bench.gate import Gate, Verdict
from bench.runner import _sentence, _status
from bench.timing import Options, interleave, quantile, ratio
from fused_rope_attn import testing
from fused_rope_attn.attention.configs import HopperBackwardConfig, HopperForwardConfig
from fused_rope_attn.attention.hopper import backward_kernel, tiles
from fused_rope_attn.testing import Case

RESULTS = ROOT / "bench" / "results"
FIGURES = ("window", "packed", "overhead")
# The bars: cost of a visited block over that of full causal attention, at most; padded over packed, at least.
BLOCK_BAR, PADDED_BAR = 1.3, 1.5
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Line:
    """One thing that is timed. ``form``: how the tensors of ``case`` are handed over, see ``Problem``; ``rival`` None:
    ours."""

    figure: str
    name: str
    label: str
    case: Case
    form: str = "dense"
    rival: MaskedAttention | None = None


def mixed_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """``count`` lengths, uniform between the two, both of which occur."""
    generator = random.Random(seed)
    middle = [generator.randint(shortest, longest) for _ in range(count - 2)]
    lengths = [shortest, longest, *middle]
    generator.shuffle(lengths)
    return tuple(lengths)


def window_lines(case: Case, left: int) -> list[Line]:
    """Ours with and without the window, then everybody who serves one."""
    windowed = replace(case, window=(left, 0))
    return [
        Line("window", "causal", "ours, full causal", case),
        Line("window", "window", "ours, window", windowed),
        *(Line("window", r.name, f"{LIGER.label} + {r.label}", windowed, rival=r) for r in MASKED if r.window),
    ]


def packed_lines(case: Case, lengths: tuple[int, ...]) -> list[Line]:
    """Ours packed and padded, on the right as trainers do and on the left, then everybody who takes packed ones."""
    total = sum(lengths)
    packed = replace(case, batch=1, len_q=total, len_k=total, seqlens=tuple((n, n) for n in lengths))
    return [
        Line("packed", "packed", "ours, packed", packed, "packed"),
        Line("packed", "padded", "ours, padded right, causal", packed, "right"),
        Line("packed", "kv_starts", "ours, padded left, kv_starts", packed, "left"),
        *(Line("packed", r.name, f"{LIGER.label} + {r.label}", packed, "packed", r) for r in MASKED if r.packed),
    ]


def overhead_lines(case: Case) -> list[Line]:
    """Masks that hide nothing, so that only their own cost shows."""
    everything = (case.len_k,) * case.batch
    changed = {
        "window": {"window": (case.len_k, 0)},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": True},
        "kv_lens": {"kv_lens": everything},
        "kv_starts": {"kv_starts": (0,) * case.batch},
    }
    plain = Line("overhead", "causal", "ours, causal", case)
    return [plain, *(Line("overhead", n, f"ours, {n}", replace(case, **c)) for n, c in changed.items())]


def lines(figures: tuple[str, ...] = FIGURES) -> list[Line]:
    """The lines of the figures, at the sizes that the results are stated for; bfloat16."""
    llama = Case(2, 32, 8, 4096, 4096, 128, dtype=_BF16)
    found = {
        "window": window_lines(replace(llama, batch=1, len_q=32768, len_k=32768), 1024),
        "packed": packed_lines(llama, mixed_lengths(64, 16, 4096)),
        "overhead": overhead_lines(llama),
    }
    return [line for figure in figures for line in found[figure]]


def shape(case: Case) -> str:
    """The case's name; of many packed sequences their number and extremes."""
    if case.seqlens is None:
        return case.name
    lengths = [n for n, _ in case.seqlens]
    return f"{replace(case, seqlens=None).name} packed={len(lengths)}x{min(lengths)}..{max(lengths)}"


def visited_scores(case: Case, block_m: int, block_n: int) -> int:
    """Scores of one head in the blocks that ``kernels.masks.key_range`` visits: causal, with or without a window."""
    left = case.len_k if case.window is None else case.window[0]
    offset = case.len_k - case.len_q
    total = 0
    for start in range(0, case.len_q, block_m):
        first, last = max(0, start + offset - left) // block_n, min(case.len_k, max(0, start + block_m + offset))
        total += max(0, -(-last // block_n) - first)
    return total * block_m * block_n


def visited_by_keys(case: Case, block_m: int, block_n: int) -> int:
    """The same for key blocks that visit query blocks, as ``kernels.masks.query_range`` has it."""
    left = case.len_k + case.len_q if case.window is None else case.window[0]
    offset = case.len_k - case.len_q
    # No query sees the keys before the window of the first one.
    least = max(0, offset - left)
    blocks, total = -(-case.len_q // block_m), 0
    for start in range(max(0, least // block_n * block_n), case.len_k, block_n):
        first = min(blocks, max(0, start - offset) // block_m)
        last = min(blocks, -(-max(0, start + block_n + left - offset) // block_m))
        total += max(0, last - first)
    return total * block_m * block_n


def ran(plan: Any, part: str) -> str:
    """The backend of a pass, which ``Plan.backend`` says of the forward pass alone."""
    config = plan.forward if part == "fwd" else plan.backward
    if config is None:
        return "reference"
    return "hopper" if isinstance(config, (HopperForwardConfig, HopperBackwardConfig)) else "triton"


def visited(case: Case, part: str, plan: Any) -> int | None:
    """Visited scores of a pass in the tiles of its plan, as its kernels visit them; None for the reference.

    The portable backward pass walks through the scores twice, that of sm_90 once.
    """
    backend = ran(plan, part)
    if backend == "reference":
        return None
    if part == "fwd":
        if backend == "hopper":
            return visited_scores(case, tiles.BLOCK_M, plan.forward.block_n)
        return visited_scores(case, plan.forward.tile.block_m, plan.forward.tile.block_n)
    if backend == "hopper":
        return visited_by_keys(case, backward_kernel.BLOCK_M.value, backward_kernel.BLOCK_N.value)
    dkdv, dq = plan.backward.dkdv, plan.backward.dq
    return visited_by_keys(case, dkdv.block_m, dkdv.block_n) + visited_scores(case, dq.block_m, dq.block_n)


class Problem:
    """One case's tensors in every form, made once.

    dense: as the case says. packed: (T, H, D). right, left: (B, H, longest, D), every sequence a batch entry that is
    padded on that side.
    """

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.inputs = testing.make_inputs(case, device)
        self._forms: dict[str, list[Tensor]] = {}
        self.lengths = [n for n, _ in case.seqlens or ()]
        self.longest = max(self.lengths, default=0)
        counts = torch.tensor(self.lengths, dtype=torch.int64)
        self.ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        self.starts = (self.longest - counts).int().to(device)
        self.position = torch.cat([torch.arange(n) for n in self.lengths] or [torch.arange(case.len_k)]).to(device)

    def _rows(self, form: str) -> Tensor:
        """Where each packed token lies among the rows of the padded batch."""
        index = torch.arange(len(self.lengths), device=self.device)
        counts = torch.tensor(self.lengths, device=self.device)
        begin = index * self.longest + (self.starts if form == "left" else 0)
        return begin.repeat_interleave(counts) + self.position

    def tensors(self, form: str) -> list[Tensor]:
        """q, k, v and do."""
        x = self.inputs
        if form not in self._forms:
            given = [x.q, x.k, x.v, x.do]
            if form != "dense":
                given = [t[0].transpose(0, 1) for t in given]
            if form in ("right", "left"):
                rows, count = self._rows(form), len(self.lengths) * self.longest
                padded = [t.new_zeros(count, *t.shape[1:]).index_copy_(0, rows, t) for t in given]
                given = [t.unflatten(0, (-1, self.longest)).transpose(1, 2) for t in padded]
            self._forms[form] = given
        return self._forms[form]

    def as_case(self, x: Tensor, form: str) -> Tensor:
        """An output or gradient as the case has it: (B, H, N, D)."""
        if form in ("right", "left"):
            x = x.transpose(1, 2).flatten(0, 1)[self._rows(form)]
        return x if form == "dense" else x.transpose(0, 1)[None]


class Subject:
    """One line on its problem; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, line: Line, problem: Problem, backend: str):
        self.line, self.problem, self._backend = line, problem, backend
        self._masks = testing.masks_of(line.case, problem.device)
        if line.rival is not None:
            x = problem.inputs
            table = [t[problem.position] for t in (x.cos, x.sin)]
            self._tables = LIGER.prepare(*table, line.case.dtype)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        line, problem, x = self.line, self.problem, self.problem.inputs
        if line.rival is not None:
            return self._rival(q, k, v)
        options: dict[str, Any] = {"backend": self._backend}
        if line.form == "packed":
            ends, longest = problem.ends, problem.longest
            return fused_rope_attn.rope_attention_varlen(
                q, k, v, x.cos, x.sin, ends, ends, longest, longest, True, **options
            )  # fmt: skip
        options |= {"kv_starts": problem.starts} if line.form == "left" else {}
        options |= self._masks | {"sinks": sinks} if line.form == "dense" else {}
        return fused_rope_attn.rope_attention(q, k, v, x.cos, x.sin, line.case.causal, **options)

    def _rival(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        line, problem = self.line, self.problem
        if line.form == "packed":
            q4, k4 = LIGER.rotate(*(t.transpose(0, 1)[None] for t in (q, k)), self._tables)
            q, k = (t[0].transpose(0, 1) for t in (q4, k4))
            return line.rival.packed(q, k, v, problem.ends, problem.longest)
        q, k = LIGER.rotate(q, k, self._tables)
        return line.rival.window(q, k, v, line.case.window[0])

    def _leaves(self) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v as leaves, and the sinks. The rivals' rotation works in place and gets copies."""
        q, k, v, _ = self.problem.tensors(self.line.form)
        qk = [x.detach().clone() if self.line.rival is not None else x.detach() for x in (q, k)]
        sinks = self._masks["sinks"]
        sinks = None if sinks is None else sinks.detach().requires_grad_()
        return [x.requires_grad_() for x in (*qk, v.detach())], sinks

    def once(self) -> dict[str, Tensor]:
        """o, dq, dk, dv as the case has them."""
        leaves, sinks = self._leaves()
        o = self._run(*leaves, sinks)
        gradients = torch.autograd.grad(o, leaves, self.problem.tensors(self.line.form)[3])
        names = zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients))
        return {name: self.problem.as_case(x, self.line.form) for name, x in names}

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd`` runs without gradients, ``bwd`` again and again on one graph."""
        leaves, sinks = self._leaves()
        if part == "fwd":

            def forward() -> Tensor:
                with torch.no_grad():
                    return self._run(*leaves, sinks)

            return forward
        do = self.problem.tensors(self.line.form)[3]
        o = self._run(*leaves, sinks)
        wanted = leaves if sinks is None else [*leaves, sinks]
        return lambda: torch.autograd.grad(o, wanted, do, retain_graph=True)

    def plan(self) -> Any:
        """What ours runs."""
        line, backend = self.line, self._backend
        q, k, v, _ = self.problem.tensors(line.form)
        if line.form == "packed":
            x, ends, longest = self.problem.inputs, self.problem.ends, self.problem.longest
            return fused_rope_attn.plan_varlen(
                q, k, v, x.cos, x.sin, ends, ends, longest, longest, True, backend=backend
            )  # fmt: skip
        masks = self._masks if line.form == "dense" else {}
        masks = masks | ({"kv_starts": self.problem.starts} if line.form == "left" else {})
        x = self.problem.inputs
        return fused_rope_attn.plan(q, k, v, x.cos, x.sin, line.case.causal, **masks, backend=backend)


@dataclass
class Run:
    """Everything that outlasts a figure; ``clock`` as in ``runner.Clock``, ``backend`` ours. Calls are eager: they take
    milliseconds, and the flush before each hides the host's share."""

    options: Options
    clock: Any
    environment: dict[str, Any]
    backend: str = "auto"
    progress: Callable[[str], None] = lambda message: None
    not_run: list[str] = field(default_factory=list)

    def rows(self, chosen: list[Line]) -> Iterator[list[dict[str, Any]]]:
        """Rows of one figure after the other; at the deadline it stops and notes what is left."""
        for figure in dict.fromkeys(line.figure for line in chosen):
            if self.options.out_of_time():
                self.not_run.append(figure)
                continue
            yield self._figure([line for line in chosen if line.figure == figure])

    def _figure(self, chosen: list[Line]) -> list[dict[str, Any]]:
        problems = {line.case: None for line in chosen}
        problems = {case: Problem(case, self.clock.device) for case in problems}
        gates = {
            case: Gate(case, p.inputs, grads=True, heads=[(0, 0)] if case.sinks else None)
            for case, p in problems.items()
        }
        rows, subjects, verdicts = [], {}, {}
        for line in chosen:
            reason = line.rival and (LIGER.missing() or line.rival.missing())
            if reason:
                rows.append(self._row(line, None, "missing", reason))
                continue
            self.progress(f"{line.figure}: gate {line.label}")
            try:
                subject = Subject(line, problems[line.case], self.backend)
                verdict = gates[line.case].judge(subject.once(), forgiving=line.rival is not None)
            except Exception as error:
                self.clock.synchronize()
                rows.append(self._row(line, None, _status(error), _sentence(error)))
                continue
            if verdict.status == "failed":
                rows.append(self._row(line, None, "failed", verdict.detail, verdict))
            else:
                subjects[line.name], verdicts[line.name] = subject, verdict
        for part in self.options.passes:
            rows += self._timed(part, subjects, verdicts)
        self.clock.release()
        return rows

    def _timed(self, part: str, subjects: dict[str, Subject], verdicts: dict[str, Verdict]) -> list[dict[str, Any]]:
        fns, calls, rows = {}, {}, []
        for name, subject in subjects.items():
            self.progress(f"{subject.line.figure}: {part} {subject.line.label}")
            try:
                fn = subject.make(part)
                calls[name] = self.clock.calls_for(fn, self.options.round_ms)
                fns[name] = fn
            except Exception as error:
                self.clock.synchronize()
                rows.append(self._row(subject.line, part, _status(error), _sentence(error), verdicts[name]))
        measured, failed = interleave(
            fns, self.clock.sample, calls, self.options.rounds, self.options.out_of_time
        )  # fmt: skip
        for name, error in failed.items():
            rows.append(self._row(subjects[name].line, part, _status(error), _sentence(error), verdicts[name]))
        for name, measurement in measured.items():
            line, verdict = subjects[name].line, verdicts[name]
            row = self._row(line, part, verdict.status, verdict.detail, verdict)
            median, p20, p80 = measurement.quantiles()
            row |= {"ms": median, "p20": p20, "p80": p80, "rounds": measurement.round_medians}
            row["calls"] = len(measurement.samples)
            if line.rival is None:
                plan = subjects[name].plan()
                row |= {"plan": str(plan), "backend": ran(plan, part)}
                if line.figure == "window":
                    row["visited"] = visited(line.case, part, plan)
            rows.append(row)
        return rows

    def _row(self, line: Line, part, status, detail, verdict: Verdict | None = None) -> dict[str, Any]:
        c = line.case
        row = {
            "case": line.figure,
            "shape": shape(c),
            "batch": c.batch,
            "heads_q": c.heads_q,
            "heads_kv": c.heads_kv,
            "len_q": c.len_q,
            "len_k": c.len_k,
            "head_dim": c.head_dim,
            "dtype": str(c.dtype).removeprefix("torch."),
            "seqlens": None if c.seqlens is None else [n for n, _ in c.seqlens],
            "provider": line.name,
            "label": line.label,
            "ours": line.rival is None,
            "rotates": True,
            "pass": part,
            "mode": "eager",
            "status": status,
            "detail": detail,
        }
        if verdict is not None:
            row |= {"gate_row_ratio": verdict.row_ratio, "gate_rms_ratio": verdict.rms_ratio}
        return row | self.environment


def summary(rows: list[dict[str, Any]]) -> str:
    """A table for each figure, and what it says about the bars; then whoever was not timed, with the reason."""
    blocks = []
    for figure in dict.fromkeys(row["case"] for row in rows):
        found = {(r["provider"], r["pass"]): r for r in report.timed(rows) if r["case"] == figure}
        if not found:
            continue
        base = {"window": "window", "packed": "packed", "overhead": "causal"}[figure]
        table = []
        for name in dict.fromkeys(name for name, _ in found):
            both = [found.get((name, part)) for part in ("fwd", "bwd")]
            label = next(row for row in both if row)["label"]
            kernels = "/".join(dict.fromkeys(row["backend"] for row in both if row and "backend" in row))
            cells = (cell for part, row in zip(("fwd", "bwd"), both) for cell in _cells(found, base, row))
            table.append([label, kernels, *cells])
        header = [figure, "kernels", "fwd ms", "p20-p80", f"/ {base}", "bwd ms", "p20-p80", f"/ {base}"]
        blocks.append("\n".join([report.table(header, table, left=2), *_findings(figure, found)]))
    notes = dict.fromkeys(
        f"! {row['case']}: {row['label']}{' ' + row['pass'] if row['pass'] else ''}: {row['status']}: {row['detail']}"
        for row in rows
        if row["status"] not in ("ok", "loose")
    )
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])]) or "nothing was timed"


def _cells(found, base: str, row) -> list[str]:
    if row is None:
        return ["", "", ""]
    reference = found.get((base, row["pass"]))
    times = f"{report.milliseconds(row['p20'])}-{report.milliseconds(row['p80'])}"
    relative = "" if reference is None else f"{ratio(row['rounds'], reference['rounds']):.2f}"
    return [report.milliseconds(row["ms"]) + " ~" * (row["status"] == "loose"), times, relative]


def block_cost(found: dict, part: str) -> float | None:
    """Time for each visited score with the window over that without; None where one of them has no time."""
    window, causal = (found.get((name, part)) for name in ("window", "causal"))
    if not (window and causal and window.get("visited") and causal.get("visited")):
        return None
    return ratio(window["rounds"], causal["rounds"]) * causal["visited"] / window["visited"]


def _both(found: dict, name: str) -> list[float] | None:
    """Forward + backward of every round."""
    passes = [found.get((name, part)) for part in ("fwd", "bwd")]
    return [sum(pair) for pair in zip(*(row["rounds"] for row in passes))] if all(passes) else None


def _findings(figure: str, found: dict) -> list[str]:
    texts = []
    if figure == "window":
        for part, words in (("fwd", "forward"), ("bwd", "backward")):
            if (value := block_cost(found, part)) is not None:
                verdict = "ok" if value <= BLOCK_BAR else "MISSED"
                texts.append(
                    f"  {words}: a visited block costs {value:.2f} of full causal's (at most {BLOCK_BAR}: {verdict})"
                )
    if figure == "packed" and (packed := _both(found, "packed")):
        if padded := _both(found, "padded"):
            value = ratio(padded, packed)
            verdict = "ok" if value >= PADDED_BAR else "MISSED"
            texts.append(f"  forward + backward: {value:.2f}x the padded batch (at least {PADDED_BAR}: {verdict})")
        rivals = {
            name: times for name in {n for n, _ in found} if not _is_ours(found, name) and (times := _both(found, name))
        }
        if rivals:
            best = min(rivals, key=lambda name: quantile(rivals[name], 0.5))
            label = next(row["label"] for (name, _), row in found.items() if name == best)
            texts.append(f"  forward + backward: {report.speedup(ratio(rivals[best], packed))} against {label}")
    return texts


def _is_ours(found: dict, name: str) -> bool:
    return next(row["ours"] for (provider, _), row in found.items() if provider == name)


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 1 one of ours is red, 2 cannot run here."""
    args = _parser().parse_args(argv)
    figures = tuple(word.strip() for word in args.figures.split(",") if word.strip())
    if set(figures) - set(FIGURES):
        print(f"bench masks: --figures takes {', '.join(FIGURES)}, not {args.figures!r}", file=sys.stderr)
        return 2
    chosen = lines(figures)
    if args.dry_run:
        cells = [
            [line.figure, line.label, shape(line.case), line.rival and line.rival.missing() or "here"]
            for line in chosen
        ]
        print(report.table(["figure", "who", "shape", "status"], cells, left=4))
        return 0
    if not torch.cuda.is_available():
        print("bench masks: no GPU here; --dry-run lists what would run.", file=sys.stderr)
        return 2
    from bench.timing import GpuClock

    begin, facts = time.monotonic(), environment()
    gpu = card(facts["gpu"])
    out = args.out or RESULTS / f"masks-{gpu}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.jsonl"
    deadline = begin + args.time_budget if args.time_budget else float("inf")
    clock = GpuClock(torch.device("cuda", torch.cuda.current_device()))
    options = Options(mode="eager", rounds=args.rounds, round_ms=args.round_ms, deadline=deadline)

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    measurement, rows = Run(options, clock, facts, args.backend, progress), []
    for block in measurement.rows(chosen):
        rows += block
        report.write_lines(out, block)
    print(summary(rows))
    if measurement.not_run:
        print(f"\nNot run, the time budget of {args.time_budget:g} s was spent: {', '.join(measurement.not_run)}")
    print(f"\n{len(rows)} rows in {out} after {time.monotonic() - begin:.0f} s")
    return int(report.red(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench masks", description="Time masks and packing; nobody is timed before float64 agrees."
    )
    parser.add_argument("--figures", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=40.0, help="GPU time for each of them in each round")
    parser.add_argument("--backend", default="auto", help="ours (default: auto, what users get)")
    parser.add_argument("--out", type=Path, help="JSON lines, appended (default: bench/results/masks-GPU-DATE.jsonl)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no further figure after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="list what would run; no GPU needed")
    return parser
