"""Variants of the sm_90 backward (head dims up to 128) timed against each other in one process, on a GPU.

    python lab/bwd_lab.py --variants "base;ds;ds,named;ds,lag" --seconds 70 --rounds 9 --energy

from the root of a tree that has the variants. A variant is a value of the environment variable FRA_LAB ("base": without
it), or NAME=FLAGS@ROOT: of the package at another root, whose flags may be empty. For a variant of this tree only the
modules of fused_rope_attn.attention.hopper are imported afresh, with FRA_LAB set: they register no operators and share all
else, so that only kernels which differ are compiled. A variant of another root is imported whole under another name.

Each variant's dq, dk, dv are first held to float64 on fresh random data (packed, windows, GQA, hidden queries, ...), then
to base's at every timed shape. What is timed is the launcher below the operator, pre-process + main kernel + post-process
of rotated q and k, as the backward of an eager call runs it, in CUDA graphs, variants shuffled within a round.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from dataclasses import replace

START = time.monotonic()
LAB_VARIABLE = "FRA_LAB"
os.environ.pop(LAB_VARIABLE, None)
sys.path.insert(0, os.getcwd())

import torch  # noqa: E402

PACKAGE = "fused_rope_attn"
HOPPER = f"{PACKAGE}.attention.hopper"
DEVICE = "cuda"
SHAPES = {  # B, HQ, HKV, N, D
    "Llama7B-4K": (2, 32, 32, 4096, 128), "Llama3-8B-16K": (1, 32, 8, 16384, 128), "Llama3-8B-4K": (2, 32, 8, 4096, 128),
    "Small-8K": (4, 8, 8, 8192, 64), "Llama70B-1K": (2, 64, 64, 1024, 128), "Long-64K": (1, 8, 8, 65536, 128),
    "Phi3-4K": (2, 32, 32, 4096, 96), "Small-4K": (4, 8, 8, 4096, 64), "Small-1K": (4, 8, 8, 1024, 64),
    "Llama7B-2K": (2, 32, 32, 2048, 128), "Llama3-D64-4K": (4, 32, 8, 4096, 64), "Llama70B-512": (2, 64, 64, 512, 128),
}  # fmt: skip
DEFAULT_SHAPES = "Llama7B-4K,Llama3-8B-16K,Llama3-8B-4K,Small-8K,Llama70B-1K,Long-64K,Phi3-4K,Small-4K"
FA4 = "fa4"


def say(*words):
    print(f"[{time.monotonic() - START:5.1f}]", *words, flush=True)


class Stuck(RuntimeError):
    """The GPU does not come back: a kernel whose warps wait for one another for ever."""


def finish(seconds=20.0):
    """Wait for the GPU, but not for ever."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > until:
            raise Stuck(f"the GPU has not come back within {seconds:.0f} s")
        time.sleep(1e-3)


# --- variants ---------------------------------------------------------------------------------------------------------


class Variant:
    """The ``backward`` module of a variant, and what it takes: its own ``Problem`` and ``Tensors``."""

    def __init__(self, text):
        name, _, rest = text.rpartition("=")
        self.flags, _, self.root = rest.partition("@")
        self.name = name or text
        self.flags = "" if self.flags == "base" else self.flags
        self.module = None

    def load(self):
        before = os.environ.pop(LAB_VARIABLE, None)
        if self.flags:
            os.environ[LAB_VARIABLE] = self.flags
        try:
            if self.root:
                from pathlib import Path

                from tools.compare_checkouts import import_checkout

                package = f"{PACKAGE}_{''.join(c if c.isalnum() else '_' for c in self.name)}"
                import_checkout(Path(self.root), package)
                self.module = importlib.import_module(f"{package}.attention.hopper.backward")
                self.problem = importlib.import_module(f"{package}.attention.problem")
                self.configs = importlib.import_module(f"{package}.attention.configs")
            else:
                kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(HOPPER)}
                parent = importlib.import_module(f"{PACKAGE}.attention")
                attribute = getattr(parent, "hopper", None)
                try:
                    self.module = importlib.import_module(f"{HOPPER}.backward")
                finally:
                    for name in [name for name in sys.modules if name.startswith(HOPPER)]:
                        del sys.modules[name]
                    sys.modules.update(kept)
                    if attribute is not None:
                        parent.hopper = attribute
                self.problem = importlib.import_module(f"{PACKAGE}.attention.problem")
                self.configs = importlib.import_module(f"{PACKAGE}.attention.configs")
        finally:
            os.environ.pop(LAB_VARIABLE, None)
            if before is not None:
                os.environ[LAB_VARIABLE] = before
        return self

    @property
    def key(self):
        """Triton's for the main kernel: what two variants must not share."""
        return self.module.backward_kernel.cache_key

    def bound(self, call):
        """The launcher of a ``Call`` as a function without arguments, which gives (dq, dk, dv, ...)."""
        problem = self.problem.Problem(*call.problem)
        tensors = self.problem.Tensors(*call.tensors)
        config = call.config
        if self.root:
            names = {name: getattr(config, name) for name in config.__dataclass_fields__}
            own = self.configs.HopperBackwardConfig
            config = own(**{name: value for name, value in names.items() if name in own.__dataclass_fields__})
        given = (call.do, call.o, *tensors)
        run = self.module.BackwardCall(problem.for_launch(), given, config, call.is_rotated)
        return lambda: run(tensors, call.do, call.o, call.lse)


