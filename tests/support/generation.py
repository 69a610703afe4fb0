"""Calls of the generation step that several test modules make, as ``verification.decode`` makes them."""

from dataclasses import replace

from tests.support.dtypes import F32
from tests.support.internals import with_kvcache
from verification.matrix import step

PLAIN = step("plain", (4, 2), 2, 40, 16, (30, 0))
TINY = step("tiny", (2, 1), 1, 20, 16, (17,))  # for tests that run a call many times
PAGED = step("pages", (4, 2), 2, 48, 16, (30, 0), page_size=16)  # a pool of 9 pages
CACHES = ("k_cache", "v_cache")


def arguments(check=PLAIN, dtype=F32, device="cpu"):
    """Return the tensors of a ``DecodeCheck`` by name, with NaN in all rows of the caches that do not exist."""
    return replace(check, dtype=dtype).make(device).given


def with_own_caches(given):
    """Return the same arguments with copies of the caches, for a call that writes them."""
    return given | {name: given[name].clone() for name in CACHES}


def interpreted_step(*arguments, return_lse=False, **options):
    """`rope_attention_with_kvcache` by the kernels, where CPU tensors would take the reference."""
    o, lse = with_kvcache(*arguments, backend="triton", **options)
    return (o, lse) if return_lse else o
