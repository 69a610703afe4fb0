"""Checkouts and configurations of the forward against each other: lab.py OUT JOBS SECONDS GROUPS [--backward]"""
import importlib, json, os, re, shutil, subprocess, sys, tempfile, time
from dataclasses import replace
from pathlib import Path
START = time.monotonic()
sys.path.insert(0, os.getcwd())
import torch
from bench.attention.cases import CASES, _case
from bench.timing import GpuClock, interleave, quantile
sys.path.insert(0, str(Path(__file__).parent))
from groups import GROUPS
CASE = {c.name: c for c in (*CASES, _case("Phi3", 1, 32, 32, 8192, 96, "x"), _case("Small-full", 4, 8, 8, 8192, 64, "x", causal=False), _case("Phi3-full", 1, 32, 32, 8192, 96, "x", causal=False))}
HERE = Path(__file__).parent

class Tree:
    def __init__(self, name):
        self.name = name
        package = "fused_rope_attn"
        if name != "A":
            folder = Path(tempfile.mkdtemp())
            shutil.copytree("fused_rope_attn", folder / "fused_rope_attn", ignore=shutil.ignore_patterns("__pycache__"))
            subprocess.run(["patch", "-s", "-p1", "-i", str(HERE / "patches" / f"{name}.patch")], cwd=folder, check=True)
            package = f"tree_{name}"
            os.rename(folder / "fused_rope_attn", folder / package)
            for path in (folder / package).rglob("*.py"):
                path.write_text(re.sub(r"\bfused_rope_attn\b", package, path.read_text()))
            sys.path.insert(0, str(folder))
        g = lambda m: importlib.import_module(f"{package}.{m}")
        self.package = importlib.import_module(package)
        self.configs, self.ops, self.planning, self.known = g("attention.configs"), g("attention.ops"), g("attention.planning"), g("attention.known_calls")
        self.PreparedCalls = g("runtime.launch").PreparedCalls
        self.forward, self.backward = self.configs.hopper_forward, self.configs.hopper_backward

    def select(self, changes, bwd):
        c = self.configs
        which = self.backward if bwd else self.forward
        def find(*key):
            row = which(*key)
            return replace(row, config=replace(row.config, **changes), auto=c.BUCKETS, much_work=False, some_work=False)
        c.hopper_forward, c.hopper_backward = self.forward, self.backward
        if changes:
            setattr(c, "hopper_backward" if bwd else "hopper_forward", find)
        self.planning._plan.cache_clear(); self.known.forget()
        self.ops._forward_calls = self.PreparedCalls(self.ops._prepare_forward)
        self.ops._backward_calls = self.PreparedCalls(self.ops._prepare_backward)

TREES = {}
def tree(name):
    if name not in TREES:
        TREES[name] = Tree(name)
    return TREES[name]

