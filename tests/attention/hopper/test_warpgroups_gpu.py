"""The sm_90 forward in every division of its warps: two or three warpgroups that attend, queries rotated by warps of
their own or by the pre-pass. The tables choose some of these for long sequences alone, and these tests have short
ones."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS
from tests.support.hopper import PADDED, check_in_dtype, check_reruns, needs_sm_90
from tests.support.internals import forget_plans
from tests.support.marks import cases

pytestmark = needs_sm_90

THREE = {"consumers": 3, "rotates_queries": False, "attend_registers": 160}
EARLY = configs.HopperForwardConfig(128, values="before weights")
DIVISIONS = {
    "three warpgroups": (64, configs.HopperForwardConfig(128, **THREE)),
    "three warpgroups, three stages": (64, configs.HopperForwardConfig(128, stages=3, rotate_heads=4, **THREE)),
    "three warpgroups, values before weights": (
        64,
        configs.HopperForwardConfig(128, stages=3, rotate_heads=4, values="before weights", **THREE),
    ),
    "three warpgroups, values before scores, D 96": (
        96,
        configs.HopperForwardConfig(128, rotate_heads=4, values="before scores", **THREE),
    ),
    "two warpgroups, D 64": (64, configs.HopperForwardConfig(128, rotates_queries=False, attend_registers=240)),
    "two warpgroups, D 128": (128, configs.HopperForwardConfig(128, rotates_queries=False, attend_registers=240)),
    "D 64": (64, configs.HopperForwardConfig(128)),
    "D 128": (128, configs.HopperForwardConfig(128)),
    "pinned": (128, configs.HopperForwardConfig(128, pin=True)),
    "values before weights, D 64": (64, EARLY),
    "values before weights, D 96": (96, EARLY),
    "values before weights": (128, EARLY),
}


@pytest.fixture(params=DIVISIONS)
def head_dim(request, monkeypatch):
    """The head dim at which every forward pass runs in the division of the parameter."""
    head_dim, config = DIVISIONS[request.param]
    row = hopper_configs.Row(head_dim=head_dim, config=config)
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))
    forget_plans()
    yield head_dim
    forget_plans()


@cases(
    ODD_LENGTHS,
    replace(ODD_LENGTHS, causal=False, interleaved=True, rotary_dim=32),
    replace(ODD_LENGTHS, softmax_scale=-0.2, tables="random", layout="bhnd"),
    replace(ODD_LENGTHS, len_q=193, len_k=193),
    replace(ODD_LENGTHS, len_q=1101, len_k=1101),
    replace(ODD_LENGTHS, len_q=300, len_k=556, softcap=4.0, sinks=True),
    replace(ODD_LENGTHS, len_q=556, len_k=300),
    replace(ODD_LENGTHS, len_q=1, len_k=700),
    replace(ODD_LENGTHS, len_q=700, len_k=333, window=(90, 0)),
    replace(PADDED, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True),
    replace(PADDED, kv_lens=(100, 0), softcap=4.0),
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_against_float64(head_dim, case, dtype):
    check_in_dtype(replace(case, head_dim=head_dim), dtype)


@cases(ODD_LENGTHS, MANY_TILES)
def test_reruns(head_dim, case):
    check_reruns(replace(case, head_dim=head_dim), 20)


def test_many_tiles(head_dim):
    check_in_dtype(replace(MANY_TILES, head_dim=head_dim), BF16)


def test_a_narrower_head(head_dim):
    check_in_dtype(replace(ODD_LENGTHS, head_dim=head_dim - 24), BF16)
