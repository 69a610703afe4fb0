"""The rivals: rotations and attentions that a user can install separately, with one signature, in one registry.

The package imports nothing from here. Importing this needs no package of the rivals.
"""

from baselines.base import Baseline
from baselines.registry import BASELINES

__all__ = ["BASELINES", "Baseline"]
