"""Time two checkouts of the package against each other on a GPU, interleaved in one process.

    git worktree add ../before COMMIT
    python -m tools.compare_checkouts ../before                          kernels as CUDA graphs, and eager host time
    python -m tools.compare_checkouts ../before --cases 4K --backend triton --out rows.jsonl

Calls are the large cases of ``python -m verification``, in bfloat16.
The other checkout is imported from a copy in which the package has another name, so that both register operators of
their own. Each row holds the medians of all rounds, and the ratio is that of the medians: above 1, this checkout is the
slower one. Both checkouts must give the same results up to rounding, or the row is not printed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import multiprocessing
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.environment import environment
from bench.timing import GpuClock, interleave
from verification.calls import Call
from verification.matrix import CHECKS, in_dtype
from verification.table import format_table

PACKAGE = "fused_rope_attn"
COLUMNS = ("case", "part", "before", "after", "after / before")
# Largest difference of two results, of the largest number among them: rounding to bfloat16 in another order.
TOLERANCE = 2e-2
ROUND_MS = 50.0  # of one provider in one round
CASES = [in_dtype(x, torch.bfloat16) for x in CHECKS if x.size == "large" and x.function != "corope_attention"]
# Calls that the host limits: eager, in microseconds.
HOST_CASES = ("Small-512", "Small-1K", "decode Llama3-8B, 4096", "rotation Llama3-8B-4K, interleaved")


def import_checkout(root: Path, name: str) -> ModuleType:
    """Import the package of the checkout at ``root`` from a copy, as ``name``."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(root / PACKAGE, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*.py"):
        path.write_text(re.sub(rf"\b{PACKAGE}\b", name, path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def parts_of(case: Call, package: ModuleType, backend: str = "auto", device: Any = "cuda") -> dict[str, Callable]:
    """Return the functions to time by name: the forward pass without a gradient and, of attention, that with one,
    which saves tensors for the backward pass, and the backward pass. Both packages get the same data."""
    made = case.make(str(device))
    function = getattr(package, case.function)
    given = case.call(made, (backend, "auto"))[1]
    if "backend" not in inspect.signature(function).parameters:  # the step of an older checkout
        given.pop("backend", None)
    call = functools.partial(function, **given)

    def outputs(returned: Any) -> tuple[torch.Tensor, ...]:
        return returned if isinstance(returned, tuple) else (returned,)

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return outputs(call())[:1]

    if "o" not in made.upstream:
        return {"forward": forward}
    rows = [name for name in ("q", "k", "v", "q_nope", "q_rope", "k_nope", "k_rope") if name in given]
    leaves = {name: given[name].detach().requires_grad_() for name in rows}

    def saving() -> tuple[torch.Tensor, ...]:
        return (outputs(call(**leaves))[0].detach(),)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True)

    o, do = outputs(call(**leaves))[0], case.as_passed("do", made.upstream["o"])
    return {"forward": forward, "forward, saving": saving, "backward": backward}


def largest_difference(before, after) -> float:
    """Return the largest difference of two tuples of tensors, relative to the largest number of each."""
    return max(
        ((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1e-30)).item()
        for x, y in zip(before, after, strict=True)
    )


def compare(case: Call, packages: dict[str, ModuleType], backend: str, rounds: int, clock: Any) -> list[dict]:
    """Return the rows of one case: a row for each pass as CUDA graphs, and for host-limited cases the eager calls.

    clock: a ``bench.timing.GpuClock``.
    """

    def timed(functions: dict[str, Callable], sample: Callable[..., list[float]], calls: int) -> dict[str, list[float]]:
        measured, failed = interleave(functions, sample, dict.fromkeys(functions, calls), rounds)
        for error in failed.values():
            raise error
        return {name: measurement.round_medians for name, measurement in measured.items()}

    def captured(package: ModuleType, part: str) -> Callable:
        return clock.capture(lambda: parts_of(case, package, backend, clock.device)[part])

    parts = {name: parts_of(case, package, backend, clock.device) for name, package in packages.items()}
    rows = []
    for part in parts["before"]:
        functions = {name: parts[name][part] for name in packages}
        difference = largest_difference(*(function() for function in functions.values()))
        row = {"case": case.name, "part": part, "unit": "ms", "difference": difference}
        if not difference <= TOLERANCE:
            rows.append(row | {"error": "the results differ"})
            continue
        graphs = {name: captured(package, part) for name, package in packages.items()}
        rows.append(row | timed(graphs, clock.sample, clock.calls_for(graphs["after"], ROUND_MS)))
        if case.name in HOST_CASES:
            rows.append(row | {"part": f"{part}, host"} | timed(functions, clock.host_sample, 100))
    return rows


@functools.cache
def import_both(before: Path) -> dict[str, ModuleType]:
    """Import the packages of both checkouts, once in each process."""
    return {"before": import_checkout(before, f"{PACKAGE}_before"), "after": importlib.import_module(PACKAGE)}


def compile_case(before: Path, backend: str, case: Call) -> None:
    """Run a call once with both packages, so that the process that times finds all kernels compiled."""
    for package in import_both(before).values():
        for function in parts_of(case, package, backend).values():
            function()
    torch.cuda.synchronize()


def shown(row: dict) -> dict:
    """A row as the table has it."""
    if "error" in row:
        return {"case": row["case"], "part": row["part"], "before": row["error"]}
    before, after = statistics.median(row["before"]), statistics.median(row["after"])
    figures = {"before": f"{before:.4g} {row['unit']}", "after": f"{after:.4g} {row['unit']}"}
    return {"case": row["case"], "part": row["part"], **figures, "after / before": f"{after / before:.3f}"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_checkouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="the root of the other checkout")
    parser.add_argument("--cases", default="", help="only cases whose name contains one of these, comma-separated")
    parser.add_argument("--backend", default="auto", help="of attention: auto, triton or hopper (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile before (default %(default)s)")
    parser.add_argument("--out", type=Path, help="also append the rows there, a JSON object a line")
    options = parser.parse_args(argv)
    if not (options.before / PACKAGE / "__init__.py").exists():
        parser.error(f"{options.before} holds no {PACKAGE}")
    cases = [case for case in CASES if any(text in case.name for text in options.cases.split(","))]
    if not cases:
        parser.error("no case matches")
    if not torch.cuda.is_available():
        print("this comparison needs a GPU")
        return 2
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compile_case, options.before, options.backend), cases))
    packages = import_both(options.before)
    clock = GpuClock(torch.device("cuda"))
    facts = environment()
    table, failed = [], False
    for case in cases:
        for row in compare(case, packages, options.backend, options.rounds, clock):
            table.append(shown(row))
            failed |= "error" in row
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row | {"environment": facts}) + "\n")
    print(format_table(COLUMNS, table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
