"""Ours and every rival on the same inputs, gated by the contract's tolerance, timed. ``python -m bench --help``.

``suites`` has one benchmark each, and the table of commands; beside it is what they share. A suite (``suite``) opens
each of its cases as a trial, at which providers enter through the gate (``gate``). The run (``runner``) times those
that passed in interleaved rounds (``timing``) and makes rows, to which ``environment`` adds machine and versions.
``command`` is the command line of all suites. ``attention`` has the problems and providers of the suites that measure
``rope_attention``. From rows come text (``report``), plots (``plots``), the generated tables of the documents
(``tables``, ``docs``), and what moved between two files of them (``compare``).

A new suite is a module below ``suites`` with a ``Suite``, a ``Trial`` and a ``main``, and a line in ``COMMANDS``.
"""
