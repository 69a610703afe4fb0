"""Fixtures of the tests of the sm_90 backend."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from tests.support.internals import forget_plans


@pytest.fixture
def preferred(monkeypatch):
    """Make "auto" take the sm_90 kernels for a pass at every length, or at none, whatever the tables say."""

    def prefer(forward, backward):
        for name, taken in (("HOPPER_FORWARD", forward), ("HOPPER_BACKWARD", backward)):
            auto = configs.BUCKETS if taken else ()
            rows = tuple(replace(row, auto=auto, some_work=False, much_work=False) for row in getattr(configs, name))
            monkeypatch.setattr(configs, name, rows)
        forget_plans()

    yield prefer
    forget_plans()
