"""One pool of four processes for all tests of this folder that need no GPU."""

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()
