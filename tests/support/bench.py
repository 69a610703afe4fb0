"""Runs of the benchmark on a CPU."""

import timeit
from dataclasses import replace

import torch

from bench.attention import cases, providers
from bench.attention.providers import AttentionProvider
from bench.runner import Run
from bench.suite import Options
from bench.timing import DeviceClock
from verification import testing

FACTS = {"gpu": "toy", "driver": "1", "torch": "2", "triton": "3", "cudnn": None, "date": "2026-01-02T03:04:05"}
FACTS |= {"commit": "abc", "packages": {"transformers": "5"}}
TINY = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))
SHORT = replace(cases.HOST, case=testing.Case(1, 2, 2, 16, 16, 32, dtype=torch.float16))


class WallClock(DeviceClock):
    """A clock of a GPU by wall time on a CPU. The times mean nothing, and graphs are plain calls."""

    def __init__(self):
        super().__init__(torch.device("cpu"))

    def synchronize(self):
        pass

    release = synchronize

    def sample(self, fn, calls):
        return [1e3 * timeit.timeit(fn, number=1) for _ in range(calls)]

    def host_sample(self, fn, calls):
        return super().host_sample(fn, 3)

    def calls_for(self, fn, round_ms):
        return 2

    def capture(self, make):
        return make()

    def peak_mib(self, fn):
        fn()
        return 1.5


def scripted(name, run=providers.fused, label="", role="rival", lacks=None, **fields):
    """Return a provider of attention that runs ``run(q, k, v, given)``, as in ``AttentionProvider``."""
    return AttentionProvider(name, label or name, role, lambda: lacks, ("scripted",), run=run, **fields)


def run(suite, *chosen, providers=None, clock=None, **options):
    """Return (the rows of all cases, the run), after two rounds unless ``options`` say otherwise."""

    def people(case):
        return suite.providers(case, ()) if providers is None else providers

    measurement = Run(suite, Options(**{"rounds": 2} | options), clock or WallClock(), FACTS, people)
    return [row for block in measurement.rows(list(chosen)) for row in block], measurement


def status(rows):
    """Return the status of each provider."""
    return {row["provider"]: row["status"] for row in rows}


def attention_row(case, provider, ms, part="fwd", mode="graph", status="ok", kind="plain", **extra):
    """Return a row of attention as an H200 would give it, with ``ms`` in every round."""
    bench_case = next(c for c in (*cases.CASES, *cases.NORMED) if c.name == case)
    c, who = bench_case.case, providers.table(kind)[provider]
    return {
        "bench": "attention",
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
        "role": who.role,
        "pass": part,
        "mode": mode,
        "status": status,
        "detail": "",
        "ms": ms,
        "p20": 0.98 * ms,
        "p80": 1.03 * ms,
        "rounds": [ms] * 5,
        "calls": 100,
        "tflops": bench_case.flops(part or "fwd") / ms * 1e-9,
        "peak_mib": 64.0,
    } | extra


def published(mode="graph"):
    """Return rows of forward with published times of the rivals, ours winning at some shapes and losing at others."""
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
