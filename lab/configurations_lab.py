"""Configurations of a pass against each other at named shapes, on a GPU.

    python lab/configurations_lab.py OUT.jsonl PROCESSES SECONDS GROUP

GROUP is a key of GROUPS: the forward's configurations (long, fwdB, order, narrow) or the backward's (bwd, bwdB). PROCESSES
compile ahead. A variant is a change of the table's row, None: the portable kernels; "base" is the row as it is. Every variant's
output (dq in the backward) is compared with base's, then CUDA graphs are timed in shuffled, mirrored rounds, as `bench` does.
The field `order` of the forward's configuration is this branch's: 0 the tree's order; odd: the output is multiplied in each
block (1, 17: behind the wait for the values, 3, 19: behind the weights), even: only where a maximum grew; 16 more: the barrier
of four warps stands behind the issue of the scores. Any but 0 awaits the values between maxima and exponentials.
"""
import json, math, os, subprocess, sys, time
from dataclasses import replace
START = time.monotonic()
sys.path.insert(0, os.getcwd())
import torch
from bench.attention.cases import CASES
from bench.timing import GpuClock, interleave, quantile
from fused_rope_attn import rope_attention, rope_tables
from fused_rope_attn.attention import configs, known_calls, ops, planning
from fused_rope_attn.runtime.launch import PreparedCalls