class Call:
    """What a backward pass is given."""

    def __init__(self, problem, tensors, do, o, lse, is_rotated, config):
        self.problem, self.tensors, self.do, self.o, self.lse = problem, tensors, do, o, lse
        self.is_rotated, self.config = is_rotated, config


class Recorder:
    """Stands where ``ops`` looks up backward calls, and keeps what the last one was given."""

    def __init__(self):
        from fused_rope_attn.attention import ops, planning

        self.planning, self.original, self.last = planning, ops._backward_calls, None
        ops._backward_calls = self

    def __call__(self, problem, given, is_rotated):
        run = self.original(problem, given, is_rotated)
        config = self.planning.plan_for(problem, given[2 + 2]).backward

        def call(tensors, do, o, lse):
            self.last = Call(problem, tensors, do, o, lse, is_rotated, config)
            return run(tensors, do, o, lse)

        return call


# --- cases ------------------------------------------------------------------------------------------------------------


def check_cases(which):
    """(name, case, changes of the configuration) of what is compared with float64."""
    from fused_rope_attn.testing import Case

    def case(*sizes, **more):
        return Case(*sizes, dtype=torch.bfloat16, seed=random.randrange(1 << 30), **more)

    def packed(lengths, heads_q, heads_kv, head_dim, **more):
        pairs = tuple(n if isinstance(n, tuple) else (n, n) for n in lengths)
        totals = [sum(n[i] for n in pairs) for i in range(2)]
        return case(1, heads_q, heads_kv, *totals, head_dim, seqlens=pairs, **more)

    uneven = ((10, 700), (400, 7), (0, 20), (20, 0), (1, 333), (129, 129), (65, 191), (128, 256))
    hidden, whole = {"halves_diagonal": True}, {"halves_diagonal": False}
    few = [
        ("gqa odd", case(2, 8, 2, 333, 700, 128), whole),
        ("hidden 700", case(2, 8, 8, 700, 700, 128), hidden),
        ("hidden gqa 300/556", case(2, 8, 2, 300, 556, 128), hidden),
        ("window (100, 0)", case(2, 8, 2, 1333, 1333, 128, window=(100, 0)), whole),
        ("packed", packed(uneven, 8, 2, 128), whole),
        ("D96 odd", case(2, 4, 4, 500, 700, 96), whole),
        ("D64 odd", case(2, 8, 2, 333, 700, 64), whole),
        ("D64 window", case(2, 8, 2, 1333, 1333, 64, window=(100, 0)), whole),
        ("one block", case(1, 2, 2, 5, 5, 128), hidden),
    ]
    many = [
        ("more queries", case(2, 8, 2, 556, 300, 128), whole),
        ("D64 hidden", case(2, 8, 8, 700, 700, 64), hidden),
        ("D96 hidden", case(2, 4, 4, 700, 700, 96), hidden),
        ("D80", case(2, 4, 4, 500, 700, 80), whole),
        ("D96 packed", packed(uneven, 8, 2, 96), whole),
        ("D64 packed", packed(uneven, 8, 2, 64), whole),
        ("norms", case(2, 8, 2, 700, 700, 128, norms=0.0), whole),
        ("full", case(2, 8, 2, 333, 700, 128, causal=False), whole),
        ("softcap, sinks", case(2, 8, 2, 700, 700, 128, softcap=4.0, sinks=True), whole),
        ("wide window", case(2, 8, 2, 700, 700, 128, window=(400, 0)), whole),
        ("window, both", case(2, 8, 2, 700, 1400, 128, window=(60, 70), causal=False), whole),
        ("padded", case(2, 8, 2, 300, 700, 128, kv_starts=(3, 200), kv_lens=(700, 511)), whole),
        ("everything packed", packed(uneven, 8, 2, 128, window=(60, 0), softcap=4.0, sinks=True), whole),
        ("fp16", replace(case(2, 8, 2, 700, 700, 128), dtype=torch.float16), whole),
        ("many tiles", case(4, 16, 4, 1111, 1111, 128), whole),
    ]
    return {"few": few, "many": few + many, "none": []}[which]


