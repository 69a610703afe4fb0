"""Helpers of the suites' tests: a run on a CPU, and rows of attention with made-up times."""

import dataclasses

import torch

from bench.attention import cases, providers
from bench.runner import Options, Run
from fused_rope_attn import testing
from tests.support.clocks import WallClock

FACTS = {
    "gpu": "toy",
    "driver": "1",
    "torch": "2",
    "triton": "3",
    "date": "2026-01-02T03:04:05",
    "commit": "abc",
    "packages": {"transformers": "5"},
}


TINY = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))


@dataclasses.dataclass
class Scripted:
    """A provider that does what a test wants; ``run`` receives what a baseline receives."""

    name: str
    action: object
    label: str = ""
    rotates: bool = True
    in_place: bool = False
    half_tables: bool = False
    backward: bool = True
    pip: tuple = ("scripted",)
    lacks: str | None = None

    def __post_init__(self):
        self.label = self.label or self.name

    def missing(self):
        return self.lacks

    def unsupported(self, case):
        return None

    def prepare(self, cos, sin, dtype):
        return cos, sin

    def run(self, q, k, v, tables, causal):
        return self.action(q, k, v, tables, causal)


def right(q, k, v, tables, causal):
    return providers.OURS["fused"].run(q, k, v, tables, causal)


def run(suite, *cases, clock=None, **options):
    """(the rows of all cases, the run), after two rounds unless ``options`` say otherwise."""
    measurement = Run(suite, Options(**{"rounds": 2} | options), clock or WallClock(), FACTS)
    return [row for block in measurement.rows(list(cases)) for row in block], measurement


def attention_row(case, provider, ms, part="fwd", mode="graph", status="ok", **extra):
    """A row of ``python -m bench`` as an H200 would give it, with ``ms`` in every round."""
    bench_case = next(c for c in cases.CASES if c.name == case)
    c, who = bench_case.case, providers.PROVIDERS[provider]
    return {
        "case": case,
        "family": bench_case.family,
        "groups": bench_case.groups,
        "shape": bench_case.shape,
        "batch": c.batch,
        "heads_q": c.heads_q,
        "heads_kv": c.heads_kv,
        "len_q": c.len_q,
        "head_dim": c.head_dim,
        "causal": c.causal,
        "dtype": "bfloat16",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cudnn": 91900,
        "packages": {"liger-kernel": "0.8.5"},
        "commit": "0123abcd",
        "date": "2026-11-21T10:00:00+00:00",
        "provider": provider,
        "label": who.label,
        "ours": providers.is_ours(provider),
        "rotates": who.rotates,
        "pass": part,
        "mode": mode,
        "status": status,
        "detail": "",
        "ms": ms,
        "p20": 0.98 * ms,
        "p80": 1.03 * ms,
        "rounds": [ms] * 5,
        "calls": 100,
        "tflops": bench_case.flops(part) / ms * 1e-9,
        "peak_mib": 64.0,
        "gate_row_ratio": 3.3,
        "gate_rms_ratio": 1.4,
    } | extra


def published(mode="graph"):
    """Rows of forward with the published times of the rivals, and ours winning at some shapes and losing at others."""
    figures = {
        "Small-512": (0.0161, 0.076, 0.031, 0.076, 0.0133, 0.030),
        "Small-1K": (0.0290, 0.123, 0.034, 0.076, 0.0258, 0.0258),
        "Llama7B-2K": (0.158, 0.760, 0.186, 0.169, 0.151, 0.135),
        "Llama7B-4K": (0.598, 1.86, 0.594, 0.547, 0.535, 0.478),
        "Llama70B-1K": (0.101, 0.654, 0.125, 0.125, 0.0893, 0.0896),
        "Llama3-8B-4K": (0.571, 1.50, 0.568, 0.513, 0.530, 0.478),
        "Llama3-8B-16K": (3.95, 7.64, 3.92, 3.47, 3.89, 3.39),
        "Long-64K": (15.2, 28.0, 15.0, 13.6, 15.0, 13.3),
    }
    names = ("fused", "hf_sdpa", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")
    return [
        attention_row(case, name, ms, mode=mode) for case, times in figures.items() for name, ms in zip(names, times)
    ]
