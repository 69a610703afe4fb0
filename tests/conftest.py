"""Tests run in Triton's interpreter on a machine without a GPU, and all unwritten memory holds NaN."""

import gc
import os
from contextlib import closing, nullcontext

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads it once, when it is first imported. Tests that need the compiler start processes of their own.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Tensors are small here, and `pytest -n 2` has a process for each core: more threads would wait for one another,
    # spinning, for ten times as long as the tests of whole models take.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

from torch._dynamo import trace_rules  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402

from fused_rope_attn.runtime.device import is_interpreted  # noqa: E402
from verification.frames import in_one_chunk  # noqa: E402
from verification.testing import poison_empty  # noqa: E402

if is_interpreted():
    from verification.interpreter import guarded_memory, make_faster

    make_faster()


def pytest_configure(config):
    config.addinivalue_line("markers", "unpoisoned: torch.empty stays as it is (compilers trace through it)")


def pytest_unconfigure(config):
    gc.unfreeze()  # otherwise nanobind reports Triton's objects as leaked when Python exits


def pytest_collection_modifyitems(config, items):
    gc.freeze()  # modules are never garbage: collections no longer look at what they hold
    for item in items:
        item.runtest = in_one_chunk(item.runtest)
    if HAS_GPU and not is_interpreted():
        return
    reason = "TRITON_INTERPRET is set" if HAS_GPU else "needs a GPU: torch.cuda.is_available() is False"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """NaN in every fresh floating tensor: an output element that no kernel wrote then shows in every comparison.

    In the interpreter a test also fails if a kernel writes outside of fresh memory.
    """
    # Dynamo lists torch's functions when it first compiles, and anew after a process group has begun. Where that was in
    # a poisoned test, the list holds the poisoned torch.empty, and no later test could compile torch.empty.
    # `with torch.device(...)` also lists, once, the functions whose device it sets.
    _device_constructors()
    if torch.empty not in trace_rules.get_torch_obj_rule_map():
        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()
    if "unpoisoned" in request.keywords:
        yield
    else:
        with guarded_memory() if is_interpreted() else nullcontext(), poison_empty():
            yield


@pytest.fixture
def mesh():
    """A mesh of this process alone: what torch does to classes, hooks and functions does not depend on their number."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    """Four processes that share sequences, for the tests of every folder: each takes seconds to begin."""
    from verification.ranks import Ranks

    with closing(Ranks(4, preload=("tests.support.cp_models", "verification.context_parallel"))) as pool:
        yield pool