def forwarded(recorder, inputs, case):
    """(results of the package as it is, the ``Call`` of its backward)."""
    from fused_rope_attn.testing import run_op

    recorder.last = None
    out = run_op(inputs, case, backend="hopper")
    return out, recorder.last


def shape_call(recorder, name):
    """The ``Call`` of the backward of a timed shape, its q, k, v and do."""
    from fused_rope_attn import rope_attention, rope_tables

    batch, heads_q, heads_kv, length, head_dim = SHAPES[name]

    def normal(heads):
        return torch.randn(batch, length, heads, head_dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)

    cos, sin = rope_tables(length, head_dim, device=DEVICE)
    leaves = [normal(heads).requires_grad_() for heads in (heads_q, heads_kv, heads_kv)]
    do = normal(heads_q)
    recorder.last = None
    o = rope_attention(*leaves, cos, sin, True, backend="hopper")
    torch.autograd.grad(o, leaves, do)
    return recorder.last, leaves, do


# --- compilation in parallel ------------------------------------------------------------------------------------------


def zero_inputs(case):
    """As ``make_inputs``, of zeros: for what is compiled only."""
    from fused_rope_attn import rope_tables

    def zeros(heads, length):
        return torch.zeros(case.batch, length, heads, case.head_dim, device=DEVICE, dtype=case.dtype).transpose(1, 2)

    tables = rope_tables(case.len_k, case.head_dim, device=DEVICE)
    return zeros(case.heads_q, case.len_q), zeros(case.heads_kv, case.len_k), zeros(case.heads_kv, case.len_k), *tables


def shape_case(name):
    from fused_rope_attn.testing import Case

    batch, heads_q, heads_kv, length, head_dim = SHAPES[name]
    return Case(batch, heads_q, heads_kv, length, length, head_dim, dtype=torch.bfloat16)


def prepared_call(case, changes):
    """A ``Call`` as ``forwarded`` gives it, of zeros in place of what a forward pass makes."""
    from fused_rope_attn.attention import planning
    from fused_rope_attn.attention.arguments import rotated_shape
    from fused_rope_attn.attention.problem import Tensors, describe
    from fused_rope_attn.testing import masks_of, norms_of

    q, k, v, cos, sin = zero_inputs(case)
    masks, norms = masks_of(case, q.device), norms_of(case, q.device)
    ends = [None, None]
    longest = 0
    if case.seqlens is not None:
        lengths = torch.tensor(case.seqlens, dtype=torch.int32).reshape(-1, 2)
        sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(DEVICE)
        ends = [sums[:, 0].contiguous(), sums[:, 1].contiguous()]
        longest = int(lengths.max())
        q, k, v = (x[0].transpose(0, 1).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    tensors = Tensors(
        q, k, v, cos, sin, masks.get("sinks"), masks.get("kv_starts"), masks.get("kv_lens"), *ends,
        norms.get("q_norm"), norms.get("k_norm"),
    )  # fmt: skip
    problem = describe(
        tensors, causal=case.causal, softmax_scale=case.scale, rotary_dim=case.rotary, interleaved=False,
        window=masks.get("window"), softcap=masks.get("softcap") or 0.0, max_seqlen=longest,
        norm_eps=None if case.norms is None else case.norm_eps, norm_offset=case.norms, backend="hopper",
    )  # fmt: skip
    config = replace(planning.plan_for(problem, v).backward, **changes)
    lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=DEVICE)
    raw = {"raw_q": q, "raw_k": k} if case.norms is not None else {}
    tensors = tensors._replace(q=q.new_zeros(rotated_shape(problem)), k=k.new_zeros(k.shape), **raw)
    return Call(problem, tensors, torch.zeros_like(q), torch.zeros_like(q), lse, True, config)


