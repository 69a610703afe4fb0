"""What the suites that measure ``rope_attention`` share: problems, providers, one provider at one problem, colours."""
