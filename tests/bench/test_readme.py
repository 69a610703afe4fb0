"""README.md and docs/benchmarks.md: their figures come from committed rows."""

import re
import shlex

import pytest

from bench import __main__ as command
from bench import cases, plots, providers, readme, report
from bench.environment import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
_OPEN = "<!-- bench:{}: written -->\n<!-- bench:end -->\n"
_RIVALS = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")


def _row(case, provider, part, mode, ms, **extra):
    bench_case = next(c for c in cases.CASES if c.name == case)
    c = bench_case.case
    mine = providers.is_ours(provider)
    return {
        "case": case,
        "groups": bench_case.groups,
        "shape": bench_case.shape,
        "family": bench_case.family,
        "batch": c.batch,
        "heads_q": c.heads_q,
        "heads_kv": c.heads_kv,
        "len_q": c.len_q,
        "head_dim": c.head_dim,
        "causal": c.causal,
        "dtype": "bfloat16",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cudnn": 91900,
        "packages": {"liger-kernel": "0.8.5"},
        "commit": "0123abcd",
        "date": "2026-11-21T10:00:00+00:00",
        "provider": provider,
        "label": providers.PROVIDERS[provider].label,
        "ours": mine,
        "rotates": providers.PROVIDERS[provider].rotates,
        "pass": part,
        "mode": mode,
        "status": "ok",
        "detail": "",
        "ms": ms,
        "rounds": [ms] * 3,
        "tflops": bench_case.flops(part) / ms * 1e-9,
        **({"plan": "Plan(backend='triton', reason='x', forward=F(), backward=B(dkdv=1, dq=2))"} if mine else {}),
    } | extra


def _measured():
    """Every shape of the target: 2 ms for ours; hf 4, Liger + FA2 3, Liger + cuDNN 2.2, + FA4 1.6, bare 1.5 and 1."""
    times = dict(zip(("fused", *_RIVALS), (2.0, 4.0, 3.0, 2.2, 1.6, 1.5, 1.0)))
    rows = [
        _row(case, name, part, mode, ms)
        for case in cases.TABLE
        for part in ("fwd", "bwd")
        for mode in ("graph", "eager")
        for name, ms in times.items()
    ]
    rows += [_row("Small-512", name, part, "host", 0.04 * ms) for part in ("fwd", "both") for name, ms in times.items()]
    return rows


def _change(rows, ms, **which):
    """The same rows with another time for those that match."""
    return [
        row | {"ms": ms, "rounds": [ms] * 3} if all(row[key] == value for key, value in which.items()) else row
        for row in rows
    ]


def _line(text, begin):
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}"))


# Blocks


def test_results_show_losses_like_wins():
    text = readme.results(_measured())
    assert text.count("Long-64K (1, 8/8, 65536, 128)") == 2 and "called eagerly" not in text
    for case in cases.TABLE:
        cells = [cell.strip() for cell in _line(text, case).split("|")[2:-1]]
        assert cells[0].startswith("2.00 (")
        assert cells[1:] == ["3.00: **1.50×**", "1.60: **0.80×**, Liger rope + FA4", "1.00: **0.50×**, FA4"]
    for fact in ("NVIDIA H200", "0123abcd", "2026-11-21", "torch 2.11.0", "cuDNN 9.19.0", "liger-kernel 0.8.5"):
        assert fact in text


def test_eager_times_appear_for_everybody_where_ours_differ():
    rows = _change(_measured(), 2.19, provider="fused", mode="eager", case="Small-1K")
    assert "called eagerly" not in readme.results(rows)
    rows = _change(rows, 2.5, provider="fused", mode="eager", case="Small-512", **{"pass": "bwd"})
    rows = _change(rows, 2.0, provider="liger_flash", mode="eager", case="Small-512", **{"pass": "bwd"})
    text = readme.results(rows)
    assert text.count("called eagerly") == 1
    assert "2.00: **0.80×** |" in _line(text, "Small-512, called eagerly")