ORIGINAL = configs.hopper_forward
ORIGINAL_BWD = configs.hopper_backward
CASE = {c.name: c for c in CASES}
H, NH, PIN, NP = {"halves_diagonal": True}, {"halves_diagonal": False}, {"pin": True}, {"pin": False}
W240 = {"rotates_queries": False, "attend_registers": 240, "rotate_heads": 4}
W3 = {"consumers": 3, "rotates_queries": False, "attend_registers": 160, "rotate_heads": 4, "halves_diagonal": False}
LONG = {"base": {}, "halves": H, "halves-nopin": {**H, **NP}, "nopin": NP}
VF = {"values_first": True}
O = lambda n: {"order": n}
P = lambda r, h: {"post_rows": r, "post_heads": h}
SEC = lambda m: {"section_bytes": m << 20}
GROUPS = {
    "long": {
        "Llama3-8B-16K": {**LONG, "halves-240": {**H, **W240}, "halves-16M": {**H, "section_bytes": 16 << 20}, "halves-24M": {**H, "section_bytes": 24 << 20}},
        "Llama7B-8K": LONG, "Long-64K": LONG, "Llama7B-16K": LONG,
        "Llama7B-4K": {"base": {}, "nohalves": NH, "halves-nopin": NP},
        "Small-8K": {"base": {}, "pin": PIN, "vf": {"values_first": True}, "stages2": {"stages": 2}, "vf-stages2": {"values_first": True, "stages": 2},
                     "two-halves": {"consumers": 2, "stages": 2, "rotates_queries": True, "attend_registers": 208, "rotate_heads": 1, **H},
                     "two-240-halves": {"consumers": 2, "stages": 2, **W240, **H}, "two-240-halves-vf": {"consumers": 2, "stages": 3, **W240, **H, "values_first": True}},
        "Small-4K": {"base": {}, "three": {**W3, "stages": 3}, "three-vf": {**W3, "stages": 3, "values_first": True}, "two-240": W240, "vf": {"values_first": True}, "pin": PIN},
        "Phi3-4K": {"base": {}, "three": W3, "nohalves": NH, "pin": PIN, "late": {"values_first": False}, "240": W240},
        "Small-full-1K": {"base": {}, "240": W240, "three": {**W3, "stages": 3}, "portable": None, "vf": {"values_first": True}, "pin": PIN, "stages3": {"stages": 3}},
        "Llama7B-full-1K": {"base": {}, "240": W240, "pin": PIN, "240-pin": {**W240, **PIN}, "vf": {"values_first": True}},
        "Llama7B-full-4K": {"base": {}, "240": W240, "nopin": NP},
        "Llama70B-512": {"base": {}, "nohalves": NH, "240": W240}, "Llama7B-512": {"base": {}, "nohalves": NH, "240": W240},
        "Llama70B-1K": {"base": {}, "240": W240},
        "Gemma-1K": {"base": {}, "nopin": NP},
    },
    "fwdB": {
        "Phi3-4K": {"base": {}, "rr32": {"rotate_rows": 32}, "rr8": {"rotate_rows": 8}, "rh2": {"rotate_heads": 2}, "rh4": {"rotate_heads": 4}, "sec16": SEC(16), "sec24": SEC(24), "sec64": SEC(64), "late-pin": {"values_first": False, "pin": True}, "late": {"values_first": False}},
        "Llama3-8B-16K": {"base": {}, "halves": H, "vf-halves": {**H, **VF}, "vf-halves-nopin": {**H, **VF, **NP}, "vf": VF, "halves-16M": {**H, **SEC(16)}, "halves-8M": {**H, **SEC(8)}, "halves-rh4": {**H, "rotate_heads": 4}},
        "Llama7B-full-1K": {"base": {}, "vf": VF, "vf-pin": {**VF, **PIN}, "vf-rh2": {**VF, "rotate_heads": 2}, "vf-rh4": {**VF, "rotate_heads": 4}, "vf-rr32": {**VF, "rotate_rows": 32}, "vf-sec64": {**VF, **SEC(64)}},
        "Small-full-1K": {"base": {}, "rh2": {"rotate_heads": 2}, "rh4": {"rotate_heads": 4}, "rr32": {"rotate_rows": 32}, "rr8": {"rotate_rows": 8}, "n64s4": {"block_n": 64, "stages": 4}, "sec64": SEC(64), "nopdl": {"pdl": False}},
        "Llama7B-full-4K": {"base": {}, "vf": VF, "vf-nopin": {**VF, **NP}},
        "Small-8K": {"base": {}, "sec16": SEC(16), "sec64": SEC(64), "rh1": {"rotate_heads": 1}, "rh8": {"rotate_heads": 8}, "rr32": {"rotate_rows": 32}, "n64": {"block_n": 64, "stages": 5}},
        "Llama70B-1K": {"base": {}, "vf": VF, "vf-pin": {**VF, **PIN}, "pin": PIN, "rh2": {"rotate_heads": 2}},
        "Llama7B-4K": {"base": {}, "vf": VF, "vf-nopin": {**VF, **NP}, "sec16": SEC(16), "sec24": SEC(24)},
        "Llama3-8B-4K": {"base": {}, "vf": VF, "sec16": SEC(16), "sec24": SEC(24)},
        "Llama70B-512": {"base": {}, "nohalves": NH, "vf": VF, "vf-nohalves": {**VF, **NH}, "240-nohalves": {**W240, **NH}, "portable": None},
        "Long-64K": {"base": {}, "halves": H, "halves-16M": {**H, **SEC(16)}, "vf-halves": {**H, **VF}},
    },
    "order": {
        "Llama7B-4K": {"base": {}, "o3": O(3), "o19": O(19), "o17": O(17), "o18": O(18), "o19-nopin": {**O(19), **NP}},
        "Llama3-8B-16K": {"base": {}, "halves": H, "o19": O(19), "o19-halves": {**O(19), **H}, "o17-halves": {**O(17), **H}, "o19-halves-nopin": {**O(19), **H, **NP}},
        "Llama7B-full-1K": {"base": {}, "vf": VF, "o19": O(19), "o17": O(17)},
        "Llama70B-1K": {"base": {}, "o19": O(19), "o17": O(17), "o19-pin": {**O(19), **PIN}},
        "Small-8K": {"base": {}, "o3": O(3), "o19": O(19), "o17": O(17)},
        "Phi3-4K": {"base": {}, "o19-late": {**O(19), "values_first": False}, "o17-late": {**O(17), "values_first": False}, "o19-late-pin": {**O(19), "values_first": False, **PIN}, "o19-late-three": {**O(19), **W3, "values_first": False}},
        "Llama7B-2K": {"base": {}, "o19": O(19), "o17": O(17)},
        "Llama70B-512": {"base": {}, "o19": O(19), "o19-nohalves": {**O(19), **NH}, "vf": VF},
        "Llama7B-full-4K": {"base": {}, "o19": O(19), "o17": O(17), "o19-nopin": {**O(19), **NP}},
        "Small-4K": {"base": {}, "o19": O(19), "o17": O(17)},
        "Small-full-1K": {"base": {}, "o19": O(19), "o17": O(17)},
        "Gemma-4K": {"base": {}, "o19": O(19), "o17": O(17), "o19-nopin": {**O(19), **NP}},
        "Long-64K": {"base": {}, "o19": O(19), "o19-halves": {**O(19), **H}},
        "Llama3-8B-4K": {"base": {}, "o19": O(19)},
        "Llama7B-512": {"base": {}, "o19": O(19), "o19-nohalves": {**O(19), **NH}},
        "Phi3-1K": {"base": {}, "o19": O(19), "o19-late": {**O(19), "values_first": False}, "vf": VF},
        "Gemma-1K": {"base": {}, "o19": O(19)},
        "Small-2K": {"base": {}, "o19": O(19)},
    },
    "narrow": {
        "Small-4K": {"base": {}, "o19": O(19)},
        "Phi3-4K": {"base": {}, "o19-late-pin": {**O(19), "values_first": False, **PIN}, "o19-late": {**O(19), "values_first": False}},
        "Small-8K": {"base": {}, "o19": O(19)},
        "Small-2K": {"base": {}, "o19": O(19)},
        "Small-full-1K": {"base": {}, "o19": O(19)},
        "Phi3-1K": {"base": {}, "o19": O(19)},
    },
    "bwdB": {
        "Llama7B-512": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2), "16x4": P(16, 4), "16x2": P(16, 2)},
        "Llama70B-512": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2), "16x4": P(16, 4)},
        "Llama7B-1K": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2), "16x4": P(16, 4)},
        "Small-full-1K": {"base": {}, "8x2": P(8, 2), "8x1": P(8, 1), "16x2": P(16, 2)},
        "Small-1K": {"base": {}, "8x2": P(8, 2), "8x1": P(8, 1), "16x2": P(16, 2)},
        "Llama70B-1K": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2)},
        "Phi3-1K": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2), "halves": H, "halves-8x4": {**H, **P(8, 4)}},
        "Llama7B-2K": {"base": {}, "8x4": P(8, 4)},
        "Llama7B-full-1K": {"base": {}, "8x4": P(8, 4)},
        "Small-2K": {"base": {}, "8x4": P(8, 4), "8x2": P(8, 2), "16x4": P(16, 4), "q4": {"q_stages": 4}},
        "Small-4K": {"base": {}, "q4": {"q_stages": 4}, "8x4": P(8, 4)},
        "Phi3-4K": {"base": {}, "halves": H, "halves-8x4": {**H, **P(8, 4)}, "halves-sec64": {**H, **SEC(64)}},
        "Gemma-1K": {"base": {}, "8x4": P(8, 4), "16x2": P(16, 2), "8x2": P(8, 2)},
    },
    "bwd": {
        "Phi3-4K": {"base": {}, "halves": H, "q2": {"q_stages": 2}, "do1": {"do_stages": 1}, "sec16": SEC(16), "sec64": SEC(64), "post16x4": {"post_rows": 16, "post_heads": 4}, "post8x4": {"post_heads": 4}},
        "Small-8K": {"base": {}, "halves": H, "q4": {"q_stages": 4}, "do3": {"do_stages": 3}, "q4do3": {"q_stages": 4, "do_stages": 3}, "sec16": SEC(16), "sec64": SEC(64), "post16x4": {"post_rows": 16, "post_heads": 4}},
        "Small-full-1K": {"base": {}, "q4do3": {"q_stages": 4, "do_stages": 3}, "post16x4": {"post_rows": 16, "post_heads": 4}, "post8x8": {"post_heads": 8}, "post8x2": {"post_heads": 2}, "rot": {"rotate_heads": 4}, "portable": None},
        "Llama7B-16K": {"base": {}, "halves": H, "sec16": SEC(16), "sec64": SEC(64), "post16x4": {"post_rows": 16, "post_heads": 4}},
        "Long-32K": {"base": {}, "halves": H, "sec16": SEC(16), "sec64": SEC(64)},
        "Llama7B-512": {"base": {}, "nohalves": NH, "post8x4": {"post_heads": 4}},
        "Llama7B-4K": {"base": {}, "nohalves": NH, "sec16": SEC(16), "sec64": SEC(64)},
    },
}

