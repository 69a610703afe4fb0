# mypy: allow-untyped-defs, allow-incomplete-defs
"""Operators of torch.library: how this package registers them, and when eager calls bypass them.

Plain dispatcher registrations (define, impl per key) rather than ``torch.library.custom_op``, because that drops
tangents without an error, so that ``torch.func.jvp`` gives zeros, and ``torch.func.grad`` refuses it (2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fused_rope_attn.runtime.differentiation import in_forward_mode, last_gradients, refuse_tangents

_NAMESPACE = "fused_rope_attn"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


class Operator:
    """``torch.ops.fused_rope_attn.<name>``, registered for CPU and CUDA tensors, fake tensors and autograd.

    Args:
        schema: as PyTorch writes it, beginning with the operator's name.
        run: the implementation, with the schema's arguments.
        fake: shapes, strides and dtypes of the results, for tracing.
        function: the public function that calls it, which messages about unsupported derivatives name.
        autograd: takes the dispatcher's keyset and the schema's arguments; default: the operator has no gradient.
        is_gradient: in place of ``autograd``: the results are gradients, and to differentiate them again raises
            NotImplementedError.
    """

    __slots__ = ("function", "overload", "_autograd")

    def __init__(
        self,
        schema: str,
        *,
        run: Callable,
        fake: Callable,
        function: str,
        autograd: Callable | None = None,
        is_gradient: bool = False,
    ):
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.function = function
        self._autograd = self._once if is_gradient else autograd or self.below_autograd
        self.overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, key)
        _LIBRARY.impl(name, self._differentiate, "Autograd", with_keyset=True)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
        torch.library.register_vmap(f"{_NAMESPACE}::{name}", self._call_by_call, lib=_LIBRARY)

    def __call__(self, *arguments):
        """Call the operator through the dispatcher, where tracing, fake tensors and modes see it."""
        return self.overload(*arguments)

    def _call_by_call(self, info, in_dims, *arguments):
        """Run the operator under ``torch.func.vmap``, once for each entry of its axis."""
        results = [self.overload(*_entry(arguments, in_dims, i)) for i in range(info.batch_size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        if results[0] is None:
            return None, None
        kind = type(results[0])  # a tuple of results, or one list
        return kind(torch.stack(of_all) for of_all in zip(*results)), kind([0] * len(results[0]))

    def _differentiate(self, keyset, *arguments):
        if in_forward_mode():  # the kernels would drop the tangents
            refuse_tangents(self.function, arguments)
        return self._autograd(keyset, *arguments)

    def _once(self, keyset, *arguments):
        return last_gradients(self.function, self.below_autograd(keyset, *arguments), arguments)

    def below_autograd(self, keyset, *arguments):
        """Call the operator below autograd, from its own autograd implementation."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _entry(x: Any, dim: Any, index: int) -> Any:
    """Return the part of an argument, or of a list of arguments, that belongs to one entry of vmap's axis ``dim``."""
    if isinstance(x, (tuple, list)):
        dims = dim if isinstance(dim, (tuple, list)) else [dim] * len(x)
        return [_entry(y, of_y, index) for y, of_y in zip(x, dims)]
    return x if dim is None else x.select(dim, index)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether this is ordinary eager mode, where only reverse-mode autograd needs to see the operator.

    The caller can then call the implementation directly, and save the dispatch, about 15 us. A tensor that is not given
    is None.
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)):
        return False
    if forward_ad._current_level >= 0:  # ``in_forward_mode``, without the call
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None
