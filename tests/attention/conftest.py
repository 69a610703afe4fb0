"""Fixtures of the tests of attention: another machine, and other tables of configurations."""

import dataclasses

import pytest

from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.runtime import device
from tests.support.internals import forget_plans


@pytest.fixture
def arch(monkeypatch):
    """Every tensor is on a GPU of the architecture that this function was last given; sm_90 before that."""

    def set_arch(name):
        monkeypatch.setattr(device, "arch", lambda where: name)

    set_arch("sm_90")
    return set_arch


@pytest.fixture
def tables(monkeypatch):
    """Replace the sm_90 backend's rows: one for all calls and each pass, taken by "auto" in the buckets given."""

    def set_tables(forward, backward):
        for name, buckets in (("FORWARD", forward), ("BACKWARD", backward)):
            row = getattr(hopper_configs, name)[-1]
            monkeypatch.setattr(hopper_configs, name, (dataclasses.replace(row, least_work=dict.fromkeys(buckets, 0)),))
        forget_plans()

    yield set_tables
    forget_plans()
