"""``python -m verification``: every backend and strategy, rotation alone, generation step and Co-RoPE against float64.

On a GPU: bfloat16, float16 and float32, the small cases and the large ones; the sm_90 backend if the GPU has one.
Small cases that combine features are drawn, the same in each run.
Without a GPU the real kernels run in Triton's interpreter on the small cases, in float16 and float32. Exit status 0:
all within tolerance; 1: some are not; 2: usage.

``--random N`` draws N calls over the whole contract instead, illegal ones among them, and runs each on the backends
that serve it. A call that fails is shrunk, and printed as the command that repeats it: ``--call``.

``--cp`` runs context parallelism instead, in processes of its own, every rank against float64.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

DTYPES = ("bfloat16", "float16", "float32")
BACKENDS = ("reference", "triton", "hopper")
STRATEGIES = ("inline", "prepass")
# The names in ``strategies.FAMILIES``, which imports Triton.
FAMILIES = ("attention", "packed", "mla", "decode", "rope", "rope of several", "corope", "write", "pairs")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verification", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    add("--backend", action="append", choices=BACKENDS, help="may be repeated; default: all that run here")
    add("--strategy", action="append", choices=STRATEGIES, help="may be repeated; default: all (hopper: prepass)")
    add("--dtype", action="append", choices=DTYPES, help="may be repeated; default: all that the device computes")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="only the small cases (all that there are without a GPU)")
    sizes.add_argument("--large", action="store_true", help="only the large cases")
    add("--filter", default="", metavar="TEXT", help="only cases whose name contains this")
    add("--jobs", type=int, metavar="N", help="processes; 0: all in this one (debuggers, compute-sanitizer)")
    add("--json", metavar="FILE", help="default: out/verification.json (out/random.json with --random); '' for none")
    add("--list", action="store_true", help="name the cases and run nothing")
    add("--cp", action="store_true", help="context parallelism instead: 2 to 4 processes, on a GPU each or by gloo")
    add = parser.add_argument_group("random calls").add_argument
    add("--random", type=int, metavar="N", help="draw and run the calls 0 to N - 1 instead of the cases")
    add("--family", action="append", default=[], choices=FAMILIES, help="may be repeated; default: all")
    add("--seed", type=int, default=0, metavar="S", help="of the drawing; default: %(default)s")
    add("--only", type=int, metavar="I", help="run the call I of a seed alone, in this process")
    add("--minutes", type=float, metavar="M", help="stop after M minutes, and say how many calls ran")
    add("--call", metavar="TEXT", help="run one call, as a failure prints it, in this process")
    options = parser.parse_args(argv)

    if options.random is not None and options.random < 1:
        parser.error(f"--random: must be 1 or more, but is {options.random}")
    for name in ("family", "only", "minutes"):
        if options.random is None and getattr(options, name) not in (None, []):
            parser.error(f"--{name}: needs --random")
    for name in ("strategy", "small", "large", "filter", "list"):
        if (options.random is not None or options.call is not None) and getattr(options, name):
            parser.error(f"--{name}: is for the cases, not for --random or --call")
    on_gpu = options.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: this machine has no GPU that torch can use")
    on_hopper = on_gpu and not torch.version.hip and torch.cuda.get_device_capability(options.device) == (9, 0)
    if "hopper" in (options.backend or ()):
        if not on_hopper:
            parser.error("--backend hopper: needs an sm_90 GPU (H100, H200)")
        if options.strategy == ["inline"]:
            parser.error("--backend hopper: rotates K once; it has no --strategy inline")
    if options.backend is None:
        options.backend = [name for name in BACKENDS if name != "hopper" or on_hopper]
    if options.large and not on_gpu:
        parser.error("--large: the large cases need a GPU")
    if options.dtype is None:
        options.dtype = list(DTYPES) if on_gpu else ["float16", "float32"]
    if "bfloat16" in options.dtype and not on_gpu and options.backend != ["reference"]:
        parser.error("--dtype bfloat16: Triton's interpreter computes it wrongly; on a CPU use --backend reference")
    options.is_single = options.call is not None or options.only is not None
    if options.is_single:
        options.jobs, options.json = 0, options.json or ""
    if options.jobs is None:
        of_cpu = 1 if options.random is not None else 4
        options.jobs = min(16 if on_gpu else of_cpu, os.cpu_count() or 1)
    if options.cp and options.jobs:
        options.jobs = max(1, options.jobs // 4)  # each of them starts a process a rank
    if options.cp and on_gpu and torch.cuda.device_count() < 2:
        parser.error("--cp: needs two GPUs, or --device cpu")
    if options.json is None:
        options.json = "out/verification.json" if options.random is None else "out/random.json"
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.device == "cpu":
        # Triton reads it when it is imported, in this process and in those that it starts.
        os.environ["TRITON_INTERPRET"] = "1"
    from verification import run

    return run.run(options)


if __name__ == "__main__":
    sys.exit(main())
