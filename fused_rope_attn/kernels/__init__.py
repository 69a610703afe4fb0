"""Device code that every kernel shares, and the sizes that launchers derive in the same way as kernels do.

- ``records``: named values that travel through device code together.
- ``tiles``: rows in memory; loads and stores of tiles of them.
- ``rotation``: pairs of columns, their angles, and tiles that are rotated as they are read or written.
- ``norm``: the root-mean-square norm of rows in whatever parts a kernel holds them, and its gradient.
- ``masks``: which queries and keys see each other, and so which blocks are visited; intervals of queries of each key.
- ``sequences``: lengths, packed sequences, and the rows, the sequence and the mask that a program works on.
- ``softmax``: scores, the running softmax, sinks, and their gradients.
- ``schedule``: how many tiles there are, which program takes which, and how launches wait for each other.
"""
