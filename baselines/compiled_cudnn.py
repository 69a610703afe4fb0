"""`torch.compile`d rotation + cuDNN's attention: no package beyond PyTorch and HF's formula."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("compiled_cudnn", rotations.COMPILED, attentions.CUDNN)
