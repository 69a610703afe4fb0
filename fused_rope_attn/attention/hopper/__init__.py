"""The kernels for sm_90: warps that load, rotate and multiply, and meet at barriers in shared memory."""
