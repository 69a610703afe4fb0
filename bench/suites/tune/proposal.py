"""Timed configurations to text: proposed rows of the committed tables, finalists, refusals, the better strategy.

Nothing is written to ``configs.py``: a person reads the proposal.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bench import report
from bench.suites.tune.point import Config, Point, Timed
from bench.timing import ratio
from fused_rope_attn.attention import configs


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
    """A row of ``configs.FORWARD`` or ``BACKWARD`` as Python text, with card, versions, date and reason."""
    config = best.config
    was = f", was {report.milliseconds(current.ms)} ({describe(current.config)})" if current else ""
    note = (
        f"{facts['gpu']}, triton {facts['triton']}, {str(facts['date'])[:10]}: "
        f"{report.milliseconds(best.ms)} ms at {point.case.name}{was}"
    )
    tiles = (config.tile,) if isinstance(config, configs.ForwardConfig) else (config.dkdv, config.dq)
    row = configs.Row(
        (arch,),
        point.dtype.itemsize,
        point.head_dim,
        tiles,
        note,
        strategies=(point.strategy,),
        causal=point.causal,
        buckets=(point.bucket,),
        gqa=point.gqa,
        section_bytes=config.section_bytes,
        rotate_rows=config.rotate_rows,
        tma=config.tma,
    )
    return row_text(row)


def row_text(row: configs.Row) -> str:
    """The expression that builds ``row``; fields that hold their default are left out."""
    required = {"archs": row.archs, "element_size": row.element_size, "head_dim": row.head_dim}
    words = [repr(value) for value in required.values()]
    words.append(f"({''.join(_tile_text(tile) + ', ' for tile in row.tiles).strip()})")
    words.append(f'"{row.note}"')
    for field in fields(configs.Row)[5:]:
        value = getattr(row, field.name)
        if value != field.default:
            shown = f"{value >> 20} << 20" if field.name == "section_bytes" and value % (1 << 20) == 0 else repr(value)
            words.append(f"{field.name}={shown}")
    return f"Row({', '.join(words)}),".replace("'", '"')


def _tile_text(tile: configs.Tile) -> str:
    values = [tile.block_m, tile.block_n, tile.num_warps, tile.num_stages]
    return f"Tile({', '.join(map(str, values + ([tile.max_registers] if tile.max_registers else [])))})"


def strategies(best: dict[Point, Timed]) -> str:
    """Which strategy wins where both were tuned: what ``configs.STRATEGY`` is about."""
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
