"""``python -m bench cp``: context parallelism. Several processes, one for each GPU, measure together."""