def inputs(name):
    c = CASE[name].case
    torch.manual_seed(hash(name) % 1000)
    def normal(heads):
        return torch.randn(c.batch, c.len_q, heads, c.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return normal(c.heads_q), normal(c.heads_kv), normal(c.heads_kv), *tree("A").package.rope_tables(c.len_q, c.head_dim, device="cuda"), c.causal

def make(t, changes, x, bwd):
    t.select(changes or {}, bwd)
    backend = "triton" if changes is None else "auto"
    if not bwd:
        return lambda: t.package.rope_attention(*x, backend=backend)
    leaves = [y.detach().requires_grad_() for y in x[:3]]
    with torch.enable_grad():
        o = t.package.rope_attention(*leaves, *x[3:], backend=backend)
    do = x[0].flip(1)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

def results(fn):
    r = fn()
    return torch.cat([y.float().flatten() for y in r]) if isinstance(r, tuple) else r.float()

def mark(name, t, changes, bwd):
    c = CASE[name].case
    T = tree("A")
    row = (T.backward if bwd else T.forward)(c.head_dim, c.causal, T.configs.bucket(c.len_q), c.heads_q != c.heads_kv, False)
    return (t, c.head_dim, c.causal, c.heads_q // c.heads_kv, "portable" if changes is None else (repr(replace(row.config, section_bytes=0)), repr(sorted((k, v) for k, v in changes.items() if k != "section_bytes"))))

def jobs(groups, bwd):
    seen, found = set(), []
    for group in groups:
        for name, variants in GROUPS[group].items():
            for label, (t, changes) in variants.items():
                m = mark(name, t, changes, bwd)
                if m not in seen:
                    seen.add(m); found.append((name, t, changes))
    return found

def warm(groups, index, count, bwd):
    torch.set_num_threads(1)
    for name, t, changes in jobs(groups, bwd)[index::count]:
        try:
            with torch.no_grad():
                make(tree(t), changes, inputs(name), bwd)()
            torch.cuda.synchronize()
        except Exception as error:
            print("warm", name, t, changes, repr(error)[:300], flush=True)
        torch.cuda.empty_cache()

def main():
    args = [a for a in sys.argv[1:] if not a.startswith("--")]
    bwd = "--backward" in sys.argv
    out, count, seconds, groups = args[0], int(args[1]), float(args[2]), args[3].split(",")
    if len(args) > 4:
        return warm(groups, int(args[4]), count, bwd)
    workers = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], str(i)]) for i in range(count)]
    for worker in workers:
        try:
            worker.wait(max(1, START + 0.65 * seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill(); print("a worker was late", flush=True)
    print(f"compiled at {time.monotonic() - START:.0f} s", flush=True)
    clock = GpuClock(torch.device("cuda"))
    rows = []
    with torch.no_grad():
        for name, variants in (item for g in groups for item in GROUPS[g].items()):
            if time.monotonic() - START > 0.92 * seconds:
                print("no time for", name); continue
            try:
                x = inputs(name)
                fns, first, far = {}, None, {}
                for label, (t, changes) in variants.items():
                    try:
                        fn = make(tree(t), changes, x, bwd)
                        got = results(fn)
                        first = got if first is None else first
                        far[label] = ((got - first).norm() / first.norm()).item()
                        if not far[label] < 4e-3:
                            print(name, label, "DIFFERS", far[label], flush=True); continue
                        fns[label] = clock.capture(lambda: fn)
                    except Exception as error:
                        print(name, label, repr(error)[:200], flush=True)
                del first, got
                q, k, v = x[:3]
                if q.shape[1] == k.shape[1] and not bwd:
                    from torch.nn.attention import SDPBackend, sdpa_kernel
                    def cudnn():
                        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=x[-1])
                    try:
                        fns["cudnn"] = clock.capture(lambda: cudnn)
                    except Exception as error:
                        print(name, "cudnn", repr(error)[:200], flush=True)
                calls = {label: clock.calls_for(fn, 8.0) for label, fn in fns.items()}
                until = time.monotonic() + 6
                measured, _ = interleave(fns, clock.sample, calls, 11, lambda: time.monotonic() > until, mirrored=True)
                base = measured["A"].round_medians
                line = f"{name:16s}"
                for label, m in measured.items():
                    r = quantile([a / b for a, b in zip(m.round_medians, base)], 0.5)
                    rows.append({"shape": name, "variant": label, "ms": m.quantiles()[0], "ratio": r, "rounds": m.round_medians, "far": far.get(label), "triton": __import__("triton").__version__})
                    line += f" {label} {m.quantiles()[0]*1e3:.1f}" if label == "A" else f" {label} {r:.3f}"
                print(line, flush=True)
                fns.clear(); measured.clear()
            except Exception as error:
                print(name, repr(error)[:300], flush=True)
            torch.cuda.empty_cache()
            open(out, "w").write("".join(json.dumps(r) + "\n" for r in rows))
    print(f"done at {time.monotonic() - START:.0f} s", flush=True)

main()
