"""Random verification: calls drawn over the whole contract, legal ones and others, on every backend that serves them.

A *setting* is what a compiled kernel depends on: dtype, head dim, masks, memory layouts, backend. A *call* fills a
setting with sizes, data, bounds and values. About a dozen calls share a setting, because a GPU compiles for seconds
what it then runs in a millisecond. The setting and the call of an index depend on the seed, the index and the kind of
machine, and on nothing else: neither on how many calls there are nor on how many processes run them.
"""
