"""``python -m bench``: rope_attention beside every rival, forward and backward."""