def test_results_name_what_is_missing_and_what_is_loose():
    rows = [row for row in _measured() if (row["case"], row["provider"]) != ("Small-1K", "liger_flash")]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_fa4" else row for row in rows]
    text = readme.results(rows)
    assert "not measured" in _line(text, "Small-1K") and "Liger rope + FA4 ~" in text and "\n~: " in text
    with pytest.raises(ValueError, match="Long-64K, forward"):
        readme.results([row for row in rows if (row["case"], row["provider"]) != ("Long-64K", "fused")])


def test_results_compare_with_what_was_measured():
    text = readme.results([row for row in _measured() if row["provider"] != "liger_flash"])
    assert "| HF rope + SDPA |" in text and "not measured" not in text


def test_standing_counts_every_shape():
    rows = _change(_measured(), 1.9, provider="liger_flash", mode="graph", case="Llama7B-4K", **{"pass": "bwd"})
    text = readme.standing(rows)
    assert [cell.strip() for cell in _line(text, "Liger rope + SDPA flash").split("|")[2:-1]] == [
        "8 of 8",
        "1.50 to 1.50×",
        "7 of 8",
        "0.95 to 1.50×",
    ]
    assert "0 of 8" in _line(text, "bare FA4")
    assert "at: Llama7B-4K backward (0.95×)." in text
    assert "at: no shape." in readme.standing(_measured())
    short = readme.headline(rows)
    assert "at 7 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-2")
    assert "at 0 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-4")


def test_host_times_and_plan():
    text = readme.host(_measured())
    assert "| 80 | 80 |" in _line(text, "`rope_attention`") and "| 160 | 160 |" in _line(text, "HF rope + SDPA")
    assert "reason='x',\n     forward=F(),\n     backward=B(dkdv=1,\n         dq=2))" in readme.plan(_measured())
    for block in (readme.host, readme.plan, readme.headline):
        with pytest.raises(ValueError, match="no "):
            block([row for row in _measured() if row["provider"] != "fused"])


@pytest.mark.parametrize(("value", "text"), [(0.01326, "0.0133"), (0.44, "0.440"), (1.0, "1.00"), (113.8, "114")])
def test_milliseconds_have_three_digits(value, text):
    assert readme._ms(value) == text
    assert readme._ms(1234.5) in ("1234", "1235")


# Rows and files


def test_a_case_comes_from_one_run(tmp_path):
    early = [_row("Small-1K", name, "fwd", "graph", 1.0) for name in ("fused", "liger_flash", "liger_fa4")]
    late = [row | {"ms": 2.0, "date": "2026-11-22T00:00:00+00:00"} for row in early[:2]]
    other = [_row(case, "fused", "fwd", "graph", 9.0) for case in ("Small-1K", "Small-2K")]
    report.write_lines(tmp_path / "a.jsonl", early + late)
    report.write_lines(tmp_path / "b.jsonl", other)
    rows = readme.read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert {(r["case"], r["provider"]): r["ms"] for r in rows} == {
        ("Small-1K", "fused"): 2.0,
        ("Small-1K", "liger_flash"): 2.0,
        ("Small-2K", "fused"): 9.0,
    }


