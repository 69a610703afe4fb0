"""Triton kernels and their launchers: shared device code in ``primitives``, one door per kernel family."""
