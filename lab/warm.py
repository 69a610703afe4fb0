"""Compile what the rows need: warm.py INDEX COUNT"""
import sys, torch
sys.path.insert(0, ".")
from bench.attention.cases import CASES
from fused_rope_attn import rope_attention, rope_tables
torch.set_num_threads(1)
seen, todo = set(), []
for b in CASES:
    c = b.case
    key = (c.head_dim, c.causal, c.heads_q // c.heads_kv, 512 if c.len_q <= 512 else 1024 if c.len_q <= 1024 else 4096 if c.len_q <= 4096 else 9999, c.len_q if c.len_q < 4096 else 0)
    if key not in seen: seen.add(key); todo += [(c, False), (c, True)]
for c, grad in todo[int(sys.argv[1])::int(sys.argv[2])]:
    try:
        mk = lambda h: torch.randn(c.batch, c.len_q, h, c.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        x = [mk(c.heads_q), mk(c.heads_kv), mk(c.heads_kv)]
        cs = rope_tables(c.len_q, c.head_dim, device="cuda")
        if grad:
            x = [t.requires_grad_() for t in x]
            rope_attention(*x, *cs, c.causal).sum().backward()
        else:
            with torch.no_grad(): rope_attention(*x, *cs, c.causal)
        torch.cuda.synchronize(); del x; torch.cuda.empty_cache()
    except Exception as e: print("warm", c.name, repr(e)[:200], flush=True)
