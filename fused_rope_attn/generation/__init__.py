"""The generation step: a few new tokens against a cache of keys and values."""
