"""From a seed and an index to a setting and a call."""

from __future__ import annotations

import random
from typing import Any

from verification.random.attention import Attention
from verification.random.common import Call, Family, Machine, chance, pick
from verification.random.corope import CoRope
from verification.random.generation import Generation
from verification.random.refusals import IllegalCall
from verification.random.rotation import Rotation
from verification.random.writing import Writing

# Each public function, and how often it is drawn on a GPU, and in Triton's interpreter, where some take longer.
FAMILIES: dict[Family, tuple[float, float]] = {
    Attention(packed=False): (8, 8),
    Attention(packed=True): (4, 4),
    Generation(): (5, 2),
    Rotation(several=False): (1.5, 2),
    Rotation(several=True): (2, 2),
    CoRope(): (1, 0.7),
    Writing(): (1.5, 1),
}
CALLS_OF_A_SETTING = 30
ILLEGAL = 1 / 6


def setting_of(index: int) -> int:
    """The setting that the call ``index`` belongs to."""
    return index // CALLS_OF_A_SETTING


def draw_setting(seed: int, number: int, machine: Machine) -> tuple[Family, Any]:
    """The family and the setting with this number."""
    # A string is hashed in full, and the same in every process and version of Python.
    rng = random.Random(f"{seed} setting {number}")
    family = pick(rng, {family: weights[0 if machine.has_gpu else 1] for family, weights in FAMILIES.items()})
    return family, family.draw_setting(rng, machine)


def draw_call(seed: int, index: int, machine: Machine) -> Call:
    """The call with this index: a legal one, or one that must be refused."""
    family, setting = draw_setting(seed, setting_of(index), machine)
    rng = random.Random(f"{seed} call {index}")
    call = family.draw_call(rng, setting, machine)
    # What makes a call illegal is written for calls with queries, or with x.
    can_be_illegal = call.function != "write_kvcache"
    return IllegalCall(call, rng.randint(0, 10**9)) if chance(rng, ILLEGAL) and can_be_illegal else call
