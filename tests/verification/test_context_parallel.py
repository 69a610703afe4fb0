"""``python -m verification --cp``: a table of calls that all ranks compute rightly; a wrong rank is seen."""

from verification import __main__ as verification
from verification.context_parallel import run


def test_a_run(ranks, capsys):
    asked = ["--cp", "--device", "cpu", "--dtype", "float32", "--filter", "window=9,5"]
    assert run(verification.parse(asked), ranks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("7 of 7 calls within tolerance on every rank")


def test_a_list_and_a_filter_without_a_match(capsys):
    asked = ["--cp", "--device", "cpu", "--dtype", "float32", "--filter"]
    assert run(verification.parse([*asked, "window=9,5", "--list"])) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names)) == 7 and all("window=9,5" in name for name in names)
    assert run(verification.parse([*asked, "no such case"])) == 2
    assert "no such case" in capsys.readouterr().err


def test_a_wrong_rank_is_seen():
    from dataclasses import replace

    import torch

    from fused_rope_attn.testing import Case, make_inputs, run_reference
    from verification.context_parallel import compared

    case = Case(1, 2, 1, 24, 24, 16, dtype=torch.float32)
    right = run_reference(make_inputs(case), case)
    found = {"o": right.o, "dk": right.dk}
    assert all(comparison.ok for comparison in compared(case, found))
    found["o"] = right.o.roll(1, dims=2)
    assert [comparison.ok for comparison in compared(case, found)] == [False, True]
    assert not compared(replace(case, window=(3, 0)), {"dk": right.dk})[0].ok
