"""Markdown for the generated blocks of the documents: tables, and the sentence that says where rows come from."""

from __future__ import annotations

from bench.report import Row


def milliseconds(value: float) -> str:
    """Three significant digits: 0.0133, 0.440, 16.4, 114."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def provenance(rows: list[Row], *packages: str) -> str:
    """Where rows come from, for under a table: card, dtype where they share one, versions, dates and commits.

    ``packages``: which of the others are named where the rows have them, "cuDNN" among them.
    """
    row = rows[0]
    versions = {name: version for r in rows for name, version in (r.get("packages") or {}).items()}
    cudnn = row.get("cudnn") or 0
    if cudnn:
        versions["cuDNN"] = f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
    dtypes = {r.get("dtype") for r in rows}
    facts = [
        row["gpu"],
        *(dtypes if len(dtypes) == 1 and None not in dtypes else ()),
        *(f"{name} {row.get(name)}" for name in ("driver", "torch", "triton")),
        *(f"{name} {versions[name]}" for name in packages if name in versions),
    ]
    dates = sorted({r.get("date", "")[:10] for r in rows} - {""})
    commits = sorted({r.get("commit") or "not recorded" for r in rows})
    return f"{', '.join(facts)}. Measured {' and '.join(dates)}, commit {' and '.join(commits)}."


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table whose first column is to the left."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
