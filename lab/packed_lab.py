import sys, torch
sys.path.insert(0, ".")
from pathlib import Path
from bench.timing import GpuClock, interleave, quantile
from tools.compare_checkouts import import_checkout
import fused_rope_attn as new
old = import_checkout(Path("/tmp/old"), "fused_rope_attn_before")
clock = GpuClock(torch.device("cuda"))
SHAPES = ((256, 512, 32, 8, 128), (256, 256, 32, 32, 128), (256, 512, 32, 8, 96))
for B, top, HQ, HKV, D in [SHAPES[int(a)] for a in sys.argv[1:]] or SHAPES:
    counts = torch.randint(top // 4, top + 1, (B,), generator=torch.Generator().manual_seed(0))
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().cuda()
    T, M = int(counts.sum()), int(counts.max())
    x = [torch.randn(T, h, D, device="cuda", dtype=torch.bfloat16) for h in (HQ, HKV, HKV)]
    cs = new.rope_tables(top, D, device="cuda")
    fns, outs = {}, {}
    with torch.no_grad():
        for n, p in (("old", old), ("new", new)):
            fn = lambda p=p: p.rope_attention_varlen(*x, *cs, cu, cu, M, M, True)
            outs[n] = fn().float(); fns[n] = clock.capture(lambda: fn)
        calls = {k: clock.calls_for(f, 8.0) for k, f in fns.items()}
        m, _ = interleave(fns, clock.sample, calls, 11, lambda: False, mirrored=True)
    r = quantile([a / b for a, b in zip(m["new"].round_medians, m["old"].round_medians)], .5)
    print(f"packed {B} x <={top} {HQ}/{HKV} D{D}: old {m['old'].quantiles()[0]*1e3:.1f} us, new/old {r:.3f}, differ {((outs['old']-outs['new']).norm()/outs['old'].norm()).item():.1e}")
