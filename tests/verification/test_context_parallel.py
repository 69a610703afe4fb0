"""``python -m verification --cp``: a table of calls that all ranks compute rightly; a wrong rank is seen."""

from dataclasses import replace

import torch

from verification import __main__ as verification, context_parallel
from verification.context_parallel import compared
from verification.testing import Case, make_inputs, run_reference

ASKED = ["--cp", "--device", "cpu", "--dtype", "float32", "--jobs", "0", "--json", "", "--filter"]


def test_a_run(ranks, capsys, monkeypatch):
    monkeypatch.setattr(context_parallel, "pool_of", lambda device: ranks)
    assert verification.main([*ASKED, "window=9,5"]) == 0
    assert "35 of 35 tensors within tolerance, 0 not, 0 skipped; 7 cases" in capsys.readouterr().out


def test_an_error_of_a_rank_fails(ranks, capsys, monkeypatch):
    monkeypatch.setattr(context_parallel, "pool_of", lambda device: ranks)
    monkeypatch.setattr(context_parallel, "_cases", lambda *_: [(Case(1, 2, 1, 24, 24, 16), {"sharding": "ring"})])
    assert verification.main([*ASKED, "(0, 1)"]) == 1
    assert "sharding must be" in capsys.readouterr().out


def test_a_list_and_a_filter_without_a_match(capsys):
    assert verification.main([*ASKED, "window=9,5", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names)) == 7 and all("window=9,5" in name for name in names)
    assert verification.main([*ASKED, "no such case"]) == 2
    assert "no such case" in capsys.readouterr().err


def test_a_wrong_rank_is_seen():
    case = Case(1, 2, 1, 24, 24, 16, dtype=torch.float32)
    right = run_reference(make_inputs(case), case)
    found = {"o": right.o, "dk": right.dk}
    assert all(comparison.ok for comparison in compared(case, found))
    found["o"] = right.o.roll(1, dims=2)
    assert [comparison.ok for comparison in compared(case, found)] == [False, True]
    assert not compared(replace(case, window=(3, 0)), {"dk": right.dk})[0].ok
    padded = {"o": right.o}  # rows after the first 20 are padding: they must be zero
    assert not compared(case, padded, total=20)[0].ok
