"""``python -m bench decode``: the generation step against what a user can install, and against a copy of as many bytes.

As everywhere here: equal inputs and tables, prepared before the clock runs; nobody is timed before float64 agrees;
rounds are interleaved in one process and compared round by round; losses are printed like wins. ``--tune`` times
configurations of our own kernel instead, all in one process, and prints one table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.cases import DTYPES
from bench.decode_providers import COPY, COPY_BYTES, OURS, RAW, READ, DecodeProvider, Step, select
from bench.environment import ROOT, card, environment
from bench.gate import _LOOSE_RMS, _rms_ratio
from bench.timing import interleave, ratio
from fused_rope_attn import rope_tables, testing
from fused_rope_attn.attention.configs import family
from fused_rope_attn.generation import configs, planning, reference
from fused_rope_attn.runtime import device

RESULTS = ROOT / "bench" / "results"
_MODES = {"eager": ("eager",), "graph": ("graph",), "both": ("graph", "eager")}
_EVEN = 0.995  # from here on a ratio counts as not slower, as in report.py


@dataclass(frozen=True)
class DecodeCase:
    """One step of ``batch`` sequences with caches of ``length`` rows, all but the last in use before it."""

    batch: int
    length: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        length = f"{self.length // 1024}K" if self.length % 1024 == 0 else str(self.length)
        return f"B{self.batch}-{length}"

    @property
    def shape(self) -> str:
        """``B8 H32/8 S4096 D128 bf16``."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype is self.dtype)
        return f"B{self.batch} H{self.heads_q}/{self.heads_kv} S{self.length} D{self.head_dim} {dtype}"

    @property
    def bytes(self) -> int:
        """Of keys and values: what a step reads."""
        return 2 * self.batch * self.heads_kv * self.length * self.head_dim * self.dtype.itemsize

    def step(self, device: torch.device) -> Step:
        """Normally distributed inputs, equal for equal device."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            x = torch.empty(self.batch, heads, length, self.head_dim, dtype=self.dtype, device=device)
            return x.normal_(generator=generator)

        new = normal(self.heads_q, 1), normal(self.heads_kv, 1), normal(self.heads_kv, 1)
        caches = normal(self.heads_kv, self.length), normal(self.heads_kv, self.length)
        lengths = torch.full((self.batch,), self.length - 1, dtype=torch.int32, device=device)
        return Step(*new, *caches, lengths, *rope_tables(self.length, self.head_dim, device=device))


CASES = tuple(DecodeCase(b, n) for b, n in itertools.product((1, 8, 64), (4096, 32768, 131072)))


@dataclass
class Options:
    """``round_ms`` is device time for each provider in each round, ``deadline`` a time.monotonic()."""

    mode: str = "both"
    rounds: int = 3
    round_ms: float = 10.0
    deadline: float = float("inf")
    memory: int = 1 << 62  # bytes that a case may take

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


def hold(o: Tensor, step: Step, *, raw: bool, rounded_tables: bool, forgiving: bool) -> dict[str, Any]:
    """The group of the first key head of the first sequence, and the last of the last, against float64."""
    verdict = {"status": "ok", "detail": "", "gate_row_ratio": 0.0, "gate_rms_ratio": 0.0}
    group = step.q.shape[1] // step.k.shape[1]
    tables = [table.to(step.q.dtype) if rounded_tables else table for table in step[6:]]
    for b, h in {(0, 0), (step.q.shape[0] - 1, step.k.shape[1] - 1)}:
        heads = slice(h * group, (h + 1) * group)
        results = []
        for dtype in (torch.float64, step.q.dtype):
            # Copies: the reference writes too. What others wrote into the last row is not read.
            q, k, v, k_cache, v_cache = (
                x[b : b + 1, heads if x is step.q else slice(h, h + 1)].to(dtype, copy=True) for x in step[:5]
            )
            cos, sin = (t.double() for t in tables) if dtype is torch.float64 else tables
            results.append(
                reference.attention_with_kvcache(
                    q,
                    k_cache,
                    v_cache,
                    cos,
                    sin,
                    k,
                    v,
                    step.lengths[b : b + 1],
                    cache_is_rotated=not raw,
                    causal=True,
                    softmax_scale=q.shape[3] ** -0.5,
                    rotary_dim=q.shape[3],
                )[0]  # fmt: skip
            )
        got = o[b : b + 1, heads]
        held = testing.compare("o", got, *results, grad=False, dtype=step.q.dtype)
        rms = _rms_ratio(got, *results)
        verdict["gate_row_ratio"] = max(verdict["gate_row_ratio"], held.row_ratio)
        verdict["gate_rms_ratio"] = max(verdict["gate_rms_ratio"], rms)
        if not held.ok:
            loose = forgiving and rms <= _LOOSE_RMS and verdict["status"] != "failed"
            verdict |= {"status": "loose" if loose else "failed", "detail": held.detail}
    return verdict


@dataclass
class Run:
    """Everything that outlasts a case; ``clock`` as in ``runner.Clock``."""

    providers: list[DecodeProvider]
    options: Options
    clock: Any
    environment: dict[str, Any]
    progress: Callable[[str], None] = lambda message: None
    not_run: list[str] = field(default_factory=list)

    def rows(self, cases: list[DecodeCase]) -> Iterator[list[dict[str, Any]]]:
        """Rows of one case after the other; what does not fit, or comes after the deadline, is noted."""
        for case in cases:
            if self.options.out_of_time():
                self.not_run.append(f"{case.name} (time)")
            elif case.bytes + 2 * COPY_BYTES > self.options.memory:
                self.not_run.append(f"{case.name} (memory)")
            else:
                self.progress(f"{case.name} {case.shape}")
                yield self._case(case)

    def _case(self, case: DecodeCase) -> list[dict[str, Any]]:
        step = case.step(self.clock.device)
        rows, people, runs, facts = [], {}, {}, {}
        for provider in self.providers:
            status, reason = "missing", provider.missing()
            if reason is None:
                try:
                    run, facts[provider.name] = self._gate(provider, step)
                    status, reason = facts[provider.name]["status"], facts[provider.name]["detail"]
                    if status != "failed":
                        people[provider.name], runs[provider.name] = provider, run
                        continue
                except Exception as error:
                    status, reason = "error", _sentence(error)
                    self.clock.synchronize()
            rows.append(self._row(case, provider, None, status, reason, facts.get(provider.name, {})))
        with torch.no_grad():
            for mode in _MODES[self.options.mode]:
                rows += self._timed(case, mode, people, runs, facts)
        del step, runs
        self.clock.release()
        return rows

    @torch.no_grad()
    def _gate(self, provider: DecodeProvider, step: Step) -> tuple[Callable[[], Tensor], dict[str, Any]]:
        begin = time.perf_counter()
        run = provider.make(step)
        out = run()
        self.clock.synchronize()
        seconds = time.perf_counter() - begin
        if provider.copies:
            verdict = {"status": "ok", "detail": ""}
        elif provider.bare:  # attends to the caches as they are, with the query as it is
            still = step._replace(cos=torch.ones_like(step.cos), sin=torch.zeros_like(step.sin))
            last = (step.k_cache[:, :, -1:].clone(), step.v_cache[:, :, -1:].clone())
            still = still._replace(k=last[0], v=last[1])
            verdict = hold(out, still, raw=False, rounded_tables=False, forgiving=True)
        else:
            forgiving = provider.name not in (OURS, RAW)
            verdict = hold(out, step, raw=provider.raw, rounded_tables=provider.rounded_tables, forgiving=forgiving)
        return run, {"first_call_s": seconds, **verdict}

    def _timed(self, case, mode, people, runs, facts) -> list[dict[str, Any]]:
        fns, calls, rows = {}, {}, []
        for name, run in runs.items():
            try:
                ceiling = people[name].copies
                fn = self.clock.capture(lambda: run) if mode == "graph" and not ceiling else run  # noqa: B023
                calls[name] = self.clock.calls_for(fn, self.options.round_ms)
                fns[name] = fn
            except Exception as error:
                self.clock.synchronize()
                status = "no-graph" if mode == "graph" else "error"
                rows.append(self._row(case, people[name], mode, status, _sentence(error), facts[name]))
        measured, failed = interleave(fns, self.clock.sample, calls, self.options.rounds, self.options.out_of_time)
        for name, error in failed.items():
            rows.append(self._row(case, people[name], mode, "error", _sentence(error), facts[name]))
        scale = max(1.0, case.bytes / COPY_BYTES)
        medians = {
            name: [x * (scale if people[name].copies else 1.0) for x in measurement.round_medians]
            for name, measurement in measured.items()
        }
        for name, measurement in measured.items():
            fact = facts[name]
            row = self._row(case, people[name], mode, fact["status"], fact["detail"], fact)
            times = [x * (scale if people[name].copies else 1.0) for x in measurement.quantiles()]
            row |= {"ms": times[0], "p20": times[1], "p80": times[2], "rounds": medians[name]}
            row |= {"calls": len(measurement.samples), "gb_s": case.bytes / times[0] * 1e-6}
            row["of_copy"] = ratio(medians[COPY], medians[name]) if COPY in medians else None
            rows.append(row)
        return rows

    def _row(self, case: DecodeCase, provider: DecodeProvider, mode, status, detail, facts) -> dict[str, Any]:
        row = {
            "case": case.name,
            "shape": case.shape,
            "batch": case.batch,
            "heads": (case.heads_q, case.heads_kv),
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."),
            "bytes": case.bytes,
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name in (OURS, RAW),
            "bare": provider.bare,
            "pass": "decode",
            "mode": mode,
            "status": status,
            "detail": detail,
        }
        return row | {k: v for k, v in facts.items() if k not in ("status", "detail")} | self.environment


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each case and mode, then whoever was not timed, with the reason.

    The strongest rival also rotates and writes; what only attends is beside it. "read": the share of a copy's bandwidth
    that a plain read of as many bytes reaches.
    """
    groups: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in report.timed(rows):
        groups.setdefault((row["case"], row["shape"], row["mode"]), {})[row["provider"]] = row
    lines, losses = [], 0
    for key, group in groups.items():
        mine, raw = group.get(OURS), group.get(RAW)
        if mine is None:
            continue
        shown = (mine, raw, group.get(READ))
        share = [f"{100 * row['of_copy']:.0f}%" if row and row.get("of_copy") else "-" for row in shown]
        line = [*key, report.milliseconds(mine["ms"]), f"{mine['gb_s']:.0f}", *share]
        for bare in (False, True):
            people = [row for name, row in group.items() if name not in (COPY, READ)]
            rivals = [row for row in people if not row["ours"] and row["bare"] == bare]
            rival = min(rivals, key=lambda row: row["ms"], default=None)
            if rival is None:
                line += [""] * 3
                continue
            value = ratio(rival["rounds"], mine["rounds"])
            losses += value < _EVEN and not bare
            mark = " ~" * (rival["status"] == "loose")
            line += [rival["label"] + mark, report.milliseconds(rival["ms"]), report.speedup(value)]
        lines.append(line)
    header = ["case", "shape", "mode", "ours ms", "GB/s", "of copy", "raw", "read", "strongest rival", "ms", "speedup"]
    header += ["attention alone", "ms", "speedup"]
    if not any(line[-1] for line in lines):
        header, lines = header[:-3], [line[:-3] for line in lines]
    blocks = [report.table(header, lines, left=3)] if lines else ["nothing was timed"]
    blocks.append(f"{len(lines)} lines, slower than the strongest rival in {losses}")
    notes = dict.fromkeys(
        f"! {row['label']}: {row['status']}: {row['detail']}" for row in rows if row["status"] not in ("ok", "loose")
    )
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


