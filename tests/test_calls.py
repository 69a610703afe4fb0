"""Random calls of every public function: each backend that serves a call against float64, illegal calls refused.

The calls are those of ``python -m verification --random``, which says for a failure how to run it alone. They are the
same in each run; ``--hypothesis-seed N`` draws others.
"""

import pytest

from tests.support.calls import INTERPRETER, check_calls
from verification.calls import DTYPES, Machine
from verification.strategies import FAMILIES

# Parts of ten calls in the interpreter, and prototypes of ten calls on a GPU.
PARTS = {"attention": 16, "packed": 8, "mla": 5, "decode": 8, "rope": 3, "rope of several": 3, "corope": 2, "write": 2,
         "pairs": 3}  # fmt: skip
every_part = pytest.mark.parametrize(("family", "part"), [(name, i) for name in FAMILIES for i in range(PARTS[name])])


@pytest.fixture
def key(request):
    return request.config.getoption("hypothesis_seed") or 0


@every_part
def test_calls(family, part, key):
    check_calls(INTERPRETER, family, 10, part, key)


@pytest.mark.gpu
@every_part
def test_calls_on_a_gpu(family, part, key):
    backends = ("reference", "triton", "hopper")
    check_calls(Machine.of("cuda", tuple(DTYPES), backends), family, 10, part, key)
