"""Every row of the portable tables that this card takes, whatever call would choose it, against float64.

Each row runs once with ``pytest -m gpu``, and six times with ``pytest -m every_row -n 15``. Run them under
``compute-sanitizer --tool memcheck --target-processes all`` too, after a plain run, which compiles the kernels, and
with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. Rows of multi-head latent attention are left to
tests/attention/test_latent.py, because other calls cannot take them.
"""

import itertools

import pytest
import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.calls import NO_MASKS, check_calls
from tests.support.internals import forget_plans
from verification.calls import Machine

pytestmark = [pytest.mark.every_row, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def forced_rows():
    """Yield (table, row, strategy, head dim, whether it has norms) of the calls that are made to take a row."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    family = configs.family(f"sm_{major}{minor}")
    for table in ("forward", "backward"):
        for index, row in enumerate(getattr(portable_configs, table.upper())):
            if family in row.arch and not row.latent:
                for strategy in row.strategy if table == "forward" else ("prepass",):
                    calls = itertools.product((row.head_dim, row.head_dim - 24, 32), (False, True))
                    for number, (head_dim, norms) in enumerate(calls):
                        name = f"{table}{index}-{strategy}-D{head_dim}{'-norms' * norms}"
                        marks = [pytest.mark.gpu] * (number == index % 6)
                        yield pytest.param(table, row, strategy, head_dim, norms, id=name, marks=marks)


@pytest.mark.parametrize(("table", "row", "strategy", "head_dim", "norms"), forced_rows())
def test_row(table, row, strategy, head_dim, norms, monkeypatch, request):
    def planned(arch, *shape):
        return row.config(arch, strategy)

    monkeypatch.setattr(portable_configs, f"{table}_config", planned)
    forget_plans()
    fixed = NO_MASKS if row.masked is False else {}
    fixed = fixed | {"norms": 0.0 if norms else None, "head_dim": head_dim}
    dtypes = ("float32",) if row.element_size == 4 else ("bfloat16", "float16")
    machine = Machine.of("cuda", dtypes, ("reference", "triton"))
    check_calls(machine, "attention", 5, request.node.name, variants=(("triton", strategy),), **fixed)
    monkeypatch.undo()
    forget_plans()
