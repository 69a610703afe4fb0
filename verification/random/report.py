"""What a random verification prints and writes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verification.random.running import Outcome
from verification.table import format_table

# The longest failures are cut: the line that reproduces one says the rest.
_LONGEST_DETAIL = 300


@dataclass
class Tally:
    """Counts over all outcomes so far. Only failures are kept whole."""

    calls: Counter = field(default_factory=Counter)  # of (function, backend), refusals left out
    drawn: Counter = field(default_factory=Counter)  # of a function, refusals left out
    refusals: Counter = field(default_factory=Counter)  # of a function
    skipped: Counter = field(default_factory=Counter)
    worst: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)  # (function, tensor): share, index
    failed: list[Outcome] = field(default_factory=list)
    slowest: list[tuple[float, int, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        function = outcome.function
        if outcome.skipped:
            self.skipped[function] += 1
        if outcome.is_illegal:
            self.refusals[function] += 1
        else:
            self.drawn[function] += 1
            self.calls.update((function, backend) for backend in {found.backend for found in outcome.findings})
        for found in outcome.findings:
            if found.share > 0.0:
                key = (function, found.tensor)
                self.worst[key] = max(self.worst.get(key, (0.0, 0)), (found.share, outcome.index))
        if outcome.failures:
            self.failed.append(outcome)
        self.slowest = sorted([*self.slowest, (outcome.seconds, outcome.index, outcome.text)], reverse=True)[:5]

    @property
    def total(self) -> int:
        return self.drawn.total() + self.refusals.total()


def failure_lines(outcome: Outcome, command: str) -> list[str]:
    """One line for each thing that is wrong with a call; each begins with the command that runs this call alone."""
    return [
        f"{command} --only {outcome.index}  # {outcome.function} {found.backend} {found.tensor}"
        + (f" {found.share:.3g} of the tolerance" if found.share else "")
        + f": {found.detail[:_LONGEST_DETAIL]} | {outcome.text}"
        for found in outcome.failures
    ]


def tables(tally: Tally) -> str:
    """Calls of each function on each backend, then each function's and tensor's worst error."""
    backends = sorted({backend for _, backend in tally.calls})
    failures = Counter(outcome.function for outcome in tally.failed)
    functions = sorted({*tally.drawn, *tally.refusals})
    rows = [
        {"function": function, "calls": tally.drawn[function], "refusals": tally.refusals[function],
         **{backend: tally.calls[function, backend] for backend in backends},
         "skipped": tally.skipped[function], "failures": failures[function]}
        for function in functions
    ]  # fmt: skip
    counts = format_table(("function", "calls", *backends, "refusals", "skipped", "failures"), rows)
    worst = format_table(
        ("function", "tensor", "worst share", "call"),
        [{"function": function, "tensor": tensor, "worst share": share, "call": index}
         for (function, tensor), (share, index) in sorted(tally.worst.items())],
    )  # fmt: skip
    legend = "worst share: the largest error, as a share of what the tolerance allows; above 1 fails."
    return f"{counts}\n\n{worst}\n\n{legend}"


def write_json(path: Path, tally: Tally, facts: dict[str, Any]) -> None:
    """``facts``, then what the tables say, and every failure with its call."""
    content = facts | {
        "calls": tally.total,
        "refusals": tally.refusals.total(),
        "failures": [
            {"index": o.index, "function": o.function, "call": o.text, "findings": [asdict(f) for f in o.failures]}
            for o in tally.failed
        ],
        "functions": {name: tally.drawn[name] for name in sorted(tally.drawn)},
        "backends": [{"function": f, "backend": b, "calls": n} for (f, b), n in sorted(tally.calls.items())],
        "worst": [{"function": f, "tensor": t, "share": s, "index": i}
                  for (f, t), (s, i) in sorted(tally.worst.items())],
        "slowest": [{"seconds": round(seconds, 1), "index": i, "call": text} for seconds, i, text in tally.slowest],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
