"""``python -m bench`` as on a GPU, at tiny cases on the CPU."""

import importlib
from dataclasses import replace

import pytest
import torch

from bench import __main__ as bench, report
from bench.suite import by_name
from tests.support.bench import FACTS, WallClock
from tests.support.internals import rotate_without_the_kernel


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    rotate_without_the_kernel(monkeypatch)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Run a command at ``cases``, with ``people`` or the providers that are chosen: (exit status, rows of its file)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bench.command.environment", lambda: FACTS)

    def run(name, cases, people, *arguments, clock=None):
        home, entry = importlib.import_module(f"bench.{bench.COMMANDS[name][0]}"), bench.COMMANDS[name][1]
        changed = {"cases": cases, "default_cases": "", "clock": lambda device, options: clock or WallClock()}
        if people:
            changed["table"] = lambda case: by_name(people)
        monkeypatch.setattr(home, entry, replace(getattr(home, entry), **changed))
        out = tmp_path / "rows.jsonl"
        status = bench.main([name, "--out", str(out), "--rounds", "2", *arguments])
        return status, report.read_file(out) if out.exists() else []

    return run
