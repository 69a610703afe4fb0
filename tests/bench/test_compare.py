"""``python -m bench compare``: which rows of two files belong together, what is noise, and what is said of it."""

import pytest

from bench import __main__ as command
from bench import report
from bench.compare import moves, spread
from bench.environment import RESULTS
from tests.support.bench import attention_row

_CASES = ("Small-1K", "Llama7B-2K", "Llama7B-4K", "Llama70B-1K")
_RIVALS = ("hf_sdpa", "liger_fa4", "bare_cudnn", "bare_fa4")


def _times(ms, wide=0.002):
    """A row's time with rounds around it."""
    return {"ms": ms, "rounds": [ms * (1 + wide * shift) for shift in (-1, 0, 1, -0.5, 0.5)]}


def _rows(ours=1.0, others=1.0, **extra):
    """Four cases of ours and four rivals; factors on their times of 1 ms."""
    people = {"fused": ours} | dict.fromkeys(_RIVALS, others)
    return [attention_row(case, name, **_times(factor), **extra) for case in _CASES for name, factor in people.items()]


def _verdicts(a, b):
    """Return (case, provider, pass, figure) -> verdict, where there is one."""
    found = {(m.key[0], m.key[2], m.key[3], m.key[5]): m.verdict for m in moves(a, b)}
    return {key: verdict for key, verdict in found.items() if verdict}


@pytest.fixture
def run(tmp_path, capsys):
    """Compares two lists of rows: (exit status, what was printed)."""

    def compared(a, b, *options):
        for name, rows in (("a", a), ("b", b)):
            (tmp_path / f"{name}.jsonl").unlink(missing_ok=True)
            report.write_lines(tmp_path / f"{name}.jsonl", rows)
        status = command.main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *options])
        out, err = capsys.readouterr()
        return status, out + err

    return compared


# Arithmetic


def test_the_spread_of_a_row_is_that_of_its_rounds():
    row = _times(2.0, 0.1)
    assert spread(row, "ms") == pytest.approx(0.06)  # 20 and 80 % of the rounds are 0.06 below and above
    assert spread({"ms": 2.0}, "ms") == spread({"peak_mib": 64.0}, "peak_mib") == 0


def test_what_rivals_moved_by_is_noise_of_ours():
    """Rounds that agree to a thousandth say nothing about another process; rivals that moved by 5 % do."""
    b = [row | _times(row["ms"] * (1.05 if number % 2 else 0.95)) for number, row in enumerate(_rows())]
    assert not _verdicts(_rows(), b)
    calm = [row | _times(1.06) if row["role"] == "ours" else row for row in _rows()]
    assert _verdicts(_rows(), calm) == {(case, "fused", "fwd", "ms"): "worse" for case in _CASES}


def test_the_rounds_of_a_file_are_noise():
    b = [row | _times(1.1, 0.2) if row["role"] == "ours" else row for row in _rows()]
    assert not _verdicts(_rows(), b)


def test_one_rival_that_moved_does_not_hide_ours():
    b = _rows(1.1)
    b[1] |= _times(1.5)
    found = _verdicts(_rows(), b)
    assert found.pop(("Small-1K", "hf_sdpa", "fwd", "ms")) == "worse"
    assert found == {(case, "fused", "fwd", "ms"): "worse" for case in _CASES}


def test_on_another_card_rivals_say_what_is_unmoved():
    """Everything takes 1.4 times as long on the other card, ours 1.5 times at one case and 1.3 times at another."""
    b = _rows(1.4, 1.4, gpu="NVIDIA H100")
    b[0] |= _times(1.5)
    b[5] |= _times(1.3)
    assert _verdicts(_rows(), b) == {
        ("Small-1K", "fused", "fwd", "ms"): "worse",
        ("Llama7B-2K", "fused", "fwd", "ms"): "better",
    }


def test_energy_and_memory_are_compared_in_addition_to_the_time():
    def rows(mj, **extra):
        found = _rows(**extra)
        return [row | {"mode": "load", "mj": mj, "mj_rounds": [mj] * 4} for row in found if row["role"] == "ours"]

    found = _verdicts(rows(100.0), rows(90.0, peak_mib=96.0))
    assert found == {
        (case, "fused", "fwd", figure): verdict
        for case in _CASES
        for figure, verdict in {"mj": "better", "peak_mib": "worse"}.items()
    }


