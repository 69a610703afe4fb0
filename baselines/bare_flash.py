"""flash-attn alone (PyTorch's build where the package is absent), no rotation."""

from baselines import attentions
from baselines.base import Baseline

BASELINE = Baseline("bare_flash", None, attentions.FLASH_ATTN)
