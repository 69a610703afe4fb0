"""The suite ``rope``: the rotation alone."""
