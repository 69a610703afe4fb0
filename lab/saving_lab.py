"""Compiled attention, forward and backward, with rotated q and k saved for backward and with q and k saved as they came.

    TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python lab/saving_lab.py --rounds 5 --seconds 55

from the root of the branch's tree. Both variants are in one process: the switch is ``attention.saving.traced``, replaced
while a variant is traced. From the root of a tree without that module there is one variant, "tree". Two kinds: "bare" is
rope_attention of leaves, who keep q and k (so that rotated copies come on top), "block" is projections, attention and the
output's projection, where q and k are temporaries. Columns: forward and whole step in CUDA graphs with a cold L2, backward
as the difference by rounds, what is held between the passes, and the peak of a step. --cpu runs everything small in the
interpreter (TRITON_INTERPRET=1), with a stopwatch on the host.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
import traceback

START = time.monotonic()
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
sys.path.insert(0, os.getcwd())

import torch  # noqa: E402

SHAPES = {"Llama3-8B-4K": (2, 32, 8, 4096, 128), "Llama70B-1K": (2, 64, 64, 1024, 128), "Llama7B-4K": (2, 32, 32, 4096, 128)}
TINY = (1, 2, 1, 20, 16)
HIDDEN = 4096
OPTIONS: dict = {}
SOURCE = {
    "bare": "def f(q, k, v, cos, sin): return attend(q, k, v, cos, sin, True, **options)",
    "block": """
def f(x, wq, wk, wv, wo, cos, sin):
    q, k, v = ((x @ w).unflatten(-1, (-1, D)).transpose(1, 2) for w in (wq, wk, wv))
    return attend(q, k, v, cos, sin, True, **options).transpose(1, 2).flatten(2) @ wo
