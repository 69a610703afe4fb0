"""The suite ``models``: whole models of transformers, patched and not."""
