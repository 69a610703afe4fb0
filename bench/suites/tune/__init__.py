"""``python -m bench tune``: sweep configurations of the portable kernels and propose rows of their table."""
