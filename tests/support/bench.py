"""What the tests of the benchmark share: a clock without a GPU, providers that do what a test wants, rows."""

import dataclasses
import time

import torch

from bench import cases, providers
from bench.runner import Options, Run
from fused_rope_attn import testing

# Small enough for the reference on a CPU, with a query head group of two.
TINY = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))


class WallClock:
    """The clock of a machine without a GPU, with the same doors as ``timing.GpuClock``."""

    device = torch.device("cpu")

    def synchronize(self):
        pass

    def sample(self, fn, calls):
        samples = []
        for _ in range(calls):
            begin = time.perf_counter()
            fn()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples

    def calls_for(self, fn, round_ms):
        return 2

    def capture(self, make):
        return make()

    def peak_mib(self, fn):
        return 1.5

    def host_sample(self, fn, calls):
        return [sum(self.sample(fn, 3)) / 3]

    def release(self):
        pass


@dataclasses.dataclass
class Scripted:
    """A provider that does what a test wants; ``run`` receives what a baseline receives."""

    name: str
    action: object
    label: str = ""
    rotates: bool = True
    in_place: bool = False
    half_tables: bool = False
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


def run_tiny(people, **options):
    """(the run, its rows) of these providers on TINY, timed with the wall clock."""
    measurement = Run(people, Options(**{"rounds": 2, "host": False} | options), WallClock(), {"gpu": "cpu"})
    return measurement, [row for block in measurement.rows([TINY]) for row in block]


def reference_run(q, k, v, tables, causal):
    """What "fused" computes: on CPU tensors that is the reference."""
    return providers.OURS["fused"].run(q, k, v, tables, causal)


def make_row(case, provider, ms, part="fwd", mode="graph", status="ok", **extra):
    """A row as the runner writes it: `ms` milliseconds for one pass (`part`) of a case of the benchmark."""
    bench_case = next(c for c in cases.CASES if c.name == case)
    c = bench_case.case
    label = providers.PROVIDERS[provider].label
    return {
        "case": case,
        "family": bench_case.family,
        "groups": bench_case.groups,
        "shape": bench_case.shape,
        "heads_q": c.heads_q,
        "heads_kv": c.heads_kv,
        "len_q": c.len_q,
        "head_dim": c.head_dim,
        "causal": c.causal,
        "dtype": "bfloat16",
        "gpu": "NVIDIA H200",
        "provider": provider,
        "label": label,
        "ours": providers.is_ours(provider),
        "rotates": providers.PROVIDERS[provider].rotates,
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


def published_rows(mode="graph"):
    """Rows with the published times of the rivals, and ours winning at some shapes and losing at others."""
    rows = []
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
    for case, times in figures.items():
        rows += [make_row(case, name, ms, mode=mode) for name, ms in zip(names, times)]
    return rows
