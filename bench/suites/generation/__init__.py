"""``python -m bench decode``: a step of generation, beside what a user can install and a copy of as many bytes."""
