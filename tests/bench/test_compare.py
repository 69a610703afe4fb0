"""``python -m bench compare``: which rows of two files belong together, what is noise, and what is said of it."""

import json
import math

import pytest

from bench import __main__ as command
from bench import report
from bench.compare import CERTAIN, Key, Move, lost, moves, read, within_noise
from bench.environment import RESULTS
from bench.timing import quantile
from tests.support.bench import attention_row

_CASES = ("Small-1K", "Llama7B-2K", "Llama7B-4K", "Llama70B-1K")
_RIVALS = ("hf_sdpa", "liger_fa4", "bare_cudnn", "bare_fa4")


def _times(ms, spread=0.002):
    """A row's time with rounds around it."""
    return {"ms": ms, "rounds": [ms * (1 + spread * shift) for shift in (-1, 0, 1, -0.5, 0.5)]}


def _rows(ours=1.0, others=1.0, **extra):
    """Four cases of ours and four rivals; factors on their times of 1 ms."""
    return [
        attention_row(case, name, **_times(factor * (1 + 0.001 * place)), **extra)
        for case in _CASES
        for place, (name, factor) in enumerate([("fused", ours), *((rival, others) for rival in _RIVALS)])
    ]


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


def test_the_noise_of_rounds_is_the_standard_error_of_their_median():
    assert within_noise([1.0, 1.0, 1.0]) == within_noise([1.0]) == within_noise([]) == 0
    few, many = [0.99, 1.0, 1.01], [0.99, 1.0, 1.01] * 4
    assert within_noise(few) == pytest.approx(1.2533 * 0.01 / math.sqrt(3), rel=0.01)
    assert within_noise(many) < 0.6 * within_noise(few)


def test_a_move_is_more_than_the_threshold_and_more_than_noise():
    key = Key("c", "s", "", "fused", "fwd", "graph", "ms")
    assert Move(key, True, 1.0, 1.1, 1.1, 0.01).verdict(0.02) == "worse"
    assert Move(key, True, 1.0, 0.9, 0.9, 0.01).verdict(0.02) == "better"
    assert Move(key, True, 1.0, 1.1, 1.1, 0.05).verdict(0.02) == ""  # noise explains it
    assert Move(key, True, 1.0, 1.01, 1.01, 1e-4).verdict(0.02) == ""  # certain, and too little
    assert Move(key, True, 1.0, 1.1, 1.1, 0.01).times_noise == pytest.approx(math.log(1.1) / 0.01)
    assert Move(key, True, 64.0, 64.0, 1.0, 0.0).times_noise == 0
    assert Move(key, True, 64.0, 96.0, 1.5, 0.0).verdict(0.02) == "worse"


def _file(rows):
    return {
        Key(case, "", "", name, "fwd", "graph", "ms"): {
            "ms": quantile(rounds, 0.5),
            "rounds": rounds,
            "status": "ok",
            "role": "ours" if name == "fused" else "rival",
        }
        for (case, name), rounds in rows.items()
    }


def test_what_rivals_moved_by_is_noise_of_ours():
    """Rounds that agree to a thousandth say nothing about another process; rivals that moved by 3 % do."""
    one = _file({(case, name): [1.0] * 5 for case in "abc" for name in ("fused", "r", "s")})
    other = {(case, "fused"): [1.05] * 5 for case in "abc"}
    shifts = dict(zip(((case, name) for case in "abc" for name in "rs"), (0.97, 1.03, 0.97, 1.03, 0.97, 1.03)))
    other |= {key: [shift] * 5 for key, shift in shifts.items()}
    for rivals, moved in ((other, ""), ({key: found for key, found in other.items() if key[1] == "fused"}, "worse")):
        mine = [move for move in moves(one, _file(rivals)) if move.key.provider == "fused"]
        assert [move.verdict(0.02) for move in mine] == [moved] * 3


