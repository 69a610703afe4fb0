"""Changes of the code that no test notices: ``python -m tools.mutation``.

A mutant is a module with one small change: ``<`` for ``<=``, 2 for 1, ``and`` for ``or``. A test that fails kills it.
One that survives shows a missing test, code that is not needed, or a change that makes no difference.
"""
