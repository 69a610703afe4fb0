"""Every row of the portable tables that this card takes, whatever call would choose it, against float64.

Each row runs once with ``pytest -m gpu``, and in six calls with ``pytest -m every_row -n 15``. Run them under
``compute-sanitizer --tool memcheck --target-processes all`` too, after a plain run, which compiles the kernels, and
with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. Rows of multi-head latent attention are left to
tests/attention/hopper/test_latent_gpu.py, because other calls cannot take them.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16, F16, F32
from tests.support.internals import forget_plans
from verification.testing import TABLES, Case, make_inputs, run_op

pytestmark = [pytest.mark.every_row, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@dataclass(frozen=True)
class Forced:
    """A row of a table, by its index, and the call that is made to take it."""

    table: str  # "forward" or "backward"
    index: int
    strategy: str
    head_dim: int
    norms: bool

    def __str__(self):
        return f"{self.table}{self.index}-{self.strategy}-D{self.head_dim}{'-norms' * self.norms}"

    @property
    def row(self):
        return getattr(portable_configs, self.table.upper())[self.index]


def forced_rows():
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    family = configs.family(f"sm_{major}{minor}")
    for table in ("forward", "backward"):
        for index, row in enumerate(getattr(portable_configs, table.upper())):
            if family in row.arch and not row.latent:
                for strategy in row.strategy if table == "forward" else ("prepass",):
                    calls = itertools.product((row.head_dim, row.head_dim - 24, 32), (False, True))
                    for number, (head_dim, norms) in enumerate(calls):
                        forced = Forced(table, index, strategy, head_dim, norms)
                        is_sample = number == index % 6
                        yield pytest.param(forced, id=str(forced), marks=[pytest.mark.gpu] * is_sample)


def call_of(forced):
    """Return a call with masks, layout of pairs, tables and dtype at random. The same row gets the same call."""
    draw = random.Random(str(forced))
    masks = {"causal": draw.random() < 0.7}
    if forced.row.masked is not False and draw.random() < 0.7:
        masks |= draw.choice(
            [
                {"window": (draw.randrange(60), draw.randrange(60))},
                {"kv_starts": (0, draw.randrange(120)), "kv_lens": (131, draw.randrange(120, 131))},
                {"softcap": 5.0},
                {"sinks": True},
            ]
        )
    return Case(
        *(2, 4, 2, 131, 131, forced.head_dim),
        interleaved=draw.random() < 0.5,
        full_width=draw.random() < 0.5,
        tables=draw.choice(TABLES),
        layout=draw.choice(("bnhd", "bhnd", "odd")),
        dtype=F32 if forced.row.element_size == 4 else draw.choice((F16, BF16)),
        norms=draw.choice((0.0, 1.0)) if forced.norms else None,
        seed=draw.randrange(1000),
        **masks,
    )


@pytest.mark.parametrize("forced", forced_rows())
def test_row(forced, monkeypatch):
    def planned(arch, *shape):
        return forced.row.config(arch, forced.strategy)

    monkeypatch.setattr(portable_configs, f"{forced.table}_config", planned)
    forget_plans()
    try:
        case = call_of(forced)
        inputs = make_inputs(case, "cuda")
        out = run_op(inputs, case, backend="triton", strategy=forced.strategy)
        assert_matches_float64(case, inputs, out)
    finally:
        monkeypatch.undo()
        forget_plans()
