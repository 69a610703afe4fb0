"""Fixtures of the tests of the sm_90 backend."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from tests.support.internals import forget_plans


@pytest.fixture
def preferred(monkeypatch):
    """Make "auto" take the sm_90 kernels for a pass at every length, or at none, whatever the tables say."""

    def prefer(forward, backward):
        for name, taken in (("FORWARD", forward), ("BACKWARD", backward)):
            least_work = dict.fromkeys(configs.BUCKETS if taken else (), 0)
            rows = tuple(replace(row, least_work=least_work) for row in getattr(hopper_configs, name))
            monkeypatch.setattr(hopper_configs, name, rows)
        forget_plans()

    yield prefer
    forget_plans()
