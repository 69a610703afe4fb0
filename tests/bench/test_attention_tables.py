"""The generated blocks about attention: what they say, losses included."""

import pytest

from bench.attention import cases
from bench.suites.attention import tables
from bench.tables import milliseconds
from tests.support.bench import attention_row

_RIVALS = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")
_PLAN = "Plan(backend='triton', reason='x', forward=F(), backward=B(dkdv=1, dq=2))"


def _row(case, provider, ms, part, mode):
    plan = {"plan": _PLAN} if provider == "fused" else {}
    return attention_row(case, provider, ms, part, mode, **plan)


def _measured():
    """Every shape of the target: 2 ms for ours; hf 4, Liger + FA2 3, Liger + cuDNN 2.2, + FA4 1.6, bare 1.5 and 1."""
    times = dict(zip(("fused", *_RIVALS), (2.0, 4.0, 3.0, 2.2, 1.6, 1.5, 1.0)))
    rows = [
        _row(case, name, ms, part, mode)
        for case in cases.TABLE
        for part in ("fwd", "bwd")
        for mode in ("graph", "eager")
        for name, ms in times.items()
    ]
    rows += [_row("Small-512", name, 0.04 * ms, part, "host") for part in ("fwd", "both") for name, ms in times.items()]
    return rows


def _change(rows, ms, **which):
    """The same rows with another time for those that match."""
    return [
        row | {"ms": ms, "rounds": [ms] * 3} if all(row[key] == value for key, value in which.items()) else row
        for row in rows
    ]


def _line(text, begin):
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}"))


def test_results_show_losses_like_wins():
    text = tables.results(_measured())
    assert text.count("Long-64K (1, 8/8, 65536, 128)") == 2 and "called eagerly" not in text
    for case in cases.TABLE:
        cells = [cell.strip() for cell in _line(text, case).split("|")[2:-1]]
        assert cells[0].startswith("2.00 (")
        assert cells[1:] == ["3.00: **1.50×**", "1.60: **0.80×**, Liger rope + FA4", "1.00: **0.50×**, FA4"]
    for fact in ("NVIDIA H200", "0123abcd", "2026-11-21", "torch 2.11.0", "cuDNN 9.19.0", "liger-kernel 0.8.5"):
        assert fact in text


def test_eager_times_appear_for_everybody_where_ours_differ():
    rows = _change(_measured(), 2.19, provider="fused", mode="eager", case="Small-1K")
    assert "called eagerly" not in tables.results(rows)
    rows = _change(rows, 2.5, provider="fused", mode="eager", case="Small-512", **{"pass": "bwd"})
    rows = _change(rows, 2.0, provider="liger_flash", mode="eager", case="Small-512", **{"pass": "bwd"})
    text = tables.results(rows)
    assert text.count("called eagerly") == 1
    assert "2.00: **0.80×** |" in _line(text, "Small-512, called eagerly")


def test_results_name_what_is_missing_and_what_is_loose():
    rows = [row for row in _measured() if (row["case"], row["provider"]) != ("Small-1K", "liger_flash")]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_fa4" else row for row in rows]
    text = tables.results(rows)
    assert "not measured" in _line(text, "Small-1K") and "Liger rope + FA4 ~" in text and "\n~: " in text
    with pytest.raises(ValueError, match="Long-64K, forward"):
        tables.results([row for row in rows if (row["case"], row["provider"]) != ("Long-64K", "fused")])


def test_results_compare_with_what_was_measured():
    text = tables.results([row for row in _measured() if row["provider"] != "liger_flash"])
    assert "| HF rope + SDPA |" in text and "not measured" not in text


def test_standing_counts_every_shape():
    rows = _change(_measured(), 1.9, provider="liger_flash", mode="graph", case="Llama7B-4K", **{"pass": "bwd"})
    text = tables.standing(rows)
    assert [cell.strip() for cell in _line(text, "Liger rope + SDPA flash").split("|")[2:-1]] == [
        "8 of 8",
        "1.50 to 1.50×",
        "7 of 8",
        "0.95 to 1.50×",
    ]
    assert "0 of 8" in _line(text, "bare FA4")
    assert "at: Llama7B-4K backward (0.95×)." in text
    assert "at: no shape." in tables.standing(_measured())
    short = tables.headline(rows)
    assert "at 7 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-2")
    assert "at 0 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-4")


def test_without_a_common_rival():
    """Where neither FlashAttention-2 nor Hugging Face's attention was timed, their column and sentence are left out."""
    rows = [row for row in _measured() if row["provider"] not in ("hf_sdpa", "liger_flash")]
    forward_only = [row for row in rows if row["pass"] == "fwd" or row["provider"] != "liger_fa4"]
    assert "| no such pass |" in _line(tables.headline(forward_only), "Liger's rotation + FlashAttention-4")
    assert "FlashAttention-2" in tables.results(_measured()) and "FlashAttention-2" not in tables.results(rows)
    line, without = (_line(tables.results(some), "Llama7B-4K") for some in (_measured(), rows))
    assert without.count("|") == line.count("|") - 1
    assert "Slower than" in tables.standing(_measured()) and "Slower than" not in tables.standing(rows)


def test_the_plan():
    assert "reason='x',\n     forward=F(),\n     backward=B(dkdv=1,\n         dq=2))" in tables.plan(_measured())
    for block in (tables.plan, tables.headline):
        with pytest.raises(ValueError, match="no "):
            block([row for row in _measured() if row["provider"] != "fused"])


@pytest.mark.parametrize(("value", "text"), [(0.01326, "0.0133"), (0.44, "0.440"), (1.0, "1.00"), (113.8, "114")])
def test_milliseconds_have_three_digits(value, text):
    assert milliseconds(value) == text
    assert milliseconds(1234.5) in ("1234", "1235")
