"""Runs of the benchmark on a CPU."""

import timeit
from dataclasses import replace

import torch

from bench.attention import cases, providers
from bench.attention.providers import AttentionProvider
from bench.models import shapes
from bench.runner import Run
from bench.suite import Options
from bench.timing import DeviceClock
from verification import testing

FACTS = {"gpu": "toy", "driver": "1", "torch": "2", "triton": "3", "cudnn": None, "date": "2026-01-02T03:04:05"}
FACTS |= {"commit": "abc", "packages": {"transformers": "5"}}
TINY = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))
SHORT = replace(cases.HOST, case=testing.Case(1, 2, 2, 16, 16, 32, dtype=torch.float16))

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
TINY_MODEL = shapes.Model("Tiny", "Llama", _SIZES | {"num_attention_heads": 2, "rope_theta": 5000.0})


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
    return AttentionProvider(name, label or name, role, lambda: lacks, run=run, **fields)


def run(suite, *chosen, providers=None, clock=None, **options):
    """Return (the rows of all cases, the run), after two rounds unless ``options`` say otherwise."""

    def people(case):
        return suite.providers(case, ()) if providers is None else providers

    measurement = Run(suite, Options(**{"rounds": 2} | options), clock or WallClock(), FACTS, people)
    return [row for block in measurement.rows(list(chosen)) for row in block], measurement


def status(rows):
    """Return the status of each provider."""
    return {row["provider"]: row["status"] for row in rows}