# Files


def test_rows_are_matched_by_what_identifies_them():
    """The order and all else in a row mean nothing; case, shape, provider, pass and mode do."""
    rows = _rows() + [
        attention_row("Small-1K", "fused", 3.0, part="bwd"),
        attention_row("Small-1K", "fused", 4.0, mode="eager"),
    ]
    found = moves(rows, [row | {"commit": "other", "label": "x"} for row in rows[::-1]])
    assert len(found) == 2 * len(rows) and all(move.ratio == 1 for move in found)  # ms and MiB


@pytest.mark.parametrize(
    ("text", "message"), [("", "one GPU, but holds those of none"), ("no json\n", "is no result row")]
)
def test_what_is_no_file_of_rows_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert command.main(["compare", str(path), str(path)]) == 2
    assert message in capsys.readouterr().err
    assert command.main(["compare", str(tmp_path / "none.jsonl"), str(path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_committed_rows_of_two_releases_of_triton_differ_in_ours_alone():
    """Triton compiles nothing of the rivals: none of their figures may be called moved."""
    a, b = (report.read_file(RESULTS / f"h200-2026-11-23-triton-{release}.jsonl") for release in ("3.6.0", "3.9.0"))
    found = _verdicts(a, b)
    assert {provider for _, provider, _, _ in found} == {"fused"}
    assert found["Long-64K", "fused", "bwd", "ms"] == found["Llama7B-512", "fused", "fwd", "ms"] == "better"


# The command


def test_nothing_moved(run):
    status, text = run(_rows(), _rows(1.01, 1.01))
    assert status == 0 and "Nothing moved" in text and "a.jsonl: NVIDIA H200, bfloat16, driver 580" in text
    status, text = run(_rows(), _rows(), "--all")
    assert status == 0 and text.count("1.000  0.9") == 2 * len(_rows()) == 40


def test_what_got_worse_is_printed_first_and_makes_the_status_1(run):
    b = _rows()
    b[0] |= _times(0.8)  # ours at Small-1K
    b[5] |= _times(1.3)  # ours at Llama7B-2K
    status, text = run(_rows(), b)
    lines = [line.split() for line in text.splitlines() if "(ours)" in line]
    assert status == 1 and [line[0] for line in lines] == ["Llama7B-2K", "Small-1K"]
    assert [(line[-5], line[-1]) for line in lines] == [("1.300", "worse"), ("0.800", "better")]


def test_a_rival_that_moved_is_shown_and_is_no_failure(run):
    b = [row | (_times(1.5) if row["provider"] == "bare_fa4" and row["case"] == "Small-1K" else {}) for row in _rows()]
    status, text = run(_rows(), b)
    assert status == 0 and "bare_fa4" in text and "worse" in text


def test_what_has_no_time_any_more_is_named_with_the_reason(run):
    def without(name, **why):
        return [
            {key: value for key, value in row.items() if key not in ("ms", "rounds")} | why
            if (row["case"], row["provider"]) == ("Small-1K", name)
            else row
            for row in _rows()
        ]

    gate = without("fused", status="failed", detail="dq", **{"pass": None, "mode": None})
    status, text = run(_rows(), gate)
    assert status == 1 and "! Small-1K: fused (auto): FAILED the gate: dq" in text
    assert run(gate, gate)[0] == 0 and run(gate, _rows())[0] == 0
    status, text = run(_rows(), without("liger_fa4", status="no-graph", detail="why"))
    assert status == 0 and "! Small-1K: Liger rope + FA4 (fwd graph): no-graph: why" in text
    other_mode = without("fused", status="no-graph", detail="why", mode="eager")
    assert run(_rows(), other_mode)[0] == 0, "A has no time of that mode either"


def test_help_and_files_that_cannot_be_compared(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["compare", "--help"])
    assert "rivals" in capsys.readouterr().out
    status, text = run(_rows(), [row | {"case": "elsewhere"} for row in _rows()])
    assert status == 2 and "no measurement in common" in text
    status, text = run([*_rows(), *_rows(gpu="NVIDIA H100")], _rows())
    assert status == 2 and "one GPU, but holds those of NVIDIA H100, NVIDIA H200" in text
