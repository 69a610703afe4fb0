"""Cases of a few tiles, for tests in the interpreter."""

from functools import partial

from tests.support.attention import packed_case
from verification.testing import Case

TWO_BATCHES = Case(2, 1, 1, 70, 110, 16)
packed = partial(packed_case, Case(1, 2, 1, 0, 0, 16))
