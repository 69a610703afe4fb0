"""What the plots of all suites share: style, size, files. Needs matplotlib, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DPI = 150
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6e8",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.color": "white",
}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into memory. RuntimeError where it is absent."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figures: Mapping[str, Any], directory: Path, mode: str) -> list[Path]:
    """Write every figure that is not None as ``NAME_MODE.png``, close it, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        if figure is not None:
            path = directory / f"{name}_{mode}.png"
            figure.savefig(path, dpi=_DPI, facecolor="white")
            pyplot().close(figure)
            files.append(path)
    return files
