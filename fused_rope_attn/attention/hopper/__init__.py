"""The kernels for sm_90: warps that load, rotate and multiply, and meet at barriers in shared memory.

docs/design/hopper.md has the order in which to read them. Files of the forward begin with ``forward``, those of the
backward with ``backward`` and ``postprocess``. Both share ``channels``, ``columns``, ``masks`` and ``softmax``, and
``intervals``, the small kernels before those of a call with intervals. ``latent_kernels`` has the backward of
multi-head latent attention.
"""