# (block_n, warps, stages, programs per multiprocessor) that a tuning run tries where it is not told others.
_CANDIDATES = (
    "64x4x4x2", "64x4x3x2", "64x4x3x3r168", "32x4x4x3r168", "32x4x6x2", "32x4x4x4r128", "128x4x3x1", "128x8x3x1",
    "128x8x2x2r128", "64x8x4x2r128", "64x8x3x2r128", "64x8x6x1", "32x2x6x4", "16x2x6x5r192",
)  # fmt: skip


def candidate(text: str, base: configs.DecodeConfig) -> configs.DecodeConfig:
    """``block_n x warps x stages x programs per multiprocessor[rREGISTERS][lLEAST_TILES]``, as in ``64x4x4x2r168``."""
    rest, least = text.split("l") if "l" in text else (text, base.least_tiles)
    rest, registers = rest.split("r") if "r" in rest else (rest, None)
    try:
        block_n, warps, stages, programs = map(int, rest.split("x"))
        return replace(
            base, block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs,
            least_tiles=int(least), max_registers=None if registers is None else int(registers),
        )  # fmt: skip
    except ValueError:
        raise ValueError(f"a configuration looks like 64x4x4x2, 64x4x4x3r168 or 64x4x4x2l4, not {text!r}") from None


@torch.no_grad()
def tune(cases: list[DecodeCase], texts: list[str], raw: bool, options: Options, clock: Any) -> tuple[str, list[dict]]:
    """(a table: a line for each configuration with its time and share of a copy's bandwidth in each case, the rows)."""
    copy = next(provider for provider in select([]) if provider.name == COPY)
    columns, rows = {}, []
    for case in cases:
        step = case.step(clock.device)
        arch = family(device.arch(step.q.device))
        table = configs.decode(arch, step.q.dtype.itemsize, step.q.shape[3], not raw)
        chosen = {"(table)": table} | {text: candidate(text, table) for text in texts}
        fns, notes = {}, {}
        provider = next(p for p in select([RAW]) if p.name == (RAW if raw else OURS))
        for text, config in chosen.items():
            try:
                with planning.configured(config):
                    run = provider.make(step)
                    verdict = hold(run(), step, raw=raw, rounded_tables=False, forgiving=False)
                    if verdict["status"] == "ok":
                        fns[text] = clock.capture(lambda run=run: run)
                    else:
                        notes[text] = verdict["detail"]
            except Exception as error:
                notes[text] = _sentence(error)
                clock.synchronize()
        fns[COPY] = copy.make(step)
        calls = {name: clock.calls_for(fn, options.round_ms) for name, fn in fns.items()}
        measured, _ = interleave(fns, clock.sample, calls, options.rounds, options.out_of_time)
        scale = max(1.0, case.bytes / COPY_BYTES)
        ceiling = [scale * x for x in measured[COPY].round_medians]
        for text, config in chosen.items():
            row = {"case": case.name, "shape": case.shape, "raw": raw, "config": text, **asdict(config)}
            if text in measured:
                row |= {"ms": measured[text].quantiles()[0]}
                row["of_copy"] = ratio(ceiling, measured[text].round_medians)
            rows.append(row | {"detail": notes.get(text, "")})
        columns[case.name] = {row["config"]: row for row in rows if row["case"] == case.name}
        del step, fns
        clock.release()
    lines = [
        [text, *(_cell(columns[case.name][text]) for case in cases)] for text in ("(table)", *dict.fromkeys(texts))
    ]
    header = ["block x warps x stages x programs", *(case.name for case in cases)]
    notes = dict.fromkeys(f"! {row['config']}: {row['detail']}" for row in rows if row["detail"])
    return "\n".join([report.table(header, lines), *notes]), rows


