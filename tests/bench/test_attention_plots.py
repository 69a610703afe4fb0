"""The plots of attention: which there are, and that losses show."""

import matplotlib.image

from bench.attention import plots, providers
from bench.plots import pyplot
from tests.support.bench import attention_row, published


def test_plots_are_written_with_one_colour_each(tmp_path):
    files = plots.draw(published(), tmp_path)
    assert {f.name for f in files} == {"speedup_all_fwd_graph.png"}
    for file in files:
        image = matplotlib.image.imread(file)
        assert image.shape[:2] == (1095, 1950) and image[..., :3].std() > 0.05
    assert set(plots.COLOURS) == set(providers.table("plain"))
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    assert plots.draw([], tmp_path / "empty") == []


def test_speedup_bars_go_below_one():
    figure = plots.speedup_bars(published(), "fwd", "graph")
    bars = figure.axes[0].patches
    heights = [bar.get_height() for bar in bars]
    assert len(bars) == 8 * 3 and min(heights) < 0 < max(heights)
    assert all((bar.get_hatch() == "//") == (bar.get_height() < -0.005) for bar in bars)
    pyplot().close(figure)


def test_the_overview_shows_both_passes_and_no_stumps():
    rows = [
        attention_row(f"Llama7B-{n}", name, 1.0, part)
        for n in ("512", "1K", "2K", "4K", "8K")
        for name in ("fused", "liger_flash", "liger_fa4", *(["compiled_fa4"] if n == "2K" else []))
        for part in ("fwd", "bwd")
    ]
    figure = plots.overview(rows + [attention_row("Small-1K", "fused", 1.0)], "graph")
    assert [axis.get_title() for axis in figure.axes] == ["forward", "backward"]
    for axis in figure.axes:
        labels = [line.get_label() for line in axis.get_lines()]
        assert len(labels) == 3 and "rope_attention (ours)" in labels and "compiled rope + FA4" not in labels
        assert axis.get_ylim()[1] > max(max(line.get_ydata()) for line in axis.get_lines())
    assert "Llama7B" in figure.get_suptitle() and "causal" in figure.get_suptitle()
    pyplot().close(figure)
    assert plots.overview([row for row in rows if row["pass"] == "fwd"], "graph") is None
    assert plots.overview([row for row in rows if row["case"] == "Llama7B-2K"], "graph") is None
