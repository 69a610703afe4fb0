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
import json
import multiprocessing
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.environment import environment
from verification.calls import Call
from verification.matrix import CHECKS, in_dtype
from verification.table import format_table

PACKAGE = "fused_rope_attn"
COLUMNS = ("case", "part", "before", "after", "after / before")
# Largest difference of two results, of the largest number among them: rounding to bfloat16 in another order.
TOLERANCE = 2e-2


CASES = [in_dtype(x, torch.bfloat16) for x in CHECKS if x.size == "large" and x.function != "corope_attention"]
# Calls that the host limits: eager, in microseconds.
HOST_CASES = ("Small-512", "Small-1K", "decode Llama3-8B, 4096", "rotation Llama3-8B-4K, interleaved")


def import_checkout(root: Path, name: str) -> ModuleType:
    """The package of the checkout at ``root``, imported as ``name`` from a copy."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(root / PACKAGE, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*.py"):
        path.write_text(re.sub(rf"\b{PACKAGE}\b", name, path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def parts_of(case: Call, package: ModuleType, backend: str = "auto", device: str = "cuda") -> dict[str, Callable]:
    """The functions to time by name: the forward pass without gradient and, where there is one, that with a gradient,
    which saves what the backward pass needs, and the backward pass. Both packages get the same data."""
    made = case.make(device)
    given = case.call(made, (backend, "auto"))[1]
    call = functools.partial(getattr(package, case.function), **given)

    def outputs(returned: Any) -> tuple[torch.Tensor, ...]:
        return returned if isinstance(returned, tuple) else (returned,)

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return outputs(call())

    if "o" not in made.upstream:
        return {"forward": forward}
    leaves = {name: given[name].detach().requires_grad_() for name in ("q", "k", "v")}

    def saving() -> tuple[torch.Tensor, ...]:
        return tuple(x.detach() for x in outputs(call(**leaves)))

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True)

    o, do = outputs(call(**leaves))[0], case.as_passed("do", made.upstream["o"])
    return {"forward": forward, "forward, saving": saving, "backward": backward}


def largest_difference(before, after) -> float:
    """Of two tuples of tensors, relative to the largest number of each."""
    return max(
        ((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1e-30)).item()
        for x, y in zip(before, after, strict=True)
    )


def interleaved(functions: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each function returns in every round, the functions shuffled within a round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            times[name].append(functions[name]())
    return times


def graph_clock(function: Callable, calls: int, stream) -> Callable[[], float]:
    """A function that replays ``calls`` calls as a CUDA graph and returns milliseconds a call."""
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    sample()
    return sample


def host_clock(function: Callable, calls: int = 100) -> Callable[[], float]:
    """A function that makes ``calls`` eager calls and returns the host's microseconds a call."""

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed / calls * 1e6

    sample()
    return sample


def compare(case: Call, packages: dict[str, ModuleType], backend: str, rounds: int, stream) -> list[dict]:
    """The rows of one case: a row for each pass as CUDA graphs, and for host-limited cases the eager calls."""
    with torch.cuda.stream(stream):
        parts = {name: parts_of(case, package, backend) for name, package in packages.items()}
    torch.cuda.synchronize()
    operations = 4 * case.batch * case.heads_q * max(1, case.len_q * case.len_k) * case.head_dim
    calls = max(1, min(50, int(2e12 / operations)))
    rows = []
    for part in parts["before"]:
        functions = {name: parts[name][part] for name in packages}
        difference = largest_difference(*(function() for function in functions.values()))
        row = {"case": case.name, "part": part, "unit": "ms", "difference": difference}
        if not difference <= TOLERANCE:
            rows.append(row | {"error": "the results differ"})
            continue
        clocks = {name: graph_clock(function, calls, stream) for name, function in functions.items()}
        rows.append(row | interleaved(clocks, rounds))
        if case.name in HOST_CASES:
            clocks = {name: host_clock(function) for name, function in functions.items()}
            rows.append(row | {"part": f"{part}, host", "unit": "us"} | interleaved(clocks, rounds))
    return rows


def compile_share(root: str, cases: list[Call], backend: str, share: int, shares: int) -> None:
    """Run every call once, so that the process that times finds all kernels compiled."""
    packages = (import_checkout(Path(root), f"{PACKAGE}_before"), importlib.import_module(PACKAGE))
    for i, case in enumerate(cases):
        for j, package in enumerate(packages):
            if (2 * i + j) % shares == share:
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
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_share, args=(str(options.before), cases, options.backend, i, options.jobs))
        for i in range(options.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    packages = {
        "before": import_checkout(options.before, f"{PACKAGE}_before"),
        "after": importlib.import_module(PACKAGE),
    }
    stream = torch.cuda.Stream()
    facts = environment()
    table, failed = [], False
    for case in cases:
        for row in compare(case, packages, options.backend, options.rounds, stream):
            table.append(shown(row))
            failed |= "error" in row
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row | {"environment": facts}) + "\n")
    print(format_table(COLUMNS, table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
