"""The kernels for every card."""
