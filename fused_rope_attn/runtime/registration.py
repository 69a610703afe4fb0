"""Operators of torch.library: the one way in which this package registers them, and the bypass of ordinary eager calls.

Plain dispatcher registrations (define, impl per key) rather than ``torch.library.custom_op``: the same behaviour under
torch.compile for less host time per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_NAMESPACE = "fused_rope_attn"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


class _Gradients(torch.autograd.Function):
    """An operator whose results are gradients. Makes a second differentiation an error instead of a silent zero."""

    @staticmethod
    def forward(ctx, operator, function, keyset, *arguments):
        ctx.set_materialize_grads(False)
        ctx.function = function
        return operator.below_autograd(keyset, *arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"{ctx.function}: double backward (create_graph=True) is not supported")


class Operator:
    """``torch.ops.fused_rope_attn.<name>``, registered for CPU and CUDA tensors, fake tensors and autograd.

    Args:
        schema: as PyTorch writes it, beginning with the operator's name.
        run: the implementation, with the schema's arguments.
        fake: shapes, strides and dtypes of the results, for tracing.
        autograd: takes the dispatcher's keyset and the schema's arguments; default: the operator has no gradient.
        gradient_of: in place of ``autograd``: the public function whose gradients the results are. To differentiate
            them again raises NotImplementedError in its name.
    """

    __slots__ = ("overload",)

    def __init__(
        self, schema: str, *, run: Callable, fake: Callable, autograd: Callable | None = None,
        gradient_of: str | None = None,
    ):  # fmt: skip
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, key)
        if gradient_of is not None:
            autograd = functools.partial(self._once, gradient_of)
        _LIBRARY.impl(name, autograd or self.below_autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)

    def __call__(self, *arguments):
        """The operator through the dispatcher: what tracing, fake tensors and modes see."""
        return self.overload(*arguments)

    def _once(self, function: str, keyset, *arguments):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return _Gradients.apply(self, function, keyset, *arguments)
        return self.below_autograd(keyset, *arguments)

    def below_autograd(self, keyset, *arguments, **options):
        """The operator without autograd, called from its own autograd implementation."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **options)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """True in ordinary eager mode: nothing but autograd wants to see the operator.

    Its dispatch, about 15 us, can then be skipped by calling the implementation. None stands for a tensor not given.
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None
