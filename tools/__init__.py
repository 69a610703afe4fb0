"""Development tools: not packaged, run from a checkout as ``python -m tools.<name>``."""
