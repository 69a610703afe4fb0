"""Every row of the portable tables that this card takes, whatever call would choose it, against float64.

Each row runs once with ``pytest -m gpu``, and six times with ``pytest -m every_row -n 15``. Run them under
``compute-sanitizer --tool memcheck --target-processes all`` too, after a plain run, which compiles the kernels, and
with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. Rows of multi-head latent attention are left to
tests/attention/hopper/test_latent_gpu.py, because other calls cannot take them.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.calls import NO_MASKS, check_calls
from tests.support.internals import forget_plans
from verification.calls import Machine

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


@pytest.mark.parametrize("forced", forced_rows())
def test_row(forced, monkeypatch):
    def planned(arch, *shape):
        return forced.row.config(arch, forced.strategy)

    monkeypatch.setattr(portable_configs, f"{forced.table}_config", planned)
    forget_plans()
    fixed = NO_MASKS if forced.row.masked is False else {}
    fixed = fixed | {"norms": 0.0 if forced.norms else None, "head_dim": forced.head_dim}
    dtypes = ("float32",) if forced.row.element_size == 4 else ("bfloat16", "float16")
    machine = Machine.of("cuda", dtypes, ("reference", "triton"))
    check_calls(machine, "attention", 5, str(forced), variants=(("triton", forced.strategy),), **fixed)
    monkeypatch.undo()
    forget_plans()