def test_the_yardstick_takes_out_a_drift_that_differs_from_round_to_round():
    """B's clock falls by up to 20 % within the run, for all providers; ours is 5 % slower beyond that."""
    drift = (1.0, 1.05, 1.1, 1.15, 1.2)
    one = _file({("a", name): [1.0, 1.001, 0.999, 1.0, 1.0] for name in ("fused", "bare_cudnn")})
    other = _file(
        {
            ("a", "fused"): [1.05 * x for x in drift],
            ("a", "bare_cudnn"): list(drift),
        }
    )
    (plain,) = (move for move in moves(one, other) if move.ours)
    (held,) = moves(one, other, "bare_cudnn")
    assert plain.ratio == pytest.approx(1.155) and plain.noise > 0.03
    assert held.ratio == pytest.approx(1.05) and held.noise < 0.002 and held.verdict(0.02) == "worse"
    assert (held.a, held.b) == pytest.approx((1.0, 1.155))  # what is printed is what was measured


# Files


def test_rows_are_matched_by_what_identifies_them(tmp_path):
    """The order and all else in a row mean nothing; case, shape, provider, pass and mode do."""
    rows = _rows() + [
        attention_row("Small-1K", "fused", 3.0, part="bwd"),
        attention_row("Small-1K", "fused", 4.0, mode="eager"),
    ]
    report.write_lines(tmp_path / "a.jsonl", rows)
    report.write_lines(tmp_path / "b.jsonl", [row | {"commit": "other", "label": "x"} for row in rows[::-1]])
    a, b = read(tmp_path / "a.jsonl"), read(tmp_path / "b.jsonl")
    assert a.keys() == b.keys() and {key.provider for key, row in a.items() if row["role"] == "ours"} == {"fused"}
    found = moves(a, b)
    assert len(found) == 2 * len(rows) and all(move.ratio == 1 for move in found)  # ms and MiB
    assert not lost(a, b) and not lost(b, a)


