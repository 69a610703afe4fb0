"""``python -m verification --cp``: a table of calls that all ranks compute rightly; a wrong rank is seen."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from verification import __main__ as verification, context_parallel
from verification.context_parallel import CpCheck, compared
from verification.testing import Case, make_inputs, run_reference

ASKED = ["--cp", "--device", "cpu", "--dtype", "float32", "--jobs", "0", "--json", "", "--filter"]
SOME = "softcap=5.0 sinks"


def test_a_run_a_list_and_an_error_of_a_rank(ranks, capsys, monkeypatch):
    monkeypatch.setattr(context_parallel, "pool_of", lambda device: ranks)
    assert verification.main([*ASKED, SOME, "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names and len(names) == len(set(names)) and all(SOME in name for name in names)
    assert verification.main([*ASKED, SOME]) == 0
    assert f" not, 0 skipped; {len(names)} cases" in capsys.readouterr().out
    assert verification.main([*ASKED, "no such case"]) == 2
    assert "no such case" in capsys.readouterr().err
    wrong = CpCheck(Case(1, 2, 1, 24, 24, 16), (0, 1), {"sharding": "ring"})
    monkeypatch.setattr(context_parallel, "cp_calls", lambda *_: st.just(wrong))
    monkeypatch.setattr(context_parallel, "DRAWN", 1)
    assert verification.main([*ASKED, ""]) == 1
    assert "sharding must be" in capsys.readouterr().out


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
