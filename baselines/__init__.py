"""The rivals: rotations and attentions as a user can install them separately, behind one signature, in one registry.

Nothing here is imported by the package. Importing this needs none of the packages that the rivals come from.
"""

from baselines.base import Baseline
from baselines.registry import BASELINES

__all__ = ["BASELINES", "Baseline"]
