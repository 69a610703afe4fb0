"""Warp-specialised kernels for sm_90, in Gluon: the same doors as the portable kernels."""
