"""The commands of ``python -m bench``, in one table; nothing is imported before its command is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """``function`` of ``module``, a module below ``bench``, takes the arguments behind the name and returns the exit
    status."""

    name: str
    help: str
    module: str
    function: str = "main"

    def run(self, argv: list[str]) -> int:
        return getattr(importlib.import_module(f"bench.{self.module}"), self.function)(argv)


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("run", "rope_attention beside every rival; what runs without a command", "suites.attention.suite"),
        Command("energy", "millijoules, watts and clock of rope_attention and its rivals", "suites.energy.suite"),
        Command("host", "host time of eager calls, beside PyTorch's attention and functions that do nothing",
                "suites.host"),
        Command("masks", "windows, packed sequences, and what other masks cost", "suites.masks.suite"),
        Command("rope", "the rotation alone", "suites.rotation.suite"),
        Command("norm", "attention with norms of q and k", "suites.norm.suite"),
        Command("decode", "a step of generation with a cache; --tune sweeps its configurations",
                "suites.generation.command"),
        Command("models", "whole models of transformers, patched and not", "suites.models.suite"),
        Command("corope", "Co-RoPE beside its definition in eager PyTorch", "suites.corope"),
        Command("cp", "a sequence over several GPUs, beside one GPU and PyTorch's context_parallel",
                "suites.context_parallel.command"),
        Command("tune", "sweep tile configurations of the portable kernels, propose rows of their table",
                "suites.tune.command"),
        Command("plot", "figures from files of rows of attention", "suites.attention.suite", "plot"),
        Command("compare", "what moved between two files of rows, and by how much more than noise", "compare.command"),
        Command("docs", "write the generated tables of README.md and docs/benchmarks.md; --check compares", "docs"),
    )
}  # fmt: skip


def command_list() -> str:
    """For ``--help``: a line for each command."""
    lines = [f"  python -m bench {command.name:<8} {command.help}" for command in COMMANDS.values()]
    return "\n".join(["commands, each with --help:", *lines])