def test_command_writes_checks_and_complains(tmp_path, capsys):
    file, rows = tmp_path / "README.md", tmp_path / "rows.jsonl"
    file.write_text("# before\n" + "".join(_OPEN.format(name) for name in readme.BLOCKS) + "after\n", encoding="utf-8")
    report.write_lines(rows, _measured())
    arguments = ["readme", str(rows), "--readme", str(file)]
    assert command.main([*arguments, "--check"]) == 1
    assert "headline, results, standing, host, plan" in capsys.readouterr().err
    assert "1.50×" not in file.read_text(encoding="utf-8")
    assert command.main(arguments) == 0 and "rewrote headline" in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# before\n") and text.endswith("after\n") and text.count("1.50×") > 16
    assert command.main([*arguments, "--check"]) == 0
    assert command.main(arguments) == 0 and "matches" in capsys.readouterr().out
    file.write_text(text.replace("1.50×", "2.50×", 1), encoding="utf-8")
    assert command.main([*arguments, "--check"]) == 1
    assert command.main(["readme", str(tmp_path / "none.jsonl"), "--readme", str(file)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no <!-- bench"),
        (_OPEN.format("nonsense"), "unknown block nonsense"),
        ("<!-- bench:results -->\n", "needs one"),
        ("<!-- bench:results -->\n<!-- bench:host -->\n<!-- bench:end -->\n<!-- bench:end -->\n", "needs one"),
    ],
)
def test_bad_markers_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        readme.rewrite(text, _measured())


def test_rows_of_two_cards_make_no_table():
    rows = _measured()
    rows[0] = rows[0] | {"gpu": "NVIDIA B200"}
    with pytest.raises(ValueError, match="one gpu.*B200, NVIDIA H200"):
        readme.rewrite(_OPEN.format("results"), rows)


# Plots


def test_the_overview_shows_both_passes_and_no_stumps():
    rows = [
        _row(f"Llama7B-{n}", name, part, "graph", 1.0)
        for n in ("512", "1K", "2K", "4K", "8K")
        for name in ("fused", "liger_flash", "liger_fa4", *(["compiled_fa4"] if n == "2K" else []))
        for part in ("fwd", "bwd")
    ]
    figure = plots.overview(rows + [_row("Small-1K", "fused", "fwd", "graph", 1.0)], "graph")
    assert [axis.get_title() for axis in figure.axes] == ["forward", "backward"]
    for axis in figure.axes:
        labels = [line.get_label() for line in axis.get_lines()]
        assert len(labels) == 3 and "rope_attention (ours)" in labels and "compiled rope + FA4" not in labels
        assert axis.get_ylim()[1] > max(max(line.get_ydata()) for line in axis.get_lines())
    assert "Llama7B" in figure.get_suptitle() and "causal" in figure.get_suptitle()
    plots._pyplot().close(figure)
    assert plots.overview([row for row in rows if row["pass"] == "fwd"], "graph") is None
    assert plots.overview([row for row in rows if row["case"] == "Llama7B-2K"], "graph") is None


def test_speedups_of_many_cases_are_a_figure_of_their_own(tmp_path):
    rows = [row for row in _measured() if row["mode"] == "graph" and row["pass"] == "fwd"]
    rows += [_row("Gemma-1K", name, "fwd", "graph", 1.0) for name in ("fused", "liger_flash", "bare_fa4")]
    files = {file.name for file in plots.draw_all(rows, tmp_path)}
    assert files == {"tflops_fwd_graph.png", "speedup_fwd_graph.png", "speedup_all_fwd_graph.png"}


# README.md itself


def _outside_blocks():
    return re.sub(r"<!-- (bench|rope|corope|models):\w+.*?<!-- \1:end -->", "", README, flags=re.DOTALL)


def test_figures_are_those_of_the_committed_rows(capsys):
    line = re.search(r"`python -m bench readme ([^`]+)`", _outside_blocks())
    files = [ROOT / name for name in shlex.split(line[1])]
    assert files
    assert command.main(["readme", *map(str, files), "--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("part", ["rope", "corope", "models"])
def test_the_other_benchmarks_figures_are_those_of_their_rows(part, capsys):
    rows = ROOT / "bench" / "results" / f"{part}-h200-2026-11-21.jsonl"
    assert command.main([part, "readme", str(rows), "--check"]) == 0, capsys.readouterr().err


def test_there_are_no_figures_beside_the_generated_ones():
    text = re.sub(r"```.*?```", "", _outside_blocks(), flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]*\s?(?:ms|µs|TFLOP/s|GB/s|×|%)", text) == []