def test_the_later_run_of_a_file_counts(tmp_path):
    late = [row | {"date": "2026-12-01T00:00:00+00:00"} for row in _rows(2.0)]
    report.write_lines(tmp_path / "a.jsonl", _rows(1.0) + late)
    found = read(tmp_path / "a.jsonl")
    assert {row["ms"] for key, row in found.items() if key[3:] == ("fused", "fwd", "graph", "ms")} == {2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("no json\n", "no result rows"),
        ('{"case": 1}\n', "no result row"),
    ],
)
def test_what_is_no_file_of_rows_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert command.main(["compare", str(path), str(path)]) == 2
    assert message in capsys.readouterr().err
    assert command.main(["compare", str(tmp_path / "none.jsonl"), str(path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_committed_file_of_rows_can_be_read_and_equals_itself(path):
    file = read(path)
    found = moves(file, file)
    assert found and all(move.ratio == 1 for move in found) and any(move.ours for move in found)
    assert not lost(file, file)
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {key.case for key in file} <= {row["case"] for row in values}


def test_both_checkouts_of_a_comparison_are_ours(tmp_path):
    environment = {"gpu": "toy", "triton": "3.6.0"}
    row = {"case": "tiny", "part": "forward", "unit": "ms", "difference": 0.0, "environment": environment}
    lines = [row | {"before": [2.0, 2.0, 3.0], "after": [1.0, 1.0, 1.5]}]
    lines.append(row | {"part": "forward, host", "unit": "us", "before": [80.0] * 3, "after": [60.0] * 3})
    lines.append(row | {"part": "backward", "error": "the results differ"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = read(path)
    values = {(key.provider, key.part, key.mode): row["ms"] for key, row in file.items() if "ms" in row}
    assert values == {
        ("before", "forward", "graph"): 2.0,
        ("after", "forward", "graph"): 1.0,
        ("before", "forward", "host"): pytest.approx(0.08),
        ("after", "forward", "host"): pytest.approx(0.06),
    }
    assert all(row["role"] == "ours" and row["triton"] == "3.6.0" for row in file.values())
    assert {row["detail"] for row in file.values() if row["status"] == "failed"} == {"the results differ"}


# The command


def test_nothing_moved(run):
    status, text = run(_rows(), _rows(1.01, 1.01))
    assert status == 0 and "Ours: 0 worse, 0 better, 8 unmoved" in text and "worse  " not in text


def test_what_got_worse_is_printed_first_and_makes_the_status_1(run):
    b = _rows()
    b[0] |= _times(1.3)  # ours at Small-1K
    b[5] |= _times(0.8)  # ours at Llama7B-2K
    status, text = run(_rows(), b)
    assert status == 1 and "Ours: 1 worse, 1 better, 6 unmoved" in text
    table = [line for line in text.splitlines() if "(ours)" in line]
    assert [line.split()[0] for line in table] == ["Small-1K", "Llama7B-2K"]
    assert "1.300" in table[0] and table[0].endswith("worse") and "0.800" in table[1] and table[1].endswith("better")
    assert run(_rows(), b, "--threshold", "0.4")[0] == 0
    assert run(b, _rows())[0] == 1  # the other way round another case is the worse one
    assert run(_rows(), b, "--only", "hf_sdpa")[0] == 0
    assert run(_rows(), b, "--only", "Llama70B-1K")[0] == 0
    status, text = run(_rows(), b, "--all", "--only", "ms")
    ratios = [
        float(line.split("ms")[-1].split()[0])
        for line in text.splitlines()
        if " graph  " in line and " ms " in line and "%" in line
    ]
    assert len(ratios) == 20 and ratios == sorted(ratios, reverse=True)


def test_a_rival_that_moved_is_shown_and_is_no_failure(run):
    b = [row | (_times(1.5) if row["provider"] == "bare_fa4" and row["case"] == "Small-1K" else {}) for row in _rows()]
    status, text = run(_rows(), b)
    assert status == 0 and "Others: 1 worse" in text and "bare_fa4" in text


def test_two_machines_are_compared_by_a_yardstick(run):
    """Everything takes 1.4 times as long on the other card, ours 1.5 times."""
    a, b = _rows(), _rows(1.5, 1.4, gpu="NVIDIA H100")
    text = run(a, b)[1]
    assert "a.jsonl: NVIDIA H200, bfloat16, driver 580" in text and "b.jsonl: NVIDIA H100, bfloat16" in text
    status, text = run(a, b, "--yardstick", "bare_cudnn", "--only", "ms")
    assert status == 1 and "Ours: 4 worse" in text and "Others: 0 worse, 0 better, 12 unmoved" in text
    assert f"{1.5 / 1.4:.3f}" in text and "over those of bare_cudnn" in text
    left = [row for row in b if (row["case"], row["provider"]) != ("Small-1K", "bare_cudnn")]
    assert "Ours: 3 worse" in run(a, left, "--yardstick", "bare_cudnn", "--only", "ms")[1]
    for name, message in (("fused", "fused is ours"), ("nobody", "nobody is not timed in both files")):
        status, text = run(a, b, "--yardstick", name)
        assert status == 2 and message in text and "bare_cudnn" in text


def test_memory_is_compared_as_it_is(run):
    """It has no rounds, no noise, and no clock that a yardstick could take out."""
    b = _rows(2.0, 2.0, peak_mib=96.0)
    status, text = run(_rows(), b, "--yardstick", "bare_cudnn", "--only", "peak_mib")
    assert status == 1 and "64 MiB" in text and "1.500" in text and "Ours: 4 worse" in text


def test_energy_is_compared_beside_the_time(run):
    def rows(mj):
        return [
            row | {"mode": "load", "mj": mj, "mj_rounds": [mj * (1 + 1e-3 * i) for i in range(4)]} for row in _rows()
        ]

    status, text = run(rows(100.0), rows(90.0), "--only", "fused+ms,fused+mj", "--all")
    assert status == 0 and "0.900" in text and "100 mJ" in text and "Ours: 0 worse" in text
    # All of them use less: what rivals moved by is noise, so that it takes more than that to be better.
    assert "Ours: 0 worse, 0 better, 8 unmoved" in text
    others = [
        row if row["role"] == "ours" else row | {"mj": 100.0, "mj_rounds": [100.0, 100.1, 100.2, 100.3]}
        for row in rows(90)
    ]
    assert "Ours: 0 worse, 4 better, 4 unmoved" in run(rows(100.0), others, "--only", "ms,mj")[1]


def test_rows_of_one_file_alone_are_named(run):
    a = [row for row in _rows() if row["provider"] != "bare_fa4"]
    b = [row for row in _rows() if row["case"] != "Llama7B-4K"]
    b[0] = {key: value for key, value in b[0].items() if key not in ("ms", "rounds")} | {
        "status": "failed",
        "detail": "dq",
    }
    status, text = run(a, b)
    assert status == 1, "what of ours is not measured any more is a failure"
    assert "Measured in A, not in B:\n  fused fwd graph (failed: dq): Small-1K\n" in text
    assert "  hf_sdpa fwd graph: Llama7B-4K" in text
    assert "Measured in B, not in A:\n  bare_fa4 fwd graph: Small-1K, Llama7B-2K, Llama70B-1K" in text
    missing = {"status": "missing", "detail": "pip install x", "pass": None, "mode": None}
    b = [row | missing if row["provider"] == "liger_fa4" else row for row in _rows()]
    status, text = run(_rows(), b)
    assert status == 0 and "liger_fa4 fwd graph (missing: pip install x): Small-1K" in text
    assert "Measured in B, not in A:" in run(b, _rows())[1]


def test_what_is_left_out_still_tells_the_noise(run):
    """Rivals moved by 5 %, some up and some down: ours at one case, asked for alone, did not move by more."""
    b = [row | _times(row["ms"] * (1.05 if number % 2 else 0.95)) for number, row in enumerate(_rows())]
    for only in ("ms", "fused+ms", "fused+ms+Small-1K"):
        status, text = run(_rows(), b, "--only", only)
        assert status == 0 and "Ours: 0 worse, 0 better" in text
    assert "hf_sdpa" not in text and "Llama7B" not in text


def test_wrong_options_are_named(run):
    for options, message in (
        (("--threshold", "2"), "--threshold"),
        (("--only", "nobody"), "--only nobody leaves nothing; it takes Small-1K"),
        (("--only", "fused+bwd"), "leaves nothing"),
    ):
        status, text = run(_rows(), _rows(), *options)
        assert status == 2 and message in text
    status, text = run(_rows(), [row | {"case": "elsewhere"} for row in _rows()])
    assert status == 2 and "no measurement in common" in text
    status, text = run([*_rows(), *_rows(gpu="NVIDIA H100")], _rows())
    assert status == 2 and "one GPU, but holds those of NVIDIA H100, NVIDIA H200" in text


def test_committed_rows_of_two_releases_of_triton_differ_in_ours_alone():
    """Nothing of the rivals is compiled by Triton: of their 224 rows none may be called moved."""
    a, b = (read(RESULTS / f"h200-2026-11-23-triton-{release}.jsonl") for release in ("3.6.0", "3.9.0"))
    found = [move for move in moves(a, b, "bare_cudnn") if move.key[5:] == ("graph", "ms")]
    verdicts = {(move.key.provider, move.key.case, move.key.part): move.verdict(0.02) for move in found}
    assert len([1 for name, *_ in verdicts if name != "fused"]) == 224
    assert not any(verdict for (name, *_), verdict in verdicts.items() if name != "fused")
    assert verdicts["fused", "Long-64K", "bwd"] == "better" and verdicts["fused", "Llama7B-512", "fwd"] == "better"
    assert quantile([move.noise for move in found], 0.5) < 0.02 and CERTAIN > 1
