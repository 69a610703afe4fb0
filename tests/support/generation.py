"""Calls of the generation step that several test modules make (``verification.decode`` makes their inputs)."""

from tests.support.internals import with_kvcache
from verification.decode import DecodeCheck

PLAIN = DecodeCheck("plain", (4, 2), 2, 40, 16, (30, 0))
TINY = DecodeCheck("tiny", (2, 1), 1, 20, 16, (17,))  # for tests that run a call many times


def interpreted_step(*arguments, return_lse=False, **options):
    """`rope_attention_with_kvcache` by the kernels, where CPU tensors would take the reference."""
    o, lse = with_kvcache(*arguments, backend="triton", **options)
    return (o, lse) if return_lse else o
