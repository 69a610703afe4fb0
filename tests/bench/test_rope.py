"""``python -m bench rope``: its cases, its gate, its rows and what is written from them."""

import pytest
import torch

from bench import report
from bench.__main__ import main
from bench.report import case_report
from bench.rope import COPY, OURS, PROVIDERS, ROPE, RopeCase, RopeProvider
from tests.support.bench import run as run_suite

TINY = RopeCase("Tiny", 2, (4, 2), 16, 8, ("models",), torch.float32)
NORMED = RopeCase("Normed", 1, (2, 1), 16, 8, ("norms",), torch.float32, norms=True)
WIDE = RopeCase("Wide", 1, (2, 2), 256, 8, ("wide",), torch.float32)


def select(names):
    return ROPE.providers(TINY, names)


def run(providers, *problems, **options):
    return run_suite(ROPE, *problems, providers=providers, **options)


@pytest.fixture(scope="module")
def rows():
    return run(select([OURS, COPY]), TINY, WIDE, NORMED)[0]


def test_everybody_agrees_with_float64_and_is_timed(rows):
    timed = {(row["case"], row["pass"], row["provider"]) for row in report.timed(rows)}
    for case in ("Tiny-16", "Wide-256", "Normed-16"):
        for part in ("fwd", "bwd"):
            assert {(case, part, name) for name in (OURS, COPY)} <= timed
    for row in report.timed(rows):
        # The gradient of a norm reads what was normed too.
        moved = 1.5 if row["norms"] and row["pass"] == "bwd" and row["provider"] != COPY else 1.0
        assert row["gb_s"] == pytest.approx(moved * row["bytes"] / row["ms"] * 1e-6) and len(row["rounds"]) == 2
        assert row["of_copy"] > 0 and (row["role"] == "ours") == (row["provider"] == OURS)


def test_bytes_and_names():
    assert TINY.bytes == 2 * 2 * 6 * 16 * 8 * 4
    assert TINY.shape == "B2 H4+2 N16 D8 fp32 half" and TINY.name == "Tiny-16"
    assert {case.name for case in ROPE.choose("wide")} >= {"Wide-256", "Wide-1K"}
    assert len({(case.name, case.shape) for case in ROPE.cases}) == len(ROPE.cases) == 24


def scripted(name, run, **changes):
    return RopeProvider(name, name, run=run, **changes)


def wrong(xs, tables, weights):
    return [x * 1.01 for x in xs]


def broken(xs, tables, weights):
    raise RuntimeError("no such kernel\nand more")


def test_who_is_wrong_broken_missing_or_unsupported_is_named_and_not_timed():
    people = [
        scripted("wrong", wrong),
        scripted("broken", broken),
        scripted("absent", wrong, missing=lambda: "pip install absent"),
        scripted("no copy", wrong, role="ceiling"),
    ]
    found = {row["provider"]: row for row in run(people, TINY)[0]}
    statuses = {"wrong": "failed", "broken": "error", "absent": "missing", "no copy": "failed"}
    assert {name: row["status"] for name, row in found.items()} == statuses
    assert found["broken"]["detail"] == "RuntimeError: no such kernel"
    assert "pip install absent" in case_report(list(found.values()))


def test_norms_are_held_to_float64_too():
    def wrong_norm(xs, tables, weights):
        return PROVIDERS[OURS].run(xs, tables, [1.01 * weight for weight in weights])

    def wrong_gradient(xs, tables, weights):
        weights = [weight.detach() + (weight - weight.detach()) * 1.01 for weight in weights]
        return PROVIDERS[OURS].run(xs, tables, weights)

    people = [scripted("wrong", wrong_norm), scripted("gradient", wrong_gradient)]
    found = {row["provider"]: row for row in run(people, NORMED)[0]}
    status = {name: row["status"] for name, row in found.items()}
    assert status == {"wrong": "failed", "gradient": "failed"}
    assert "dweight" in found["gradient"]["detail"]


def test_in_place_rivals_work_on_their_own_memory():
    def in_place(xs, tables, weights):
        outs = PROVIDERS[OURS].run(xs, tables, weights)
        with torch.no_grad():
            for x, out in zip(xs, outs):
                x.data.copy_(out)
        return outs

    found, _ = run([scripted("greedy", in_place, in_place=True), *select([OURS])], TINY)
    assert {row["status"] for row in found} == {"ok"}


def test_rows_on_disk(rows, tmp_path):
    assert "Tiny-16" in case_report(rows) and "%" in case_report(rows)
    file = tmp_path / "rows.jsonl"
    report.write_lines(file, rows)
    assert len(report.read_file(file)) == len(rows)


def test_command_line(capsys):
    assert main(["rope", "--dry-run", "--cases", "wide+bf16"]) == 0
    text = capsys.readouterr().out
    assert "Wide-256" in text and "Llama3-8B" not in text and "fp32" not in text and "liger" in text
    for arguments in (["--providers", "no"], ["--passes", "no"], ["--cases", "no such"], ["--mode", "load"]):
        assert main(["rope", "--dry-run", *arguments]) == 2
    if not torch.cuda.is_available():
        assert main(["rope"]) == 2 and "no GPU" in capsys.readouterr().err
