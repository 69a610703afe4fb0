"""The results of the rotation alone for one tensor, with or without a norm: the reference in any dtype."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn.rotation import reference


class RotationResults(NamedTuple):
    """The output of one tensor, its gradient, and that of its norm's weight, None without a norm."""

    y: Tensor
    dx: Tensor
    dweight: Tensor | None


def run_rotation_reference(
    x: Tensor,
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype | None = None,
    *,
    weight: Tensor | None = None,
    inverse: bool = False,
    **options: Any,
) -> RotationResults:
    """`reference.rotation` of x (B, H, N, D) and its gradients for dy: `ref64` with dtype=torch.float64, `eager` with
    None (the inputs' dtypes).

    Inputs, weights and tables are taken as given and cast. `options` are those of `reference.rotation`.
    """
    if dtype is not None:
        x, dy, cos, sin = (t.to(dtype) for t in (x, dy, cos, sin))
    if weight is None:  # the transposed rotation, which is rounded once also where autograd would add two gradients up
        y, dx = (
            reference.rotation(t, cos, sin, inverse=other, **options) for t, other in ((x, inverse), (dy, not inverse))
        )
        return RotationResults(y, dx, None)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        weight = weight.detach().to(weight.dtype if dtype is None else dtype).requires_grad_()
        y = reference.rotation(leaf, cos, sin, inverse=inverse, weight=weight, **options)
        dx, dweight = torch.autograd.grad(y, (leaf, weight), dy)
    return RotationResults(y.detach(), dx, dweight)
