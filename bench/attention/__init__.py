"""Attention: the suites ``attention`` (with host time, energy, masks and Co-RoPE) and ``norm``."""
