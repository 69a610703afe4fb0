"""Device code that every kernel shares, and the host's side of its arguments.

- ``records``: named values that travel through device code together.
- ``tiles``: rows in memory; loads and stores of tiles of them.
- ``rotation``: pairs of columns, their angles, and tiles that are rotated as they are read or written.
- ``norm``: the root-mean-square norm of rows in whatever parts a kernel holds them, and its gradient.
- ``masks``: which queries and keys see each other, and so which blocks are visited.
- ``lengths``: how many keys exist, and the rows of packed sequences.
- ``sequences``: the rows and the sequence that a program works on, and the sequence's mask.
- ``products``: scores, and long sums of products.
- ``softmax``: the running softmax, sinks.
- ``schedule``: the order of tiles, and how launches wait for each other.
- ``arguments``: scalars and sizes that every launcher derives from a call (host).
"""
