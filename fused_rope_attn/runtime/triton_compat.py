# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: F401
"""One name for each function that moved between triton 3.6 and 3.9, mostly Gluon's; nothing else."""

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

# Decorator of classes that device code passes and returns whole; private before triton 3.9.
aggregate = getattr(triton, "aggregate", None) or core._aggregate
# A barrier for the threads of one partition.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# The same shared memory as another dtype, shape and layout; private before triton 3.9.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Until this many stores are still *reading* shared memory.
tma_store_wait = tma.store_wait

if hasattr(tma, "async_atomic_add"):  # triton 3.8 and later
    tma_reduce_add = tma.async_atomic_add
else:  # 3.6 and 3.7 have the operation without a Gluon name
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, element by element, through the TMA."""
        coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle
        )


# Since 3.7 Triton copies the register operands of a product, to avoid a fault of ptxas. The copies cost nothing unless
# two products read the same registers.
_RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
COPIES_OPERANDS = gl.constexpr(_RELEASE >= (3, 7))
# ``driver.Kernel`` follows the launch rules of these releases.
LAUNCHER_IS_KNOWN = (3, 6) <= _RELEASE < (3, 10)
