"""``python -m bench``: one command of the table in ``bench.suites``; without a command, attention."""

from __future__ import annotations

import sys

from bench.suites import COMMANDS


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 fine, 1 one of ours failed or a document is stale, 2 cannot run here, 3 the GPU was lost."""
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    return COMMANDS[name].run(rest)


if __name__ == "__main__":
    sys.exit(main())
