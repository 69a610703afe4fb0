"""Another correct program: eager PyTorch in which every rounding is drawn at random."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RandomRounding(TorchDispatchMode):
    """Inside, eager PyTorch rounds the results of matrix products, and what it casts, up or down at random.

    That is Monte Carlo arithmetic (Parker 1997): each run is another draw of the effect of rounding to the same
    computation. A number goes to one of its two neighbours in the result's dtype, with the probability that keeps the
    mean (stochastic rounding), and one that needs no rounding stays. Products of float32 are taken in float64 first,
    those of 16 bits in float32. Gradients that are computed inside are rounded so too.

    The backward pass of a softmax subtracts ``delta = rowsum(dp * p)``, which FlashAttention-2 computes as
    ``rowsum(do * o)``, from the rounded o. That is as right, and its error is not smaller where dp happens to be: a
    draw takes it too. The mode takes the product that follows a softmax for ``p v``, and the next product with the same
    v for ``dp = do v^T``.

    Args:
        generator: of the random numbers, on the tensors' device.
    """

    # The rms error of random rounding is that of rounding to nearest times this: unit**2 / 6 against unit**2 / 12.
    EXCESS = 2.0**0.5
    _PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator
        self._softmax_was_last = False
        self._v: Tensor | None = None
        self._error_of_o: Tensor | None = None  # of the last product with probabilities
        self._error_of_delta: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in self._PRODUCTS and args[0].dtype in _PRECISION:
            return self._product(func, *args)
        if func is aten._to_copy.default and args[0].dtype in (torch.float32, torch.float64):
            dtype = kwargs.get("dtype")
            stays = kwargs.get("device") in (None, args[0].device)
            if stays and dtype in _PRECISION and dtype.itemsize < args[0].dtype.itemsize:
                return self._round(args[0], dtype)
        result = func(*args, **kwargs)
        if func is aten._softmax.default:
            self._softmax_was_last = True
        elif func is aten._softmax_backward_data.default and self._error_of_delta is not None:
            probabilities = args[1]
            result = result - probabilities * self._error_of_delta.reshape(probabilities.shape[:-1]).unsqueeze(-1)
            self._error_of_delta = None
        return result

    def _product(self, func: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        exact = func(*(x.to(torch.float64 if x.dtype == torch.float32 else torch.float32) for x in (left, right)))
        rounded = self._round(exact, left.dtype)
        if self._softmax_was_last:
            self._softmax_was_last = False
            self._v, self._error_of_o = right, rounded.to(exact.dtype) - exact
        # do and the transposed p, the left factor of dv, have the same shape if there are D queries and D keys.
        elif self._error_of_o is not None and self._v is not None and _same_memory(right, self._v):
            self._error_of_delta = (self._error_of_o * left).sum(-1).float()
            self._v = self._error_of_o = None
        return rounded

    def _round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x, which has more bits than `dtype`, in `dtype`; a constant on another device to nearest."""
        if x.device.type != self.generator.device.type:
            return x.to(dtype)
        bits, smallest = _PRECISION[dtype]
        exact = x.double()
        exponent = torch.frexp(exact).exponent.clamp(min=smallest + 1)
        unit = torch.ldexp(torch.ones_like(exact), exponent - bits)
        dither = torch.rand(x.shape, generator=self.generator, dtype=torch.float64, device=x.device)
        rounded = torch.floor(exact / unit + dither) * unit
        return torch.where(torch.isfinite(exact), rounded, exact).to(dtype)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


# Bits of the significand, and the exponent of the smallest normal number.
_PRECISION = {torch.float16: (11, -14), torch.bfloat16: (8, -126), torch.float32: (24, -126)}
