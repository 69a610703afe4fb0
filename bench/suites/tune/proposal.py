"""Timed configurations to text: proposed rows of the committed tables, finalists, refusals, the better strategy.

Nothing is written to ``attention/portable/configs.py``: a person reads the proposal.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bench import report
from bench.suites.tune.point import Config, Point, Timed
from bench.timing import ratio
from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable.configs import BackwardRow, ForwardRow


def describe(config: Config) -> str:
    """``128x64 w8 s3 tma 8MB`` (backward: dkdv tile / dq tile)."""
    tiles = [config.tile] if isinstance(config, configs.ForwardConfig) else [config.dkdv, config.dq]
    words = [" / ".join(_tile_words(tile) for tile in tiles)]
    words += ["tma"] if config.tma else []
    words += [f"{config.section_bytes >> 20}MB"] if config.section_bytes else []
    return " ".join(words)


def _tile_words(tile: configs.Tile) -> str:
    cap = f" r{tile.max_registers}" if tile.max_registers else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{cap}"


def proposal(point: Point, arch: str, best: Timed, current: Timed | None, facts: dict[str, Any]) -> str:
    """Return a row of ``FORWARD`` or ``BACKWARD`` in ``attention/portable/configs.py`` as text.

    The comment above it has the card, the date, the release of Triton and the times.
    """
    config = best.config
    was = f", was {report.milliseconds(current.ms)} ({describe(current.config)})" if current else ""
    reason = (
        f"{facts['gpu']}, {str(facts['date'])[:10]}, triton {facts['triton']}: "
        f"{report.milliseconds(best.ms)} ms at {point.case.name}{was}."
    )
    key = {
        "archs": (arch,),
        "element_size": point.dtype.itemsize,
        "head_dim": point.head_dim,
        "strategies": (point.strategy,),
        "causal": point.causal,
        "buckets": (point.bucket,),
        "gqa": point.gqa,
    }
    options = {"section_bytes": config.section_bytes, "rotate_rows": config.rotate_rows, "tma": config.tma}
    if isinstance(config, configs.ForwardConfig):
        return row_text(ForwardRow(**key, **options, tile=config.tile), reason)
    return row_text(BackwardRow(**key, **options, dkdv=config.dkdv, dq=config.dq), reason)


def row_text(row: ForwardRow | BackwardRow, reason: str) -> str:
    """Return the lines that build ``row`` without the fields that hold their default: comment, key, configuration."""
    key, config = [], []
    for field in fields(row):
        value = getattr(row, field.name)
        if value != field.default:
            words = key if field.name in _KEY else config
            words.append(f"{field.name}={_value_text(value, in_mib=field.name == 'section_bytes')}")
    indented = [f"    {type(row).__name__}({', '.join(key)},", f"        {', '.join(config)}),"]
    return "\n".join([f"    # {reason}", *indented])


_KEY = ("archs", "element_size", "head_dim", "strategies", "causal", "buckets", "gqa", "masked")


def _value_text(value: Any, *, in_mib: bool) -> str:
    if isinstance(value, configs.Tile):
        cap = f", max_registers={value.max_registers}" if value.max_registers else ""
        options = f"num_warps={value.num_warps}, num_stages={value.num_stages}{cap}"
        return f"Tile({value.block_m}, {value.block_n}, {options})"
    if in_mib and value % configs.MIB == 0:
        return f"{value // configs.MIB} * MIB"
    return repr(value).replace("'", '"')


def strategies(best: dict[Point, Timed]) -> str:
    """Which strategy wins where both were tuned: which strategy ``planning`` should take."""
    lines = []
    for point in best:
        other = replace(point, strategy="prepass")
        if point.strategy != "inline" or other not in best:
            continue
        a, b = best[point].ms, best[other].ms
        winner = "inline" if a < b else "prepass"
        lines.append([f"{point.part} {point.bucket} {point.case.name}", *map(report.milliseconds, (a, b)), winner])
    return report.table(["point", "inline ms", "prepass ms", "faster"], lines) if lines else ""


def finalists_table(finalists: list[Timed], current: Timed | None) -> str:
    lines = [
        [
            describe(timed.config) + ("  (current)" if timed is current else ""),
            report.milliseconds(timed.ms),
            f"{report.milliseconds(timed.p20)}-{report.milliseconds(timed.p80)}",
            report.speedup(ratio(list(current.rounds), list(timed.rounds))) if current else "",
        ]
        for timed in finalists
    ]
    return report.table(["configuration", "ms", "p20-p80", "vs current"], lines)


def refusals(refused: list[tuple[Config, str]]) -> str:
    """Gate failures one by one, since they are bugs; everything else (shared memory, registers) by kind."""
    red = [f"\n  ! {describe(config)}: {reason}" for config, reason in refused if reason.startswith("FAILED")]
    kinds: dict[str, int] = {}
    for _, reason in refused:
        if not reason.startswith("FAILED"):
            kinds[reason.split(":")[0]] = kinds.get(reason.split(":")[0], 0) + 1
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (f" ({counted})" if counted else "") + "".join(red)
