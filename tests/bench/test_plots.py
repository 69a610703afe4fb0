"""The plots: one colour for each provider, and bars that show losses below the line."""

from bench import plots, providers
from tests.support.bench import published_rows


def test_plots_are_written_with_one_colour_each(tmp_path):
    import matplotlib.image

    files = plots.draw_all(published_rows(), tmp_path)
    assert {f.name for f in files} == {"tflops_fwd_graph.png", "speedup_fwd_graph.png"}
    for file in files:
        image = matplotlib.image.imread(file)
        assert image.shape[:2] == (1095, 1950) and image[..., :3].std() > 0.05
    assert set(plots.COLOURS) == set(providers.PROVIDERS)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    assert plots.draw_all([], tmp_path / "empty") == []


def test_speedup_bars_go_below_one():
    figure = plots.speedup_bars(published_rows(), "fwd", "graph")
    bars = figure.axes[0].patches
    heights = [bar.get_height() for bar in bars]
    assert len(bars) == 8 * 3 and min(heights) < 0 < max(heights)
    assert all((bar.get_hatch() == "//") == (bar.get_height() < -0.005) for bar in bars)
    plots._pyplot().close(figure)
