"""``python -m bench models``: whole models of transformers, patched and not."""
