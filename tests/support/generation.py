"""Calls of the generation step that several test modules make, as ``verification.decode`` makes them."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tests.support.internals import with_kvcache
from verification.calls import Machine, Made
from verification.matrix import step
from verification.testing import Comparison

PLAIN = step("plain", (4, 2), 2, 40, 16, (30, 0))
TINY = step("tiny", (2, 1), 1, 20, 16, (17,))  # for tests that run a call many times


class Inputs(NamedTuple):
    """q, caches or pools, tables, k and v of the new tokens or None, lengths (B,) int32, and what a call may lack."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor
    sinks: Tensor | None
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def make_inputs(check, dtype, device="cpu"):
    """The tensors of a ``DecodeCheck`` in a dtype, with NaN in all rows of the caches that do not exist."""
    given = replace(check, dtype=dtype).make(device).given
    return Inputs(**{name: given[name] for name in Inputs._fields})


def _made(check, inputs):
    """All arguments of a check that are tensors, with these inputs in the place of its own."""
    return Made(check.make(str(inputs.q.device)).given | inputs._asdict(), {})


def run_reference(check, inputs, dtype):
    """(o, lse, k_cache, v_cache) of the reference computed in ``dtype``; the inputs stay as they are."""
    found = check.reference(_made(check, inputs), dtype)
    return tuple(found[name] for name in ("o", "lse", "k_cache", "v_cache"))


def run_kernels(check, inputs):
    """(o, lse) of the kernels, which write the caches of ``inputs``."""
    _, given = check.call(_made(check, inputs), ("triton", "auto"))
    return check.entry(("triton", "auto"))(**(given | {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}))


def hold(check, dtype, device="cpu") -> list[Comparison]:
    """Run the kernels once and compare: o, lse, the keys that were written; values and all other rows to the bit."""
    return [finding.found for finding in replace(check, dtype=dtype).run(Machine.of(device))]


def interpreted_step(*arguments, return_lse=False, **options):
    """`rope_attention_with_kvcache` by the kernels, where CPU tensors would take the reference."""
    o, lse = with_kvcache(*arguments, backend="triton", **options)
    return (o, lse) if return_lse else o
