"""The benchmark of what a call costs in energy."""
