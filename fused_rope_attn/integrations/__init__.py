"""Seams to other libraries. Nothing in the package imports this; each module needs its extra."""
