"""``python -m bench docs``: write the generated tables and plots of the documents from committed rows.

A block begins with ``<!-- table:NAME -->`` and ends with ``<!-- table:end -->``. ``BLOCKS`` says which page has
which blocks, and what they show.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial

from bench import plots, readme
from bench.attention import cases
from bench.command import refuse
from bench.environment import RESULTS, ROOT
from bench.results import read
from bench.tables import Table, render, rotation, standing

_PEAK = {"MiB": ("peak_mib", "{:.0f}")}
_COPY = {"% of a copy's rate": ("of_copy", "{:.0%}")}
_RIVALS = ("liger_cudnn", "liger_fa3", "liger_fa4", "bare_cudnn", "bare_fa3", "bare_fa4")
_GROUPS = (
    "Qwen2.5-7B-4K Llama3-70B-1K Llama3-70B-4K Llama3-405B-4K Llama3-70B-TP8-1K Llama3-70B-TP8-4K Llama3-8B-B1-512"
)
_LAYERS = {f"QuACK + {who}": f"quack_{name}" for who, name in (("ours", "fused"), ("FA4", "fa4"), ("FA3", "fa3"))}
_LAYERS |= {"Liger + FA4": "liger_fa4", "compiled": "compiled"}
_ENERGY = "Small-1K Llama7B-4K Llama3-8B-4K Llama3-8B-16K"
_NORMED = "Qwen3-0.6B-1K Qwen3-0.6B-4K Qwen3-8B-1K Qwen3-8B-4K Qwen3-8B-16K Gemma3-4B-1K Gemma3-4B-4K"
_STORED = "B1-4K B1-32K B1-128K B8-4K B8-32K B64-4K mixed64-64K"
_UNSPLIT = "Unsplit-D128-B1-1K Unsplit-D128-B1-4K Unsplit-D128-B8-4K Unsplit-D128-B1-16K Unsplit-D128-B1-64K"
_ROTATED = "Small-512 Small-1K Llama3-8B-1K Llama3-8B-4K Llama3-8B-16K Wide-1K"
_ROTATED_NORMED = "Qwen3-0.6B-4K Qwen3-8B-1K Qwen3-8B-4K Gemma3-4B-4K"
_ROPE = Table("rope", mine="apply_rope", facts=_COPY, others={"Liger": "liger", "torch.compile": "compiled"}, roles=())
_MASKS = Table("masks", shapes=True, mode="eager")
_MODELS = Table("models", mode="eager", shows="tokens_s", shapes=True, roles=("rival",))
# Page -> block -> what it shows.
BLOCKS: dict[str, dict[str, Table | Callable[[], str]]] = {
    "README.md": {"attention": readme.attention, "gains": readme.gains},
    "docs/benchmarks.md": {
        "attention": Table("attention", " ".join(cases.TABLE)),
        "standing": partial(standing, "attention", _RIVALS),
        "oldest": partial(standing, "attention-oldest", _RIVALS),
        "rotation": partial(rotation, "attention"),
        "block": Table("block", others=_LAYERS, roles=()),
        "groups": Table("groups", _GROUPS),
        "fa3": Table("fa3", mode="load", others={"FA3 from JAX": "bare_fa3_jax", "FA4": "bare_fa4"}, roles=()),
        "host": Table(
            "host",
            mode="host",
            others={"SDPA": "bare_sdpa", "cuDNN": "bare_cudnn_chosen", "a function that does nothing": "nothing"},
            roles=(),
        ),
        "energy": Table("energy", _ENERGY, mode="load", facts={"mJ": ("mj", "{:.0f}")}, over="mj_rounds"),
        "window": _MASKS._replace(cases="window", mine="window", others={"full causal": "causal"}),
        "packed": _MASKS._replace(cases="packed", mine="packed", others={"padded": "padded"}),
        "norm": Table("norm", _NORMED, cost=("over without", "fused_without"), roles=("rival",)),
        "rope": _ROPE._replace(cases=_ROTATED, within="bf16 half"),
        "rope-norms": _ROPE._replace(cases=_ROTATED_NORMED, within="norms"),
        "decode": Table("decode", _STORED, facts=_COPY, roles=("rival",)),
        "stored": Table(
            "decode",
            _STORED,
            others={f"pages of {n}": f"fused_page{n}" for n in (16, 64, 256)} | {"float8": "fused_float8"},
            roles=(),
        ),
        "models": _MODELS._replace(within="^(train-4K B|prefill-16K|decode|serve)", facts=_PEAK),
        "steps": _MODELS._replace(within="^step-(4|16)K", mine="fused_liger", facts=_PEAK),
        "cp": Table("cp", mode="eager", facts={"of one GPU / P": ("efficiency", "{:.1%}")}, roles=("rival",)),
        "corope": Table("corope", mine="corope", mode="eager", facts=_PEAK, others={"eager": "dense"}, roles=()),
    },
    "docs/guides/same-bits.md": {
        "step": Table(
            "decode",
            _STORED,
            mine="fused_same_bits",
            cost=("over without", "fused"),
            others={"FA3, one split": "fa3_unsplit", "FlexAttention": "flex64"},
            roles=(),
        ),
        "same-bits": Table("same-bits", _UNSPLIT, mine="fused_same_bits", cost=("over without", "fused")),
    },
    "docs/guides/intervals.md": {
        "intervals": Table(
            "intervals", mine="intervals", mode="eager", facts={"visited": ("visited", "{:.3f}")}, roles=("rival",)
        ),
    },
    "docs/guides/latent.md": {"mla": Table("mla", facts=_PEAK)},
}
# Figure in ``bench/results/plots`` -> the file of its rows, and the function that draws it.
PLOTS = {"overview": ("attention-h200", plots.overview), "speedups": ("attention-h200", plots.speedups)}
_BLOCK = re.compile(r"<!-- table:([\w-]+) -->\n(?:(?!<!-- ).)*<!-- table:end -->", re.DOTALL)


def main(argv: list[str]) -> int:
    """Write or check the pages. Exit status: 0 they agree with their rows, 1 one does not (``--check``), 2 cannot."""
    parser = argparse.ArgumentParser("python -m bench docs", description=__doc__.splitlines()[0].split(": ", 1)[1])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page and its rows differ")
    parser.add_argument("--plots", action="store_true", help="draw the figures instead")
    args = parser.parse_args(argv)
    status = 0
    try:
        for name, (file, draw) in PLOTS.items() if args.plots else ():
            path = RESULTS / "plots" / f"{name}.png"
            draw(read(file)).savefig(path)
            print(f"wrote {path}")
        for page in BLOCKS if not args.plots else ():
            old = (ROOT / page).read_text(encoding="utf-8")
            new = rewrite(page, old)
            pairs = zip(_BLOCK.finditer(old), _BLOCK.finditer(new))
            stale = ", ".join(before[1] for before, after in pairs if before[0] != after[0])
            if args.check and stale:
                print(f"bench docs: {page} does not match the rows in {stale}", file=sys.stderr)
                status = 1
            elif not args.check:
                (ROOT / page).write_text(new, encoding="utf-8")
                print(f"{page}: " + (f"rewrote {stale}" if stale else "matches the rows"))
    except ImportError as error:
        return refuse("docs", f"plots need matplotlib: pip install matplotlib ({error})")
    except (OSError, ValueError, KeyError) as error:
        return refuse("docs", f"{type(error).__name__}: {error}")
    return status


def rewrite(page: str, text: str) -> str:
    """Return ``text`` with the content of every block of ``page`` replaced.

    ValueError: a block of ``page`` is missing, twice there, unknown or open, or the rows lack what it shows.
    """
    blocks = BLOCKS[page]
    found = [match[1] for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(blocks) or text.count("<!-- table:") != 2 * len(found):
        raise ValueError(
            f"{page} must have the blocks {', '.join(blocks)}, each once and closed by <!-- table:end --> before the "
            f"next begins, but has {', '.join(found) or 'none'} and {text.count('<!-- table:')} markers"
        )
    results = "../" * page.count("/") + "bench/results"

    def write(match: re.Match) -> str:
        block = blocks[match[1]]
        content = render(block) if isinstance(block, Table) else block()
        return f"<!-- table:{match[1]} -->\n\n{content.replace('{results}', results)}\n\n<!-- table:end -->"

    return _BLOCK.sub(write, text)
