"""``python -m bench rope``: the rotation alone, beside what a user can install and beside a copy of the same bytes."""
