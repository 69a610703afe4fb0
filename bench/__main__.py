"""``python -m bench COMMAND``: the table of commands. Nothing is imported before its command is asked for."""

from __future__ import annotations

import importlib
import sys

HELP = """usage: python -m bench [COMMAND] [options]      each command has --help

suites, each timed on one GPU after a check against float64:
  attention  rope_attention and its rivals; what runs without a command
               --mode host: host time of eager calls; --mode load: energy
               --cases masks: windows, packing; corope: Co-RoPE; same-bits
  norm       attention with norms of q and k
  block      the attention of a layer with its projections
  mla        multi-head latent attention
  fa3        FlashAttention-3 with its backward, which is installed for JAX
  rope       the rotation alone
  decode     one step of generation with a cache
  models     whole models of transformers, patched and not
  cp         one sequence over P GPUs: torchrun --nproc-per-node P -m bench cp
options that all have: --cases --providers --passes --mode --rounds --out
  --dry-run
from committed rows:
  results    add the rows of a run to those that are committed
  docs       write the documents' tables; --check compares; --plots draws
"""
# Command -> module below ``bench``, and the suite or the function in it.
COMMANDS: dict[str, tuple[str, str]] = {
    "attention": ("attention.suite", "ATTENTION"),
    "norm": ("attention.suite", "NORM"),
    "block": ("block", "BLOCK"),
    "mla": ("mla", "MLA"),
    "fa3": ("attention.jax_fa3", "FA3_SUITE"),
    "rope": ("rope", "ROPE"),
    "decode": ("decode", "DECODE"),
    "models": ("models.suite", "MODELS_SUITE"),
    "cp": ("cp", "CP"),
    "results": ("results", "main"),
    "docs": ("docs", "main"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 fine, 1 ours failed or a document is stale, 2 cannot run."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        raise SystemExit(0)
    named = bool(argv) and not argv[0].startswith("-")
    name, rest = (argv[0], argv[1:]) if named else ("attention", argv)
    if name not in COMMANDS:
        print(f"bench: no command {name}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, entry = COMMANDS[name]
    found = getattr(importlib.import_module(f"bench.{module}"), entry)
    if entry == "main":
        return found(rest)
    from bench import command

    return command.main(found, rest)


if __name__ == "__main__":
    sys.exit(main())
