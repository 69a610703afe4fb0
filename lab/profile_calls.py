"""Start and duration of each kernel in a replayed graph."""
import sys, torch
sys.path.insert(0, ".")
from torch.profiler import ProfilerActivity, profile
from bench.attention.cases import CASES
from fused_rope_attn import rope_attention, rope_tables
for name in sys.argv[1:]:
    c = {c.name: c for c in CASES}[name].case
    mk = lambda h: torch.randn(c.batch, c.len_q, h, c.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    x = mk(c.heads_q), mk(c.heads_kv), mk(c.heads_kv), *rope_tables(c.len_q, c.head_dim, device="cuda"), c.causal
    with torch.no_grad():
        for _ in range(3): rope_attention(*x)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(20): rope_attention(*x)
        for _ in range(20): g.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
            g.replay(); torch.cuda.synchronize()
    events = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    t0 = events[0][0]
    print(name, len(events))
    for s, e, n in events[20:28]:
        print(f"  start {s - t0:9.2f} end {e - t0:9.2f} lasts {e - s:7.2f}  {n[:40]}")
