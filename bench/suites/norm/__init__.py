"""``python -m bench norm``: norms of q and k inside attention, beside none and beside norms and rotations of others."""