def _cell(row: dict[str, Any]) -> str:
    return f"{1e3 * row['ms']:.1f} us {100 * row['of_copy']:.0f}%" if "ms" in row else "-"


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def choose(names: list[str]) -> list[DecodeCase]:
    """Cases whose name is one of ``names`` or begins with it and a dash, all without names. ValueError for none."""
    chosen = [c for c in CASES if not names or any(c.name == n or c.name.startswith(f"{n}-") for n in names)]
    if not chosen:
        raise ValueError(f"no case is left; there are {', '.join(case.name for case in CASES)}")
    return chosen


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 1 ours is red, 2 cannot run here."""
    args = _parser().parse_args(argv)
    try:
        chosen, rivals = choose(_words(args.cases)), select(_words(args.providers))
        texts = _words(args.configs) or list(_CANDIDATES)
        for text in texts:
            candidate(text, configs.decode("sm_90", 2, 128, True))
    except ValueError as error:
        print(f"bench decode: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        people = [[p.name, p.label, ", ".join(p.pip) or "-", p.missing() or "here"] for p in rivals]
        print(report.table(["case", "shape", "MiB"], [[c.name, c.shape, f"{c.bytes >> 20}"] for c in chosen], left=2))
        print("\n" + report.table(["provider", "label", "pip", "status"], people, left=4))
        return 0
    if not torch.cuda.is_available():
        print("bench decode: no GPU here; --dry-run lists what would run.", file=sys.stderr)
        return 2
    from bench.timing import GpuClock

    begin, facts = time.monotonic(), environment()
    deadline = begin + args.time_budget if args.time_budget else float("inf")
    memory = int(0.95 * torch.cuda.mem_get_info()[0])
    options = Options(args.mode, args.rounds, args.round_ms, deadline, memory)
    clock = GpuClock(torch.device("cuda", torch.cuda.current_device()))
    if args.tune:
        text, rows = tune(chosen, texts, args.raw, options, clock)
        print(text)
        if args.out:
            report.write_lines(args.out, [row | facts for row in rows])
        return 0
    gpu = card(facts["gpu"])
    out = args.out or RESULTS / f"decode-{gpu}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.jsonl"
    measurement = Run(rivals, options, clock, facts, lambda text: print(text, file=sys.stderr, flush=True))
    rows = []
    for block in measurement.rows(chosen):
        rows += block
        report.write_lines(out, block)
    print(summary(rows))
    if measurement.not_run:
        print(f"\nNot run: {'; '.join(measurement.not_run)}")
    print(f"\n{len(rows)} rows in {out} after {time.monotonic() - begin:.0f} s")
    return int(report.red(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench decode", description="Time a step of generation; nobody is timed before float64 agrees."
    )
    parser.add_argument("--cases", default="", help=f"of {', '.join(case.name for case in CASES)}, or B1, B8, B64")
    parser.add_argument("--providers", default="", help="names (default: everybody); ours and the copy always run")
    parser.add_argument("--mode", choices=tuple(_MODES), default="both", help="CUDA graphs, eager calls, or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=10.0, help="GPU time for each provider in each round")
    parser.add_argument("--out", type=Path, help="JSON lines, appended (default: bench/results/decode-GPU-DATE.jsonl)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    parser.add_argument("--tune", action="store_true", help="time configurations of our kernel, as CUDA graphs")
    parser.add_argument("--configs", default="", help=f"for --tune, default: {','.join(_CANDIDATES)}")
    parser.add_argument("--raw", action="store_true", help="for --tune: keys that are rotated in the loop")
    parser.add_argument("--dry-run", action="store_true", help="list cases and providers; no GPU needed")
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
