"""Detection of torch's own context parallelism. Calls of this package inside it would attend to one shard only."""

import sys
from typing import NoReturn

import torch
import torch.nn.functional as functional

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_IMPLEMENTATION = f"{_EXPERIMENTAL}._context_parallel._attention"
_TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def in_context_parallel() -> bool:
    """Return whether torch's context parallelism is active in this process. A model's tensors are then shards.

    torch has two implementations, and neither intercepts calls of this package. The context manager
    `torch.distributed.tensor.experimental.context_parallel` replaces
    `torch.nn.functional.scaled_dot_product_attention`. The module wrappers (`_context_parallel_shard` and
    `_enable_context_parallel_dispatcher`) register handlers of the attention operators with DTensor.

    This reads a few attributes; it imports nothing and does not synchronise. torch.compile traces it, and recompiles
    if the answer changes.
    """
    attention = functional.scaled_dot_product_attention
    # Other libraries replace the function too, for example to count calls, so look at the module that defines it.
    if attention is not _TORCH_ATTENTION and (getattr(attention, "__module__", None) or "").startswith(_EXPERIMENTAL):
        return True
    module = sys.modules.get(_IMPLEMENTATION)
    if module is None:
        return False
    # These names are private. If one is missing the answer is "no": the context manager was detected above.
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if handlers is None:
        return False
    handler = handlers.get(_FLASH_ATTENTION)
    return handler is not None and handler is getattr(module, "_sdpa_handler", None)


def refuse_context_parallel(function: str) -> NoReturn:
    """Raise NotImplementedError. function: the public function that was called."""
    raise NotImplementedError(
        f"{function} was called under torch's context_parallel, where q, k and v are this rank's shard of the sequence "
        "and would attend to nothing but the shard: gather the sequence, and call it outside of the context manager"
    )