def select(changes):
    def find(*key):
        row = ORIGINAL(*key)
        return replace(row, config=replace(row.config, **(changes or {})), auto=configs.BUCKETS, much_work=False, some_work=False)
    def find_backward(*key):
        row = ORIGINAL_BWD(*key)
        return replace(row, config=replace(row.config, **(changes or {})), auto=configs.BUCKETS, much_work=False, some_work=False)
    if BWD:
        configs.hopper_backward = find_backward if changes else ORIGINAL_BWD
        ops._backward_calls = PreparedCalls(ops._prepare_backward)
    else:
        configs.hopper_forward = find if changes else ORIGINAL
    planning._plan.cache_clear(); known_calls.forget()
    ops._forward_calls = PreparedCalls(ops._prepare_forward)

def inputs(name):
    c = CASE[name].case
    def normal(heads):
        return torch.randn(c.batch, c.len_q, heads, c.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return normal(c.heads_q), normal(c.heads_kv), normal(c.heads_kv), *rope_tables(c.len_q, c.head_dim, device="cuda"), c.causal

BWD = sys.argv[4].startswith("bwd")
def call(x, changes):
    backend = "triton" if changes is None else "auto"
    if BWD:
        return grads(x, changes)()[0]
    return rope_attention(*x, backend=backend)

def grads(x, changes):
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    with torch.enable_grad():
        o = rope_attention(*leaves, *x[3:], backend="triton" if changes is None else "auto")
    do = x[0].flip(1)
    def run():
        return torch.autograd.grad(o, leaves, do, retain_graph=True)
    return run

def mark(name, changes):
    c = CASE[name].case
    row = (ORIGINAL_BWD if BWD else ORIGINAL)(c.head_dim, c.causal, configs.bucket(c.len_q), c.heads_q != c.heads_kv, False)
    return (c.head_dim, c.causal, c.heads_q // c.heads_kv, "portable" if changes is None else replace(row.config, section_bytes=0, **{k: v for k, v in changes.items() if k != "section_bytes"}))

def jobs(group):
    seen, found = set(), []
    for name, variants in GROUPS[group].items():
        for label, changes in variants.items():
            if mark(name, changes) not in seen:
                seen.add(mark(name, changes)); found.append((name, changes))
    return found

def warm(group, index, count):
    torch.set_num_threads(1)
    for name, changes in jobs(group)[index::count]:
        try:
            select(changes)
            with torch.no_grad():
                call(inputs(name), changes)
            torch.cuda.synchronize()
        except Exception as error:
            print("warm", name, changes, repr(error)[:300], flush=True)
        torch.cuda.empty_cache()

def main():
    out, count, seconds, group = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    if len(sys.argv) > 5:
        return warm(group, int(sys.argv[5]), count)
    workers = [subprocess.Popen([sys.executable, __file__, out, str(count), str(seconds), group, str(i)]) for i in range(count)]
    for worker in workers:
        try:
            worker.wait(max(1, START + 0.6 * seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill(); print("a worker was late", flush=True)
    print(f"compiled at {time.monotonic() - START:.0f} s", flush=True)
    clock = GpuClock(torch.device("cuda"))
    rows = []
    with torch.no_grad():
        for name, variants in GROUPS[group].items():
            if time.monotonic() - START > 0.92 * seconds:
                print("no time for", name); continue
            try:
                x = inputs(name)
                fns, first, far = {}, None, {}
                for label, changes in variants.items():
                    try:
                        select(changes)
                        got = call(x, changes).float()
                        first = got if first is None else first
                        far[label] = ((got - first).norm() / first.norm()).item()
                        if not far[label] < 4e-3:
                            print(name, label, "DIFFERS", far[label], flush=True); continue
                        fns[label] = clock.capture((lambda: grads(x, changes)) if BWD else (lambda: lambda: call(x, changes)))
                    except Exception as error:
                        print(name, label, repr(error)[:200], flush=True)
                del first, got
                q, k, v = x[:3]
                if q.shape[1] == k.shape[1] and not BWD:
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
                base = measured["base"].round_medians
                line = f"{name:16s}"
                for label, m in measured.items():
                    r = quantile([a / b for a, b in zip(m.round_medians, base)], 0.5)
                    rows.append({"shape": name, "variant": label, "ms": m.quantiles()[0], "ratio": r, "rounds": m.round_medians, "far": far.get(label), "triton": __import__("triton").__version__})
                    line += f" {label} {m.quantiles()[0]*1e3:.1f}" if label == "base" else f" {label} {r:.3f}"
                print(line, flush=True)
                fns.clear(); measured.clear()
            except Exception as error:
                print(name, repr(error)[:300], flush=True)
            torch.cuda.empty_cache()
            open(out, "w").write("".join(json.dumps(r) + "\n" for r in rows))
    print(f"done at {time.monotonic() - START:.0f} s", flush=True)

main()
