"""Masked and packed cases of a few tiles, for tests in the interpreter."""

from functools import partial

from tests.support.attention import packed_case
from tests.support.dtypes import F32
from verification.testing import Case

SQUARE = Case(1, 1, 1, 130, 130, 16)
TWO_BATCHES = Case(2, 1, 1, 70, 110, 16)
# The masks that models combine.
COMBINED = (
    Case(1, 4, 1, 100, 100, 16, window=(40, 0), softcap=3.0),  # Gemma 2
    Case(1, 4, 2, 100, 100, 16, window=(40, 0), sinks=True),  # gpt-oss
    Case(2, 2, 1, 100, 100, 16, kv_starts=(0, 41), table_batch=True),
    Case(2, 2, 1, 40, 130, 16, window=(30, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0),
         kv_lens=(60, 130), dtype=F32),
    Case(2, 2, 1, 40, 130, 24, window=(64, 0), sinks=True, kv_starts=(3, 70), kv_lens=(100, 90), rotary_dim=10,
         interleaved=True, layout="odd"),
)  # fmt: skip
packed = partial(packed_case, Case(1, 2, 1, 0, 0, 16))
PACKINGS = (
    packed((70, 1, 33, 64)),
    packed((70, 0, 33, 0), causal=False, dtype=F32),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33)), dtype=F32),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33)), causal=False),
    packed((20, 33), behind=(40, 70)),
    packed((), behind=(5, 9)),
    packed((), causal=False),
    packed((2, 3) * 4 + (0,) * 8, dtype=F32),
    packed((70, 50), window=(20, 0)),
    packed((70, 50), window=(20, 5), causal=False, softcap=3.0, sinks=True, dtype=F32),
    packed((30, 40), layout="odd", interleaved=True, rotary_dim=10),
)
