"""Device code that every kernel shares, and the host's side of its arguments."""
