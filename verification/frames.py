"""Python's stack of frames, kept from growing and shrinking within loops."""

import functools
from collections.abc import Callable
from typing import Any

_FRAME_BYTES = 1 << 20


def in_one_chunk(function: Callable) -> Callable:
    """Return the function, called where 1 MB of Python's stack of frames is free: about 2,000 calls deep.

    CPython keeps frames in chunks of 16 KB. A call that does not fit maps a new chunk, and unmaps it on return, so that
    a loop at such a depth spends most of its time in the kernel: half of all the time of tests in the interpreter. A
    frame of 1 MB gets a chunk of 2 MB, and calls within it get the rest.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_FRAME_BYTES // 8)
    return call