def jobs_of(options):
    """(kind, argument, variant) of what is compiled ahead, the longest first."""
    cases = [("case", i) for i in range(len(check_cases(options.cases)))]
    shapes = [("shape", name) for name in options.shapes]
    forward = [("forward", name) for name in options.shapes] + [("checked", i) for _, i in cases]
    variants = range(len(options.variants))
    return [(*x, None) for x in forward] + [(*x, v) for v in variants for x in cases + shapes]


def worker(options, number, queue, failures):
    """Run what ``jobs_of`` lists until there is nothing left, so that the kernels are in Triton's cache."""
    torch.set_num_threads(1)
    random.seed(number)
    try:
        from fused_rope_attn.testing import make_inputs, run_op

        recorder = Recorder()
        variants = [None] * len(options.variants)
        cases = check_cases(options.cases)
        while True:
            job = queue.get()
            if job is None:
                return
            kind, what, index = job
            try:
                if kind == "forward":
                    shape_call(recorder, what)
                elif kind == "checked":
                    case = cases[what][1]
                    run_op(make_inputs(case, DEVICE), case, backend="hopper")
                else:
                    if variants[index] is None:
                        variants[index] = Variant(options.variants[index]).load()
                    if kind == "case":
                        call = prepared_call(cases[what][1], cases[what][2])
                    else:
                        call = prepared_call(shape_case(what), {})
                    variants[index].bound(call)()
                finish()
            except Stuck as error:
                failures.put(("stuck", f"{kind} {what}", options.variants[index or 0], str(error)))
                failures.close()
                failures.join_thread()
                os._exit(3)
            except Exception as error:
                name = "base" if index is None else options.variants[index]
                failures.put((kind, str(what), name, f"{type(error).__name__}: {error}"[:300]))
                if "CUDA error" in str(error) or "illegal" in str(error):
                    return
            torch.cuda.empty_cache()
    except Exception:
        failures.put(("worker", str(number), "", traceback.format_exc()[-400:]))


def compile_ahead(options, meanwhile):
    """``worker`` in many processes; ``meanwhile`` runs here."""
    context = multiprocessing.get_context("spawn")
    queue, failures = context.Queue(), context.Queue()
    jobs = distinct(jobs_of(options))
    for job in jobs:
        queue.put(job)
    count = min(options.jobs, len(jobs))
    for _ in range(count):
        queue.put(None)
    workers = [context.Process(target=worker, args=(options, i, queue, failures), daemon=True) for i in range(count)]
    for process in workers:
        process.start()
    meanwhile()
    deadline = START + 0.65 * options.seconds
    for process in workers:
        process.join(max(0.1, deadline - time.monotonic()))
    for process in workers:
        if process.is_alive():
            say("a compiling process was late; ended")
            process.terminate()
    stuck = set()
    while True:
        try:
            failure = failures.get(timeout=0.3)
        except Exception:  # there is none left
            return stuck
        say("ahead:", *failure)
        if failure[0] == "stuck":
            stuck.add(failure[2])


def distinct(jobs):
    """Without shapes that have another shape's kernels: same head dim, group and configuration."""
    from fused_rope_attn.attention import configs

    seen, kept = set(), []
    for kind, what, index in jobs:
        mark = kind, what, index
        if kind in ("shape", "forward"):
            _, heads_q, heads_kv, length, head_dim = SHAPES[what]
            row = configs.hopper_backward(head_dim, True, configs.bucket(length), heads_q != heads_kv)
            mark = kind, replace(row.config, section_bytes=0), head_dim, length >= 65536, index
        if mark not in seen:
            seen.add(mark)
            kept.append((kind, what, index))
    return kept


# --- rival ------------------------------------------------------------------------------------------------------------


def fa4_backward(leaves, do):
    """FlashAttention-4's bare backward of the same q, k, v (not rotated), as a function."""
    from flash_attn.cute import flash_attn_func

    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    o = flash_attn_func(*leaves, causal=True)
    o = o[0] if isinstance(o, tuple) else o
    do = do.transpose(1, 2)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


# --- correctness ------------------------------------------------------------------------------------------------------


