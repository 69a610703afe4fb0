"""``python -m bench cp`` without a GPU: its cases, a run of two processes, its table and its plot."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import report
from bench.__main__ import main
from bench.cp import CP, KINDS, PROVIDERS, CpCase, RanksClock
from bench.runner import Run
from bench.suite import Options
from tests.support.bench import FACTS, WallClock


def rows():
    found = []
    for ranks, length, part in ((2, 32768, "fwd"), (2, 131072, "fwd"), (4, 32768, "bwd")):
        case = CpCase("plain", length, ranks)
        row = {"case": case.name, "shape": case.shape, "kind": "plain", "length": length, "pass": part, "mode": "eager"}
        row |= {"status": "ok", "detail": "", "ranks": ranks} | FACTS
        times = {"ms": 2.0, "p20": 2.0, "p80": 2.0, "rounds": [2.0]}
        found.append(row | times | {"provider": "fused", "label": "ours", "role": "ours", "efficiency": 0.975})
        absent = {"status": "missing", "detail": "no such thing", "role": "rival"}
        found.append(row | absent | {"provider": "torch", "label": "torch"})
    return found


def test_cases(capsys, monkeypatch):
    assert main(["cp", "--dry-run", "--cases", "p=2+packed+32k,p=2+plain-128k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["plain-128K", "P=2"], ["packed-32K", "P=2"]]
    assert main(["cp", "--cases", "nothing-like-it"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bench.command.environment", lambda: FACTS)
    assert main(["cp"]) == 2 and "torchrun --nproc-per-node P" in capsys.readouterr().err


def test_the_number_of_ranks_chooses_the_cases(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["cp", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.count("P=2") == 9 and "P=4" not in text
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["cp", "--dry-run"]) == 2 and "no case of 3 ranks" in capsys.readouterr().err


def test_documents_fill_the_sequence():
    limits = CpCase("packed", 131072, 2).documents
    lengths = [b - a for a, b in zip(limits, limits[1:])]
    assert limits[0] == 0 and limits[-1] == 131072 and max(lengths) <= 32768 and min(lengths) > 0


def test_who_is_measured():
    found = {name: set(provider.only) for name, provider in PROVIDERS.items()}
    assert found.pop("torch") == {"plain"}
    assert all(kinds == set(KINDS) for kinds in found.values())
    names = [provider.name for provider in CP.providers(CpCase("packed", 1024, 2), ())]
    assert names == ["one", "fused"]


class _RanksOfCpus(RanksClock):
    """The clock of ranks, by wall time."""

    synchronize = release = WallClock.synchronize
    _times = WallClock.sample


def _rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    clock = _RanksOfCpus(torch.device("cpu"), dist.group.WORLD)
    made = Run(CP, Options(rounds=2, round_ms=1.0), clock, FACTS, lambda case: CP.providers(case, ["one", "fused"]))
    for block in made.rows([CpCase(kind, 64, 2) for kind in KINDS]):
        report.write_lines(folder / f"{rank}.jsonl", block)
    dist.destroy_process_group()


def test_all_ranks_time_the_same_calls(tmp_path):
    """Times are those of the slowest rank on all of them, so that any rank's rows will do."""
    mp.spawn(_rank, args=(tmp_path,), nprocs=2)
    found, other = (report.read_file(tmp_path / f"{rank}.jsonl") for rank in range(2))
    assert found == other and {row["status"] for row in found} == {"ok"}, found
    assert {(row["case"], row["provider"], row["pass"]) for row in found} == {
        (f"{kind}-64", name, part) for kind in KINDS for name in ("one", "fused") for part in ("fwd", "bwd")
    }
    assert all(row["shape"] == "P=2" and len(row["rounds"]) == 2 for row in found)
    assert all(row["efficiency"] > 0 for row in found if row["provider"] == "fused")


def test_text_names_who_was_not_timed():
    text = report.case_report(rows()[:2])
    assert "97.5%" in text and "plain-32K" in text and "! torch (fwd eager): missing: no such thing" in text
