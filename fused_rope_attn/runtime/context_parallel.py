"""Whether torch's own context parallelism is at work, in which no call of this package can be right."""

import sys
from typing import NoReturn

import torch
import torch.nn.functional as functional

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_IMPLEMENTATION = f"{_EXPERIMENTAL}._context_parallel._attention"
_TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def in_context_parallel() -> bool:
    """Whether torch's context parallelism is at work in this process: the tensors of a model are then shards.

    torch has two ways of it, and neither passes through functions that are not its own. The context manager
    `torch.distributed.tensor.experimental.context_parallel` puts a function of its own in the place of
    `torch.nn.functional.scaled_dot_product_attention`. The wrapping of modules (`_context_parallel_shard` and
    `_enable_context_parallel_dispatcher`) registers handlers of the attention operators with DTensor instead, from the
    call that enables them to the one that disables them.

    A few attributes are read, nothing is imported and nothing synchronises. torch.compile traces the function, and its
    guards compile again where the answer changes.
    """
    attention = functional.scaled_dot_product_attention
    # What others put there, to count calls or to quantise, is not meant: the function's module says whose it is.
    if attention is not _TORCH_ATTENTION and (getattr(attention, "__module__", None) or "").startswith(_EXPERIMENTAL):
        return True
    module = sys.modules.get(_IMPLEMENTATION)
    if module is None:
        return False
    # Of the private names that torch may change, a missing one counts as "no": the context manager is seen above.
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if handlers is None:
        return False
    handler = handlers.get(_FLASH_ATTENTION)
    return handler is not None and handler is getattr(module, "_sdpa_handler", None)


def refuse_context_parallel(function: str) -> NoReturn:
    """`function`: the public function that was called."""
    raise NotImplementedError(
        f"{function} was called under torch's context_parallel, where q, k and v are this rank's shard of the sequence "
        "and would attend to nothing but the shard: gather the sequence, and call it outside of the context manager"
    )
