"""``python -m bench decode``: the step beside its rivals, or with --tune beside itself in other configurations."""

from __future__ import annotations

from bench import command
from bench.suites.generation.suite import Generation
from bench.suites.generation.sweep import Sweep


def main(argv: list[str]) -> int:
    """Run the command with these arguments; returns the exit status."""
    if "--tune" in argv:
        return command.main(Sweep, [word for word in argv if word != "--tune"])
    return command.main(Generation, argv)
