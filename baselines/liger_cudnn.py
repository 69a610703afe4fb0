"""Liger's one-launch rotation + cuDNN's attention: the strongest pair that installs without a compiler."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("liger_cudnn", rotations.LIGER, attentions.CUDNN)
