"""Every rival and ours on the same inputs, gated by the contract's tolerance, timed. ``python -m bench --help``."""