def check(options, recorder, variants, rows):
    """(What float64 does not confirm, of which variants, whether the GPU is lost to this process.)"""
    from fused_rope_attn.testing import compare, make_inputs, noise_of_zero, run_reference

    wrong = {}
    for name, case, changes in check_cases(options.cases):
        if spent(options, 0.75):
            say("no time for check", name)
            continue
        try:
            inputs = make_inputs(case, DEVICE)
            _, call = forwarded(recorder, inputs, case)
            ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
            call.config = replace(call.config, **changes)
        except Exception as error:
            say("check", name, "cannot be made:", type(error).__name__, str(error)[:300])
            rows.append({"check": name, "error": str(error)[:500]})
            continue
        ratios = []
        for variant in variants:
            worst, details = 0.0, []
            try:
                for _ in range(3):  # more than one meeting of the warps
                    got = variant.bound(call)()
                finish()
                for field, tensor in zip(("dq", "dk", "dv"), got):
                    exact, near = getattr(ref64, field), getattr(eager, field)
                    held = compare(
                        field, tensor.reshape(exact.shape), exact, near, grad=True, dtype=case.dtype,
                        zero=noise_of_zero(field, case, inputs),
                    )  # fmt: skip
                    worst = max(worst, held.ratio)
                    if not held.ok:
                        details.append(f"{field}: {held}")
            except Exception as error:
                details.append(f"{type(error).__name__}: {error}"[:300])
                if isinstance(error, Stuck) or "CUDA error" in str(error):
                    say("THE CONTEXT IS BROKEN by", variant.name, "at", name, details)
                    wrong[variant.name] = details
                    rows.append({"check": name, "variant": variant.name, "ok": False, "details": details})
                    return wrong, True
            ratios.append(f"{variant.name} {worst:.2f}{' WRONG' if details else ''}")
            rows.append({"check": name, "variant": variant.name, "ok": not details, "ratio": worst, "details": details})
            if details:
                wrong.setdefault(variant.name, []).append(f"{name}: {details[0][:300]}")
        say("check", f"{name:20s}", ", ".join(ratios))
    return wrong, False


def distance(xs, ys):
    """The largest relative rms distance of dq, dk, dv."""
    worst = 0.0
    for x, y in zip(xs[:3], ys[:3]):
        for i in range(x.shape[0]):  # not all in float64 at once
            a, b = x[i].double(), y[i].double()
            far = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
            worst = max(worst, far if math.isfinite(far) else math.inf)
    return worst


# --- timing -----------------------------------------------------------------------------------------------------------


def captured(function, calls, stream):
    """A graph of so many calls, and what its last call writes."""
    with torch.cuda.stream(stream):
        function()
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                out = function()
    for x in out[:3]:
        x.detach().fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    if not all(bool(torch.isfinite(x).all()) for x in out[:3]):
        raise RuntimeError("the graph does not write its outputs")
    return graph


def once(graph, replays=1):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / replays


