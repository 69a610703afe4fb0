"""Every kernel against float64: ``python -m verification``."""
