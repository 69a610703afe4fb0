"""``python -m bench masks``: what windows, packed sequences, caps, sinks and lengths cost."""
