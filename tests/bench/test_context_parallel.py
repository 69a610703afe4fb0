"""``python -m bench cp`` without a GPU: its cases, and a run of two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import report
from bench.__main__ import main
from bench.cp import CP, KINDS, CpCase, RanksClock
from bench.runner import Run
from bench.suite import Options
from tests.support.bench import FACTS, WallClock


def test_the_number_of_ranks_chooses_the_cases(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["cp", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.count("P=2") == 9 and "P=4" not in text
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["cp", "--dry-run"]) == 2 and "no case of 3 ranks" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node P"):
        CP.clock(torch.device("cpu"), Options())


class _RanksOfCpus(RanksClock):
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
    one = {(row["case"], row["pass"]): row["rounds"] for row in found if row["provider"] == "one"}
    for row in (row for row in found if row["provider"] == "fused"):
        ratios = sorted(a / b / 2 for a, b in zip(one[row["case"], row["pass"]], row["rounds"]))
        assert row["efficiency"] == pytest.approx(sum(ratios) / 2)
