"""The rotation alone: every RoPE convention through one kernel, tables, and weight layouts."""
