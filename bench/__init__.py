"""Measure ours and every rival on the same inputs: ``python -m bench --help``.

``suite`` says what cases, providers and trials are. ``runner`` runs a suite: each provider is first held to float64
(``gate``), then timed in interleaved rounds (``timing``; ``load`` for energy), and gives rows (``report``) with the
machine and versions (``environment``). ``command`` is the command line of all suites: ``attention``, ``mla``, ``rope``,
``decode``, ``models`` and ``cp``. ``docs`` writes the tables of the documents from committed rows.

A new suite is a ``Suite`` with a ``Trial`` and a line in ``__main__.COMMANDS``.
"""
