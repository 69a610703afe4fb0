"""Conversion of weights and activations between the half and the interleaved layout of rotary pairs."""

from __future__ import annotations

import torch

from fused_rope_attn.runtime.checks import check_int


def permute_rope_layout(
    x: torch.Tensor, head_dim: int | None = None, *, rotary_dim: int | None = None, dim: int = -1, inverse: bool = False
) -> torch.Tensor:
    """Reorder the columns of heads from the half layout to the interleaved one; with ``inverse`` back.

    With half-width tables, ``apply_rope(permute_rope_layout(x), cos, sin, interleaved=True)`` is
    ``permute_rope_layout(apply_rope(x, cos, sin))``; full-width tables are permuted like an x of width R. For weights
    and biases of the q and k projections ``dim`` is the axis of their outputs, as in
    ``permute_rope_layout(weight, head_dim, dim=0)``. Scores do not change as long as q and k are permuted alike.

    Args:
        x: any tensor with H heads of ``head_dim`` columns along the axis ``dim``.
        head_dim: D; default the whole axis.
        rotary_dim: R, even; columns R to D of every head stay where they are. Default D.
        dim: the axis of the columns.
        inverse: from interleaved to half.

    Returns:
        a new tensor.

    Raises:
        TypeError, ValueError: wrong types, or sizes that do not fit.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, but is {type(x).__name__}")
    for name, size in (("head_dim", head_dim), ("rotary_dim", rotary_dim), ("dim", dim)):
        if size is not None:
            check_int(name, size)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be an axis of x with {x.ndim} dimensions, but is {dim}")
    columns = x.shape[dim]
    head_dim = columns if head_dim is None else head_dim
    if head_dim < 1 or columns % head_dim:
        raise ValueError(f"head_dim must divide the {columns} columns of x, but is {head_dim}")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be even and between 2 and head_dim = {head_dim}, but is {rotary_dim}")
    rotated = torch.arange(rotary_dim, device=x.device)
    rotated = rotated.view(-1, 2).T.flatten() if inverse else rotated.view(2, -1).T.flatten()
    order = torch.cat((rotated, torch.arange(rotary_dim, head_dim, device=x.device)))
    starts = torch.arange(0, columns, head_dim, device=x.device)
    return x.index_select(dim, (starts[:, None] + order).flatten())
