"""One forward call of each provider at each shape, for ncu.

    ncu --profile-from-start off --clock-control none --set full -o REPORT python lab/profile_forward.py SHAPES PROVIDERS

SHAPES and PROVIDERS: names of `python -m bench`, such as Llama7B-4K,Llama3-8B-16K and fused,bare_fa3,bare_fa4.
"""
import os, sys
sys.path.insert(0, os.getcwd())
import torch
from bench.attention.cases import CASES
from bench.attention.providers import PROVIDERS
from fused_rope_attn import rope_tables
cases = {c.name: c.case for c in CASES}
x = {}
for name in sys.argv[1].split(","):
    c = cases[name]
    n = lambda h: torch.randn(c.batch, c.len_q, h, c.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    x[name] = n(c.heads_q), n(c.heads_kv), n(c.heads_kv), rope_tables(c.len_q, c.head_dim, device="cuda"), c.causal
ps = [PROVIDERS[p] for p in sys.argv[2].split(",")]
with torch.no_grad():
    for step in range(2):
        if step: torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStart()
        for name, (q, k, v, t, causal) in x.items():
            for p in ps:
                try:
                    p.run(q, k, v, p.prepare(*t, q.dtype), causal)
                except Exception as e:
                    print(name, p.name, repr(e)[:300])
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
