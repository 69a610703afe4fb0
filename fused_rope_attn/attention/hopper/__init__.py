"""The kernels for sm_90: warps that load, rotate and multiply, and meet at barriers in shared memory.

Both directions share:

- ``shapes``: the sizes that do not vary with a call.
- ``channels``: how warps pass tiles to one another, named barriers, and tiles of rows through the TMA.
- ``columns``: products over the columns that a head has, in one part or two.
- ``masks``: masks in registers, three kinds for the forward.
- ``softmax``: the forward's softmax, and the cap of scores.
- ``kernels.ptxas``: two remedies against what the compiler does to registers.

The forward, with its launches in ``forward`` and its entry in ``forward_kernel``, which also has the warps that
multiply:

- ``forward_tiles``: the order of tiles, the key blocks that they visit, and how the loading warp announces them.
- ``forward_producers``: the warps that load, and that rotate queries.

The backward, with its launches in ``backward`` and its entry in ``backward_kernel``:

- ``backward_block``: a block's keys, query blocks and share of the work, its channels and weights.
- ``backward_transfers``: the warps that load, and that add dQ, in any or in a fixed order.
- ``backward_accumulate``: the warps that multiply, by keys up to head dim 128 and by columns beyond.
- ``backward_epilogue``: dk and dv from registers to their tensors.
- ``postprocess_kernel``: dQ from its accumulator.

Both: ``intervals``, the small kernels before those of a call with intervals.

The backward of multi-head latent attention:

- ``latent_kernels``: the warps of ``backward_kernel`` that make dk and dv, and a kernel for dq.
"""
