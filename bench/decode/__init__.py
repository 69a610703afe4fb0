"""The suite ``decode``: one step of generation with a cache."""
