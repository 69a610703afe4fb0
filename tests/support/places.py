"""Places where tests of attention run: the reference on a CPU, the interpreter, and a GPU, by both backends or one."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.calls import check_calls
from tests.support.gpu import ODD_LENGTHS, assert_same_but_dq, is_sm_90
from tests.support.marks import ignore_overflow, interpreted
from verification.calls import Machine
from verification.testing import Case, make_inputs, run_op

needs_sm_90 = [pytest.mark.gpu, pytest.mark.skipif(not is_sm_90(), reason="needs an sm_90 GPU")]
INLINE, PREPASS = ({"backend": "triton", "strategy": strategy} for strategy in ("inline", "prepass"))
ON_SM_90 = {"backend": "hopper"}


def each_of(**options):
    """Repeat a test on a GPU, as its ``chosen``, for these options of a call; "sm_90" needs its GPU."""
    marks = {name: needs_sm_90 if name == "sm_90" else [pytest.mark.gpu] for name in options}
    params = [pytest.param(chosen, id=name, marks=marks[name]) for name, chosen in options.items()]
    return pytest.mark.parametrize("chosen", params)


each_backend = each_of(inline=INLINE, prepass=PREPASS, sm_90=ON_SM_90)
both_backends = each_of(prepass=PREPASS, sm_90=ON_SM_90)
only_sm_90 = each_of(sm_90=ON_SM_90)


@dataclass(frozen=True)
class Place:
    """A device, the options of a call there, and a case of odd lengths. In the interpreter lengths are an eighth of
    those on a GPU, and head dims a quarter."""

    device: str
    options: dict
    case: Case = ODD_LENGTHS

    def smaller(self, length):
        """Return a length, or each one of a tuple, as it is here."""
        if isinstance(length, tuple):
            return tuple(map(self.smaller, length))
        return -(-length // 8) if self.device == "cpu" else length

    def sized(self, **fields):
        """Return the case with these fields, which are given as on a GPU."""
        for name in {"len_q", "len_k", "window", "kv_starts", "kv_lens"} & set(fields):
            fields[name] = self.smaller(fields[name])
        if self.device == "cpu" and "head_dim" in fields:
            fields["head_dim"] //= 4
        return replace(self.case, **fields)

    def packed(self, seqlens, behind=(0, 0), **fields):
        """The same of ``packed_case``."""
        return packed_case(self.sized(**fields), self.smaller(seqlens), self.smaller(behind))


_SMALL = Case(2, 2, 1, 42, 88, 32, dtype=torch.float32)
_ON_GPU = {"inline": INLINE, "prepass": PREPASS}
each_place = pytest.mark.parametrize(
    "place",
    [
        *(pytest.param(Place("cpu", x, _SMALL), id=f"interpreted, {name}", marks=[interpreted, ignore_overflow])
          for name, x in _ON_GPU.items()),
        pytest.param(Place("cpu", {"backend": "reference"}, _SMALL), id="reference"),
        *(pytest.param(Place("cuda", x), id=name, marks=pytest.mark.gpu) for name, x in _ON_GPU.items()),
        pytest.param(Place("cuda", ON_SM_90), id="sm_90", marks=needs_sm_90),
    ],
)  # fmt: skip


def assert_same(out, expected, chosen):
    """Two runs of o, lse, dq, dk, dv have the same bits, but for dq by the sm_90 kernels."""
    (assert_same_but_dq if chosen["backend"] == "hopper" else assert_equal)(out, expected)


def check_on_gpu(chosen, name, *key, **fixed):
    """Check ten random calls of a family by a backend; ``fixed`` as for ``check_calls``."""
    backend, strategy = chosen["backend"], chosen.get("strategy", "auto")
    machine = Machine.of("cuda", ("bfloat16", "float16"), ("reference", backend))
    check_calls(machine, name, 10, backend, *key, variants=((backend, strategy),), **fixed)


def check_reruns(case, times):
    """Run after run gives the same bits but for dq, with ``deterministic`` for dq too; both match float64."""
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    fixed = run_op(inputs, case, **ON_SM_90, deterministic=True)
    assert_equal(fixed[:2], first[:2])
    for _ in range(times):
        assert_same_but_dq(run_op(inputs, case, **ON_SM_90), first)
        assert_equal(run_op(inputs, case, **ON_SM_90, deterministic=True), fixed)
    assert_matches_float64(case, inputs, first)
    assert_matches_float64(case, inputs, fixed)


# Key blocks of 128 and query blocks of 64 that begin, end and are cut in every way.
PADDED = replace(ODD_LENGTHS, len_q=300, len_k=700)


packed = partial(packed_case, ODD_LENGTHS)

# Tiles of 128 queries, 64 of a warpgroup, and 128 keys, query blocks of 64: cut by a row, whole, empty, and alone.
UNEVEN = ((10, 700), (400, 7), (0, 20), (20, 0), (1, 333), (129, 129), (65, 191), (128, 256))
EMPTY = (16, 2, 3, 1) * 50 + (0,) * 1000  # mostly tiles without queries; lengths are read in two steps
