"""Tables of cos and sin: one-dimensional positions, and tokens on a plane."""

from __future__ import annotations

import torch

from fused_rope_attn.runtime.checks import check_int, is_finite, is_real, kind_of


def rope_tables(
    seq_len: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    positions: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of RoFormer's angles ``position * base ** (-2i / R)``, ``(seq_len, R/2)`` float32 each.

    Args:
        seq_len: number of rows; with ``positions`` it must be their number.
        rotary_dim: R, even and positive.
        base: positive; 10000 in the paper.
        positions: ``(seq_len,)`` integer or floating positions, default ``0 .. seq_len - 1``.
        device: of the tables; default that of ``positions``, else the current default device.

    The angles are formed in float64 and rounded once: float32 products are 4e-3 off at position 131072.
    """
    check_sizes(seq_len=seq_len)
    check_frequencies(rotary_dim, 2, base)
    if positions is None:
        positions = torch.arange(seq_len, device=device)
    elif positions.shape != (seq_len,):
        raise ValueError(f"positions must have shape ({seq_len},), but has {tuple(positions.shape)}")
    else:
        positions = positions.to(device if device is not None else positions.device)
    angles = _angles(positions, rotary_dim, base)
    return angles.cos().float(), angles.sin().float()


def rope_tables_2d(
    height: int,
    width: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for tokens on a plane, row by row: ``(height * width, R/2)`` float32 each.

    The token's row rotates the first R/4 pairs and its column the others, each with the frequencies of a head of R/2:
    ``base ** (-4i / R)`` (axial RoPE of vision transformers). R must be a multiple of 4; the rest as ``rope_tables``.
    """
    check_sizes(height=height, width=width)
    check_frequencies(rotary_dim, 4, base)
    rows = _angles(torch.arange(height, device=device), rotary_dim // 2, base)[:, None].expand(-1, width, -1)
    columns = _angles(torch.arange(width, device=device), rotary_dim // 2, base)[None].expand(height, -1, -1)
    angles = torch.cat((rows, columns), dim=-1).flatten(0, 1)
    return angles.cos().float(), angles.sin().float()


def _angles(positions: torch.Tensor, rotary_dim: int, base: float) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / rotary_dim
    return positions.double()[:, None] * float(base) ** -exponents


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if check_int(name, size) < 0:
            raise ValueError(f"{name} must be at least 0, but is {size}")


def check_frequencies(rotary_dim: int, multiple: int, base: float) -> None:
    rotary_dim = check_int("rotary_dim", rotary_dim)
    if rotary_dim < multiple or rotary_dim % multiple:
        kind = "even" if multiple == 2 else f"a multiple of {multiple}"
        raise ValueError(f"rotary_dim must be {kind} and positive, but is {rotary_dim}")
    if not is_real(base):
        raise TypeError(f"base must be a float, but is {kind_of(base)}")
    if not (base > 0 and is_finite(base)):
        raise ValueError(f"base must be finite and positive, but is {base}")
