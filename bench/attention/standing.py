"""Who stands for whom among rows of one case, pass and mode: the strongest rival, and ours."""

from __future__ import annotations

from bench.report import Row


def strongest(rows: list[Row], *, rotates: bool, figure: str = "ms") -> Row | None:
    """The rival with the least of ``figure``, by default the fastest."""
    rivals = [row for row in rows if not row["ours"] and row["rotates"] == rotates]
    return min(rivals, key=lambda row: row[figure], default=None)


def ours(rows: list[Row], figure: str = "ms") -> Row | None:
    """What a user gets: ``fused`` where it was measured, else the one of ours with the least of ``figure``."""
    mine = [row for row in rows if row["ours"]]
    chosen = [row for row in mine if row["provider"] == "fused"]
    return chosen[0] if chosen else min(mine, key=lambda row: row[figure], default=None)
