"""The plots: which lines there are, that losses show, and that they can be read."""

import matplotlib.image
from matplotlib.colors import to_rgb

from bench import plots
from tests.support.bench import attention_row, published


def _points(axis):
    return sorted(tuple(points.get_offsets()[0]) for points in axis.collections if len(points.get_offsets()))


def _luminance(colour):
    """Return the relative luminance of a colour: 0 of black, 1 of white."""
    channels = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), channels))


def test_text_is_dark_on_white_and_lines_can_be_seen(tmp_path):
    """Accessibility guidelines (WCAG) ask a contrast of 7 to 1 of text at level AAA; wide lines need less."""
    figure = plots.speedups(published())
    figure.savefig(tmp_path / "speedup_all.png")
    image = matplotlib.image.imread(tmp_path / "speedup_all.png")
    assert image.shape[1:] == (1300, 4) and (image[0, 0] == 1).all() and (image[..., 3] == 1).all()
    axis = figure.axes[0]
    texts = [figure._suptitle, axis.title, axis.xaxis.label, *axis.get_xticklabels(), *axis.get_yticklabels()]
    texts += figure.legends[0].get_texts()
    for text in texts:
        assert 1.05 / (_luminance(text.get_color()) + 0.05) > 7, text.get_text()
    for name, colour in plots.COLOURS.items():
        assert 1.05 / (_luminance(colour) + 0.05) > 1.8, name


def test_speedups_below_one_are_on_the_shaded_side():
    figure = plots.speedups(published())
    axis = figure.axes[0]
    values = [x for x, _ in _points(axis)]
    assert len(values) == 8 * 2 and min(values) < 1 < max(values)
    texts = {text.get_text(): text.get_color() for text in axis.texts}
    assert texts["0.91"] == "#d7263d" and texts["1.93"] == plots.COLOURS["liger_fa4"]


def test_the_overview_shows_both_passes_and_no_stumps():
    rows = [
        attention_row(f"Llama7B-{n}", name, 1.0, part)
        for n in ("512", "1K", "2K", "4K", "8K")
        for name in ("fused", "liger_cudnn", "liger_fa4", *(["bare_fa4"] if n == "2K" else []))
        for part in ("fwd", "bwd")
    ]
    figure = plots.overview(rows + [attention_row("Small-1K", "fused", 1.0)])
    assert [axis.get_title() for axis in figure.axes] == ["forward", "backward"]
    for axis in figure.axes:
        labels = [line.get_label() for line in axis.get_lines()]
        assert len(labels) == 3 and "rope_attention (ours)" in labels and "bare FA4" not in labels
        assert axis.get_ylim()[1] > max(max(line.get_ydata()) for line in axis.get_lines())
    assert "Llama7B" in figure.get_suptitle() and "causal" in figure.get_suptitle()
