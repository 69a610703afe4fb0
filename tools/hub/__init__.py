"""``python -m tools.hub OUT``: the rotation as a kernel for the Hugging Face Hub, from the package's own files."""