""",
}


def say(*words):
    print(f"[{time.monotonic() - START:5.1f}]", *words, flush=True)


def left(options):
    return options.seconds - (time.monotonic() - START)


class HostClock:
    """In place of ``bench.timing.GpuClock``, for --cpu."""

    def capture(self, make):
        return make()

    def sample(self, fn, calls):
        samples = []
        for _ in range(calls):
            begin = time.perf_counter()
            fn()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples

    def calls_for(self, fn, ms):
        fn()
        return 1


def variants():
    """name -> a context in which a call is traced as the variant has it."""
    from contextlib import contextmanager, nullcontext

    try:
        from fused_rope_attn.attention import saving
        from fused_rope_attn.attention.problem import Saving
    except ImportError:
        return {"tree": nullcontext}

    @contextmanager
    def as_they_came():
        given, saving.traced = saving.traced, lambda *_: Saving.NOTHING
        try:
            yield
        finally:
            saving.traced = given

    return {"as they came": as_they_came, "rotated": nullcontext}


def inputs_of(kind, shape, device, dtype):
    """(tensors that take a gradient, the tables, the gradient of the result)."""
    from fused_rope_attn import rope_tables

    batch, heads_q, heads_kv, length, head_dim = shape
    tables = rope_tables(length, head_dim, device=device)

    def normal(*sizes, scale=1.0):
        return (scale * torch.randn(*sizes, device=device)).to(dtype)

    if kind == "bare":
        given = [normal(batch, length, h, head_dim).transpose(1, 2) for h in (heads_q, heads_kv, heads_kv)]
        do = normal(batch, length, heads_q, head_dim).transpose(1, 2)
    else:
        hidden = HIDDEN if device == "cuda" else 32
        sizes = [(hidden, h * head_dim) for h in (heads_q, heads_kv, heads_kv)] + [(heads_q * head_dim, hidden)]
        given = [normal(batch, length, hidden)] + [normal(*s, scale=s[0] ** -0.5) for s in sizes]
        do = normal(batch, length, hidden)
    return [x.requires_grad_() for x in given], tables, do


def function_of(kind, head_dim):
    """A function with a code object of its own, so that its graphs are its own."""
    from fused_rope_attn import rope_attention

    scope = {"attend": rope_attention, "options": OPTIONS, "D": head_dim}
    exec(SOURCE[kind], scope)  # noqa: S102
    return scope["f"]


def distance(x, y):
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / (y.norm() + 1e-30)) if bool(torch.isfinite(x).all()) else float("nan")


def check_against_float64(names, device, dtype):
    """Raises where a variant's o or gradients leave the tolerance, on fresh data. lse is not compared: it is eager's."""
    from fused_rope_attn import rope_attention
    from fused_rope_attn.testing import Case, Results, make_inputs
    from tests.support.attention import assert_matches_float64

    sizes = (2, 8, 2, 333, 700, 128) if device == "cuda" else (1, 2, 1, 9, 12, 16)
    case = Case(*sizes, dtype=dtype, seed=random.randrange(1 << 30))
    inputs = make_inputs(case, device)
    lse = rope_attention(*inputs[:5], True, return_lse=True, **OPTIONS)[1]
    for name, context in names.items():
        with context():
            compiled = torch.compile(function_of("bare", case.head_dim), fullgraph=True)
            given = [x.detach().requires_grad_() for x in inputs[:3]]
            o = compiled(*given, inputs.cos, inputs.sin)
        results = Results(o.detach(), lse, *torch.autograd.grad(o, given, inputs.do))
        assert_matches_float64(case, inputs, results, f" [{name}]")


def prepare(kind, shape, name, context, device, dtype, tensors, eager):
    """The compiled function of a variant, after a check of its results against eager's; None where they differ."""
    given, tables, do = tensors
    saved = []
    function = torch.compile(function_of(kind, shape[-1]), fullgraph=True)
    with context(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = function(*given, *tables)
    found = [o.detach(), *torch.autograd.grad(o, given, do)]
    far = [distance(x, y) for x, y in zip(found, eager)]
    equal = [torch.equal(x, y) for x, y in zip(found, eager)]
    if kind == "bare":
        addresses = {x.data_ptr() for x in saved}
        if name != "tree" and (given[0].data_ptr() in addresses) != (name == "as they came"):
            raise RuntimeError(f"{name}: q is {'' if name == 'rotated' else 'not '}among what was saved")
        # Only dq is summed in any order; a rotation in another kernel may round otherwise.
        if name == "rotated" and not (equal[0] and equal[2] and equal[3]):
            raise RuntimeError(f"rotated: (o, dq, dk, dv) are equal to eager's: {equal}, distances {far}")
    if not all(x < 2e-2 for x in far):
        raise RuntimeError(f"{name}: relative distances from eager's results are {far}")
    return function, {"equal": equal, "distance": max(far)}


def memory(function, tensors):
    """(MiB held between the passes, MiB at the peak of a step), beside the inputs."""
    given, tables, do = tensors
    if given[0].device.type != "cuda":
        return 0.0, 0.0
    most = held = 0.0
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = function(*given, *tables)
        held = (torch.cuda.memory_allocated() - before) / 2**20
        gradients = torch.autograd.grad(o, given, do)
        del o, gradients
        torch.cuda.synchronize()
        most = (torch.cuda.max_memory_allocated() - before) / 2**20
    return held, most


def measure(kind, label, options, names, clock, device, dtype):
    from bench.timing import interleave, quantile

    shape = options.sizes[label]
    tensors = inputs_of(kind, shape, device, dtype)
    given, tables, do = tensors
    o = function_of(kind, shape[-1])(*given, *tables)
    eager = [o.detach(), *torch.autograd.grad(o, given, do)]
    del o
    fns, rows = {}, {}
    for name, context in names.items():
        try:
            function, row = prepare(kind, shape, name, context, device, dtype, tensors, eager)
            row["held_mib"], row["peak_mib"] = memory(function, tensors)

            def forward(function=function):
                return function(*given, *tables)

            def step(function=function):
                o = function(*given, *tables)
                return o, *torch.autograd.grad(o, given, do)

            fns[name, "forward"] = clock.capture(lambda forward=forward: forward)
            fns[name, "step"] = clock.capture(lambda step=step: step)
            rows[name] = row
        except Exception:
            say(f"{label} {kind} {name} failed:")
            traceback.print_exc()
            for what in ("forward", "step"):
                fns.pop((name, what), None)
    say(f"{label} {kind}: checked")
    keys = list(fns)
    if not keys:
        return []
    calls = {key: min(options.calls, clock.calls_for(fns[key], options.ms)) for key in keys}
    measured, failed = interleave(fns, clock.sample, calls, options.rounds, lambda: left(options) < 2)
    for key, error in failed.items():
        say(f"{label} {kind} {key} failed: {error!r}")
    results = []
    for name, row in rows.items():
        if (name, "forward") not in measured or (name, "step") not in measured:
            continue
        both = [measured[name, what] for what in ("forward", "step")]
        for what, one in zip(("forward", "step"), both):
            row[what] = one.quantiles()
        differences = [b - a for a, b in zip(*(one.round_medians for one in both))]
        row["backward"] = [quantile(differences, q) for q in (0.5, 0.2, 0.8)]
        results.append({"shape": label, "kind": kind, "variant": name, "rounds": len(differences)} | row)
    return results


def show(results):
    print(f"{'shape':14s} {'kind':6s} {'variant':13s} {'forward':>8s} {'backward (p20 .. p80)':>26s} {'step':>8s}"
          f" {'held MiB':>9s} {'peak MiB':>9s}  equal to eager (o, gradients)")
    for row in results:
        middle, low, high = row["backward"]
        print(f"{row['shape']:14s} {row['kind']:6s} {row['variant']:13s} {row['forward'][0]:8.4f}"
              f" {middle:8.4f} ({low:.4f} .. {high:.4f}) {row['step'][0]:8.4f} {row['held_mib']:9.1f}"
              f" {row['peak_mib']:9.1f}  {''.join('=' if x else '~' for x in row['equal'])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=55.0, help="no new measurement begins after this")
    parser.add_argument("--ms", type=float, default=40.0, help="device time of one variant in one round")
    parser.add_argument("--calls", type=int, default=50, help="at most so many calls in a round")
    parser.add_argument("--shapes", default="Llama3-8B-4K,Llama70B-1K")
    parser.add_argument("--kinds", default="bare,block")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    random.seed()
    torch.manual_seed(random.randrange(1 << 30))
    if options.cpu:
        device, dtype, clock = "cpu", torch.float32, HostClock()
        options.sizes = {"tiny": TINY}
        OPTIONS.update(backend="triton", strategy="prepass")
    else:
        from bench.timing import GpuClock

        device, dtype, clock = "cuda", torch.bfloat16, GpuClock(torch.device("cuda"))
        options.sizes = {name: SHAPES[name] for name in options.shapes.split(",")}
        OPTIONS.update(backend="hopper")
    import triton

    import fused_rope_attn

    names = variants()
    say(fused_rope_attn.__file__, f"torch {torch.__version__}, triton {triton.__version__}, variants: {', '.join(names)}")
    check_against_float64(names, device, dtype)
    say("all variants match float64")
    results = []
    for kind in options.kinds.split(","):
        for label in options.sizes:
            if left(options) < 5:
                say(f"no time is left for {label} {kind}")
                continue
            try:
                results += measure(kind, label, options, names, clock, device, dtype)
            except Exception:
                say(f"{label} {kind} failed:")
                traceback.print_exc()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    out = os.environ.get("OUT", "out")
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, f"saving-triton-{triton.__version__}.json"), "w") as file:
        json.dump({"torch": torch.__version__, "triton": triton.__version__, "rows": results}, file, indent=1)
    show(results)


if __name__ == "__main__":
    main()
