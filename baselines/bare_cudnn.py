"""cuDNN's attention alone, no rotation: part of the target that rotation must not cost anything beyond."""

from baselines import attentions
from baselines.base import Baseline

BASELINE = Baseline("bare_cudnn", None, attentions.CUDNN)
