"""The beginning of every call of a public function: its keywords, autocast, a surrounding context, and dry runs."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# The public functions that stop in a dry run: each raises ``Planned`` after its checks if ``is_dry_run``.
FUNCTIONS = (
    "rope_attention",
    "rope_attention_varlen",
    "rope_attention_mla",
    "rope_attention_mla_varlen",
    "rope_attention_with_kvcache",
    "rope_attention_cp",
    "rope_attention_varlen_cp",
)
# Names that are less alike than this are no hint. "scale" and "softmax_scale" are alike by 0.556.
_ALIKE = 0.55
_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_IMPLEMENTATION = f"{_EXPERIMENTAL}._context_parallel._attention"
_TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: an unknown keyword raises a TypeError that names the closest of its arguments.

    The signature is unchanged, and calls with known keywords pay for one more Python call. A call with an unknown
    keyword never reaches the function's body, so that no other TypeError is mistaken for it.
    """
    known = tuple(inspect.signature(function).parameters)

    def explained(keyword: str) -> str:
        near = difflib.get_close_matches(keyword, known, cutoff=_ALIKE)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the arguments are {', '.join(known)}"
        return f"{keyword!r} ({hint})"

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except TypeError:
            unknown = [name for name in options if name not in known]
            if not unknown:
                raise
        raise TypeError(f"{function.__name__}() does not take {' and '.join(map(explained, unknown))}")

    return call


def fill(record: Any, given: Mapping[str, Any]) -> Any:
    """Return a NamedTuple with those of its fields that are given."""
    return record(**{name: given[name] for name in record._fields if name in given})


class Planned(Exception):
    """Raised in place of running a call, with its plan."""


# An attribute of ``threading.local`` would cost every call 0.4 us.
_is_dry = ContextVar("_is_dry", default=False)


def is_dry_run() -> bool:
    """Return whether the call that this thread is making must raise ``Planned``, and neither launch nor write."""
    return not torch.compiler.is_compiling() and _is_dry.get()


def plan_of_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the plan of ``function(*arguments, **options)``, or raise what the function raises."""
    name = getattr(function, "__name__", "")
    if name not in FUNCTIONS:
        raise TypeError(f"function must be one of {', '.join(FUNCTIONS)}, but is {name or type(function).__name__}")
    before = _is_dry.set(True)
    try:
        function(*arguments, **options)
    except Planned as planned:
        return planned.args[0]
    finally:
        _is_dry.reset(before)
    raise AssertionError(f"{name} has run")


def autocast(tensors: Any, names: Iterable[str]) -> Any:
    """Return a record with these of its tensors in autocast's dtype, as scaled_dot_product_attention has it.

    None stays None. Tables are not cast, because float32 tables are more accurate. Results of a dry run have no data.
    """
    if not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        return tensors
    given = {name: x for name in names if (x := getattr(tensors, name)) is not None}
    if not given or not all(isinstance(x, torch.Tensor) for x in given.values()):
        return tensors
    kind = next(iter(given.values())).device.type
    if not is_autocast_on(kind):
        return tensors
    dtype, is_dry = torch.get_autocast_dtype(kind), is_dry_run()
    for name, x in given.items():
        if x.is_floating_point() and x.dtype is not torch.float64 and x.dtype is not dtype:
            cast = torch.empty((), dtype=dtype, device=x.device).expand(x.shape) if is_dry else x.to(dtype)
            tensors = tensors._replace(**{name: cast})
    return tensors


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for this device type. It is off for "meta", which autocast does not support."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def in_context_parallel() -> bool:
    """Return whether torch's context parallelism is active in this process. A model's tensors are then shards.

    torch has two implementations, and neither intercepts calls of this package. The context manager `context_parallel`
    replaces `torch.nn.functional.scaled_dot_product_attention`. The module wrappers (`_context_parallel_shard`)
    register handlers of the attention operators with DTensor. torch.compile traces this function, which reads a few
    attributes, and recompiles if the answer changes.
    """
    attention = torch.nn.functional.scaled_dot_product_attention
    # Other libraries replace the function too, for example to count calls, so look at the module that defines it.
    if attention is not _TORCH_ATTENTION and (getattr(attention, "__module__", None) or "").startswith(_EXPERIMENTAL):
        return True
    module = sys.modules.get(_IMPLEMENTATION)
    if module is None:
        return False
    # These names are private. If one is missing the answer is "no": the context manager was detected above.
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    handler = None if handlers is None else handlers.get(_FLASH_ATTENTION)
    return handler is not None and handler is getattr(module, "_sdpa_handler", None)


def refuse_context_parallel(function: str) -> None:
    """Raise NotImplementedError in torch's context parallelism. function: the public function that was called."""
    if in_context_parallel():
        raise NotImplementedError(
            f"{function} was called under torch's context_parallel, where q, k and v are this rank's shard of the "
            "sequence and would attend to nothing but the shard: gather the sequence, and call it outside of the "
            "context manager"
        )
