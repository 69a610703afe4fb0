"""Another correct program: eager PyTorch in which every rounding is drawn at random."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop


class RandomRounding(TorchDispatchMode):
    """Inside, eager PyTorch rounds the results of matrix products, and what it casts, up or down at random.

    A number goes to one of its two neighbours in the result's dtype, with the probability that keeps the mean
    (stochastic rounding), and one that needs no rounding stays. Products of float32 are taken in float64 first, those
    of 16 bits in float32. Gradients that are computed inside are rounded so too. docs/design/numerics.md says why, and
    of delta, of products that stay in float32, and of recomputed weights.

    The mode takes the product that follows a softmax for ``p v``, and the next product with the same v for
    ``dp = do v^T``. Numbers of v that are not finite may have been replaced by 0 in either. Checkpoints that backward
    computes again go to their end, because PyTorch would stop before ``p v``.

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
        self._scores: tuple[Callable[..., Tensor], Tensor, Tensor, Tensor] | None = None  # the last product in float32
        self._recomputed: Tensor | None = None  # backward's p divided by forward's, (..., keys and sinks)
        self._product_of: tuple[Tensor, Tensor] | None = None  # the last product, rounded and not
        self._weights: Tensor | None = None  # the left factor of the last product with probabilities

    def __enter__(self) -> "RandomRounding":
        self._whole_checkpoints = set_checkpoint_early_stop(False)
        self._whole_checkpoints.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._whole_checkpoints.__exit__(*error)

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
        elif func is aten._to_copy.default and kwargs.get("dtype") == torch.float32 and self._product_of is not None:
            rounded, exact = self._product_of
            is_kept = torch.rand((), generator=self.generator, device=self.generator.device) < 0.5
            if _same_memory(args[0], rounded) and args[0].shape.numel() == exact.numel() and bool(is_kept):
                return exact.reshape(args[0].shape)
        result = func(*args, **kwargs)
        if func is aten._softmax.default:
            self._softmax_was_last = True
            self._recomputed = None if self._scores is None else self._recompute(args[0], *self._scores)
        elif func is aten._softmax_backward_data.default:
            probabilities = args[1]
            if self._error_of_delta is not None:
                result = result - probabilities * self._error_of_delta.reshape(probabilities.shape[:-1]).unsqueeze(-1)
                self._error_of_delta = None
            if self._recomputed is not None:
                result = result * self._recomputed
        return result

    def _recompute(
        self, logits: Tensor, func: Callable[..., Tensor], left: Tensor, right: Tensor, product: Tensor
    ) -> Tensor:
        """Return the factor of ``softmax(logits)`` if the products before it are summed in another order, and lse is
        rounded. logits (..., keys) are ``product`` times a scale, with a cap, masks and a column of sinks or without.
        """
        order = torch.randperm(left.shape[-1], generator=self.generator, device=self.generator.device)
        other = func(left[..., order], right[..., order, :])
        change = (other - product).reshape(*logits.shape[:-1], product.shape[-1])
        change = torch.nn.functional.pad(change, (0, logits.shape[-1] - product.shape[-1]))
        exact = logits.double().logsumexp(-1, keepdim=True)
        change = self._scale(logits, product) * change - (self._round(exact, torch.float32) - exact)
        return torch.where(torch.isfinite(logits), change, 0.0).exp().to(logits.dtype)

    @staticmethod
    def _scale(logits: Tensor, product: Tensor) -> Tensor:
        """Return the factor from a product to a logit, where the product is largest; a cap makes it smaller there."""
        logits = torch.nan_to_num(logits[..., : product.shape[-1]], neginf=0.0).flatten()
        if logits.numel() == 0:
            return logits.new_zeros(())
        largest = torch.where(logits == 0, 0.0, product.flatten()).abs().argmax()
        return torch.nan_to_num(logits[largest] / product.flatten()[largest])

    def _product(self, func: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        if self._recomputed is not None and self._weights is not None and _same_memory(left, self._weights):
            factor = self._recomputed[..., : left.shape[-2]].reshape(self._weights.shape).mT
            left = left * factor.to(left.dtype)  # dv = p^T do
        exact = func(*(x.to(torch.float64 if x.dtype == torch.float32 else torch.float32) for x in (left, right)))
        rounded = self._round(exact, left.dtype)
        self._product_of = (rounded, exact) if exact.dtype == torch.float32 else None
        self._scores = (func, left, right, rounded) if left.dtype == torch.float32 else None
        if self._softmax_was_last:
            self._softmax_was_last = False
            self._weights = left
            self._v, self._error_of_o = right, rounded.to(exact.dtype) - exact
        # By its numbers: do and the transposed p, the left factor of dv, have the same shape if there are D queries and
        # D keys, and v may have been copied.
        elif self._error_of_o is not None and self._v is not None and _same_numbers(right.mT, self._v):
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


def _same_numbers(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(*(torch.nan_to_num(z, 0.0, 0.0, 0.0) for z in (x, y)))


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


# Bits of the significand, and the exponent of the smallest normal number.
_PRECISION = {torch.float16: (11, -14), torch.bfloat16: (8, -126), torch.float32: (24, -126)}
