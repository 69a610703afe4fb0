"""Random calls of the sm_90 kernels against float64: each head dim with each feature, each way to divide the work."""

from itertools import cycle

import pytest

from fused_rope_attn.attention.configs import HopperForwardConfig
from fused_rope_attn.attention.hopper import backward, configs as hopper_configs
from tests.support.calls import NO_MASKS
from tests.support.internals import forget_calls, forget_plans
from tests.support.places import ON_SM_90, check_on_gpu, needs_sm_90

pytestmark = needs_sm_90

# A family of calls, and fields of its prototype. Bounds of () and the sizes of a window are drawn for each call.
MASKS = NO_MASKS | {"window": (7, 7), "softcap": 15.0, "sinks": True, "kv_starts": (), "kv_lens": ()}
KINDS = {
    "causal": ("attention", NO_MASKS | {"causal": True}),
    "not causal": ("attention", NO_MASKS | {"causal": False}),
    "masks": ("attention", MASKS),
    "norms": ("attention", {"norms": 0.0, "intervals": None}),
    "intervals": ("attention", {"intervals": "random"}),
    "a fixed order": ("attention", {"deterministic": True}),
    "packed": ("packed", NO_MASKS),
    "packed, norms, a window": ("packed", {"norms": 0.0, "window": (7, -1)}),
}
EACH_WIDTH = [(kind, head_dim) for kind in KINDS for head_dim in (64, 96, 128, 256)]


# Head dims that do not fill a tile's columns: each kind has one.
@pytest.mark.parametrize(("kind", "head_dim"), [*EACH_WIDTH, *zip(KINDS, cycle((40, 80, 136, 192)))])
def test_every_kind_of_call(kind, head_dim):
    family, fixed = KINDS[kind]
    check_on_gpu(ON_SM_90, family, kind, head_dim, head_dim=head_dim, **fixed)


THREE = {"consumers": 3, "rotates_queries": False, "attend_registers": 160}
PREPASS = {"rotates_queries": False, "attend_registers": 240}
# Two or three warpgroups that attend, queries rotated by warps of their own or by the pre-pass. The tables choose some
# of these for long sequences alone.
DIVISIONS = {
    "three warpgroups": (64, THREE),
    "three, values before weights": (64, THREE | {"stages": 3, "rotate_heads": 4, "values": "before weights"}),
    "three, values before scores": (96, THREE | {"rotate_heads": 4, "values": "before scores"}),
    "two warpgroups, D 64": (64, PREPASS),
    "two warpgroups": (128, PREPASS),
    "D 64": (64, {}),
    "D 128": (128, {}),
    "pinned": (128, {"pin": True}),
    "values before weights, D 64": (64, {"values": "before weights"}),
    "values before weights, D 96": (96, {"values": "before weights"}),
    "values before weights": (128, {"values": "before weights"}),
}


@pytest.mark.usefixtures("tables")  # which are as before afterwards
@pytest.mark.parametrize("kind", ["causal", "masks", "packed"])
@pytest.mark.parametrize(("head_dim", "config"), DIVISIONS.values(), ids=DIVISIONS)
def test_every_division_of_the_warps(head_dim, config, kind, monkeypatch):
    row = hopper_configs.Row(head_dim=head_dim, config=HopperForwardConfig(128, **config))
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))
    forget_plans()
    family, fixed = KINDS[kind]
    check_on_gpu(ON_SM_90, family, kind, "divided", head_dim=head_dim, **fixed)


@pytest.mark.parametrize(("kind", "head_dim"), [("causal", 128), ("norms", 256), ("packed, norms, a window", 64)])
@pytest.mark.parametrize("most", [2, 16])
def test_groups_divided_among_programs_of_the_backward(most, kind, head_dim, monkeypatch):
    """Into two parts, and into one for each query head: their programs add up dk and dv."""

    def parts(problem, *sizes):
        return 1 if problem.has_intervals or problem.is_deterministic else min(most, problem.group_size)

    monkeypatch.setattr(backward, "parts_of_group", parts)
    forget_calls()
    family, fixed = KINDS[kind]
    check_on_gpu(ON_SM_90, family, kind, head_dim, "parts", head_dim=head_dim, **fixed)
    forget_calls()
