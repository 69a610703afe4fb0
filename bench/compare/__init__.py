"""``python -m bench compare``: what moved between two files of rows, and by how much more than noise.

``files`` reads rows of any suite and of ``tools.compare_checkouts``, ``moves`` matches two files and does the
arithmetic of noise, ``command`` is the command line and prints.
"""