def time_shape(options, recorder, variants, name, card, share_until, rows):
    """Median times of all variants at one shape, (row for the table)."""
    call, leaves, do = shape_call(recorder, name)
    batch, heads_q, _, length, head_dim = SHAPES[name]
    calls = max(1, min(20, int(4e12 / (10 * batch * heads_q * length**2 * head_dim))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    functions, notes, graphs = {}, {}, {}
    first = None
    for variant in variants:
        try:
            functions[variant.name] = variant.bound(call)
            got = functions[variant.name]()
            finish()
            if first is None:
                first = got
            notes[variant.name] = distance(got, first)
            if not notes[variant.name] <= 5e-3:
                say(name, variant.name, "DIFFERS from", variants[0].name, notes[variant.name])
                rows.append({"shape": name, "variant": variant.name, "error": f"differs by {notes[variant.name]}"})
                del functions[variant.name]
        except Exception as error:
            say(name, variant.name, "failed:", type(error).__name__, str(error)[:200])
            rows.append({"shape": name, "variant": variant.name, "error": str(error)[:500]})
            functions.pop(variant.name, None)
            if isinstance(error, Stuck) or "CUDA error" in str(error):
                raise
    if options.rival:
        try:
            with torch.cuda.stream(stream):
                functions[FA4] = fa4_backward(leaves, do)
        except Exception as error:
            say(name, FA4, "is not there:", type(error).__name__, str(error)[:160])
            options.rival = "flash_attn" in sys.modules
    first = got = None
    for key in list(functions):
        try:
            graphs[key] = captured(functions[key], calls, stream)
        except Exception as error:
            say(name, key, "cannot be captured:", type(error).__name__, str(error)[:200])
            rows.append({"shape": name, "variant": key, "error": str(error)[:500]})
            if "CUDA error" in str(error):
                raise
    times = {key: [] for key in graphs}
    for graph in graphs.values():
        once(graph)
    replays = {key: max(1, min(20, int(options.sample_ms / once(graph)))) for key, graph in graphs.items()}
    for index in range(options.rounds):
        if index >= 3 and time.monotonic() > share_until:
            break
        for key in random.sample(list(graphs), len(graphs)):
            times[key].append(once(graphs[key], replays[key]) / calls)
    energy = {key: [] for key in graphs}
    if card is not None and name in options.energy:
        for order in (list(graphs), list(graphs)[::-1]):
            for key in order:
                if not spent(options, 0.97):
                    energy[key].append(joules(card, graphs[key], calls, options.energy_seconds))
    table = {}
    for key, values in times.items():
        if not values:
            continue
        quantiles = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
        mj = [x["mj"] for x in energy[key] if x is not None]
        table[key] = {
            "shape": name, "variant": key, "ms": statistics.median(values), "p20": quantiles[0], "p80": quantiles[3],
            "rounds": values, "distance": notes.get(key), "mj": statistics.mean(mj) if mj else None, "loads": energy[key],
        }  # fmt: skip
    rows += table.values()
    return table


def joules(card, graph, calls, seconds):
    """Energy of a call under load, from NVML's counter, between its steps."""
    counter, mhz, replays = card, [], 0
    each = max(1, int(10 / once(graph)))
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.25 * seconds:
        for _ in range(each):
            graph.replay()
        torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    steps, last, pending = [], counter.millijoules(), []
    start.record()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(each):
            graph.replay()
        replays += each
        done = torch.cuda.Event()
        done.record()
        pending.append(done)
        while len(pending) >= 3:
            read = counter.millijoules()
            if read != last:
                last = read
                steps.append((time.perf_counter(), read))
                mhz.append(counter.megahertz())
            if pending[0].query():
                pending.pop(0)
            else:
                time.sleep(2e-4)
    end.record()
    torch.cuda.synchronize()
    if len(steps) < 2:
        return None
    power = (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0]) * 1e-3
    ms = start.elapsed_time(end) / (replays * calls)
    return {"mj": power * ms, "watts": power, "ms": ms, "mhz": statistics.median(mhz)}


def spent(options, share=0.95):
    return time.monotonic() - START > share * options.seconds


def table_lines(options, names, tables, wrong):
    base = names[0]
    columns = [*names, *([FA4] if any(FA4 in t for t in tables.values()) else [])]
    lines = [f"time over {base}'s (its ms first); spread: p20..p80 of {base} over its median; mJ over {base}'s mJ"]
    lines.append(f"{'shape':15s} {base + ' ms':>10s} {'spread':>11s} " + " ".join(f"{c:>12s}" for c in columns[1:]))
    for shape, table in tables.items():
        if base not in table:
            lines.append(f"{shape:15s} no {base}")
            continue
        own = table[base]
        spread = f"{own['p20'] / own['ms']:.3f}..{own['p80'] / own['ms']:.3f}"
        cells = [f"{table[c]['ms'] / own['ms']:12.4f}" if c in table else f"{'-':>12s}" for c in columns[1:]]
        lines.append(f"{shape:15s} {own['ms']:10.4f} {spread:>11s} " + " ".join(cells))
        if own.get("mj"):
            cells = [
                f"{table[c]['mj'] / own['mj']:12.4f}" if c in table and table[c].get("mj") else f"{'-':>12s}"
                for c in columns[1:]
            ]
            lines.append(f"{'   mJ':15s} {own['mj']:10.1f} {'':>11s} " + " ".join(cells))
    for name, details in wrong.items():
        lines.append(f"WRONG {name}: {details[0][:240]}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--variants", default="base;ds;ds,named;ds,lag", help="semicolon-separated; the first is the base")
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sample-ms", type=float, default=12.0, help="of one sample, in replays of a graph")
    parser.add_argument("--cases", choices=("few", "many", "none"), default="few", help="compared with float64")
    parser.add_argument("--energy", nargs="?", const="Llama7B-4K,Llama3-8B-16K", default="", help="shapes, comma-separated")
    parser.add_argument("--energy-seconds", type=float, default=0.4)
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="without FlashAttention-4")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 4), help="processes that compile")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--keys", action="store_true", help="load the variants, print their keys, run nothing (no GPU)")
    options = parser.parse_args()
    options.shapes = [name for name in options.shapes.split(",") if name]
    options.energy = [name for name in options.energy.split(",") if name]
    options.variants = [text.strip() for text in options.variants.split(";") if text.strip()]
    unknown = set(options.shapes) - set(SHAPES)
    if unknown:
        parser.error(f"no shape {', '.join(unknown)}")
    if options.keys:
        for text in options.variants:
            print(text, Variant(text).load().key[:16])
        return 0
    if not torch.cuda.is_available():
        print("this lab needs a GPU")
        return 2
    import triton

    out = os.environ.get("OUT", "out")
    os.makedirs(out, exist_ok=True)
    rows = [{"argv": sys.argv[1:], "triton": triton.__version__, "torch": torch.__version__,
             "device": torch.cuda.get_device_name(), "commit": os.environ.get("FUSED_ROPE_COMMIT", "")}]  # fmt: skip
    say(rows[0]["device"], "triton", triton.__version__)
    random.seed()
    torch.manual_seed(random.randrange(1 << 30))

    def meanwhile():
        if not options.rival:
            return
        for head_dim, heads_kv in ((128, 8), (128, 2), (64, 8), (96, 8)):
            try:
                x = [torch.zeros(1, h, 256, head_dim, device=DEVICE, dtype=torch.bfloat16) for h in (8, heads_kv, heads_kv)]
                x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
                fa4_backward(x, x[0])()
                torch.cuda.synchronize()
            except ImportError as error:
                say("no FlashAttention-4:", str(error)[:160])
                options.rival = False
                return
            except Exception as error:
                say("FlashAttention-4 at D", head_dim, type(error).__name__, str(error)[:160])
        say("FlashAttention-4 is compiled")

    stuck = compile_ahead(options, meanwhile)
    say("compiled ahead")
    recorder = Recorder()
    variants, keys = [], {}
    for text in options.variants:
        if text in stuck:
            say(text, "is left out: it does not come back")
            rows.append({"variant": text, "error": "stuck"})
            continue
        try:
            variant = Variant(text).load()
            if variant.key in keys:
                say(text, "has the same kernel as", keys[variant.key], "and is left out")
                continue
            keys[variant.key] = text
            variants.append(variant)
        except Exception as error:
            say(text, "cannot be loaded:", type(error).__name__, str(error)[:300])
    wrong, broken = check(options, recorder, variants, rows)
    names = [variant.name for variant in variants]
    variants = [variant for variant in variants if variant.name not in wrong]
    tables = {}
    for index, name in enumerate(options.shapes):
        if broken or options.check_only or not variants or variants[0].name != names[0] or spent(options):
            break
        left = START + 0.95 * options.seconds - time.monotonic()
        try:
            until = time.monotonic() + left / (len(options.shapes) - index)
            tables[name] = time_shape(options, recorder, variants, name, counter(options), until, rows)
            say(name, {key: round(x["ms"], 4) for key, x in tables[name].items()})
        except Exception as error:
            say(name, "failed:", type(error).__name__, str(error)[:300])
            rows.append({"shape": name, "error": str(error)[:500]})
            if isinstance(error, Stuck) or "CUDA error" in str(error):
                broken = True
                break
        torch.cuda.empty_cache()
    missing = [name for name in options.shapes if name not in tables]
    with open(os.path.join(out, f"bwd_lab-{triton.__version__}.json"), "w") as file:
        json.dump(rows, file, indent=1, default=str)
    if missing and not options.check_only:
        print("not timed:", ", ".join(missing))
    print("\n".join(table_lines(options, names, tables, wrong)))
    say("done; triton", triton.__version__)
    if broken:
        sys.stdout.flush()
        os._exit(1)  # an exit that tidies up would wait for the GPU
    return 1 if wrong else 0


def counter(options):
    """NVML's counter, or None."""
    if not options.energy:
        return None
    try:
        from bench.suites.energy.counter import Nvml

        return Nvml(torch.device("cuda", 0))
    except Exception as error:
        say("no energy:", str(error)[:200])
        options.energy = []
        return None


if __name__ == "__main__":
    sys.exit(main())
