"""The kernels for sm_90: warps that load, rotate and multiply, and meet at barriers in shared memory.

Both directions share:

- ``shapes``: the sizes that do not vary with a call.
- ``barriers``: rings of buffers, and named barriers.
- ``columns``: products over the columns that a head has, in one piece or two.
- ``rows``: tiles of rows through the TMA, zeros where rows do not exist.
- ``softmax``: the forward's softmax, and the cap of scores.

The forward, whose launches are in ``forward`` and whose entry is ``forward_kernel``:

- ``tiles``: what the warps know of a tile, and the ring in which the loading warp announces tiles.
- ``forward_schedule``: which tile comes next, and which key blocks it visits.
- ``forward_load``, ``forward_queries``, ``forward_attend``: the warps that load, rotate queries, and multiply.
- ``forward_masks``, ``forward_output``: masks in registers, and the way of the output.

The backward, whose launches are in ``backward`` and whose entry is ``backward_kernel``:

- ``backward_block``: a block's keys, its query blocks and its buffers, which its warps share.
- ``backward_load``, ``dq``: the warps that load, and that add dQ to its accumulator.
- ``backward_by_keys``, ``backward_by_columns``: the warps that multiply, up to head dim 128 and beyond.
- ``backward_tile``, ``backward_masks``: what they do with a tile, and masks in registers.
- ``postprocess_kernel``: dQ from its accumulator.
"""
