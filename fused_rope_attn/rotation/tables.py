"""Tables of cos and sin, ``RotaryEmbedding``, a module that holds them, and the order of columns in weights."""

from typing import Any

import torch

from fused_rope_attn.rotation.api import apply_rope, apply_rope_qk
from fused_rope_attn.rotation.problem import LAYOUTS
from fused_rope_attn.runtime.checks import check_int, check_positive
from fused_rope_attn.runtime.layouts import RotationLayout


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
    if positions.shape != (seq_len,):
        raise ValueError(f"positions must have shape ({seq_len},), but has {tuple(positions.shape)}")
    angles = _angles(positions.to(positions.device if device is None else device), rotary_dim, base)
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
    check_positive("base", base)


class RotaryEmbedding(torch.nn.Module):
    """``apply_rope`` with tables of its own, which grow for longer sequences.

    Args:
        dim: R, the rotary dim; the columns of wider heads from R on pass through.
        max_seq_len: rows of the tables at first.
        base: of the frequencies.
        interleaved: the layout of the pairs.

    The tables are no parameters and no buffers: they stay float32 in a module that is cast to bfloat16, are in no
    state_dict, and are made anew, exactly equal, wherever the module is moved, copied or unpickled.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10000.0, interleaved: bool = False):
        check_frequencies(dim, 2, base)
        check_sizes(max_seq_len=max_seq_len)
        if not isinstance(interleaved, bool):
            raise TypeError(f"interleaved must be a bool, but is {type(interleaved).__name__}")
        super().__init__()
        self.dim, self.max_seq_len, self.base, self.interleaved = int(dim), int(max_seq_len), base, interleaved
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        x: torch.Tensor,
        k: torch.Tensor | None = None,
        *,
        layout: RotationLayout = "bhsd",
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        inverse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x rotated, or (x, k) with k, in one launch. Arguments as in ``apply_rope``.

        seq_len: positions that the tables must have; default the tokens of x. Say it where ``position_ids`` reach
        further: they are not looked at (on a GPU that would stop the host), and one beyond the tables gives NaN.
        """
        rows = seq_len
        if rows is None:
            known = isinstance(x, torch.Tensor) and layout in LAYOUTS and x.ndim > LAYOUTS[layout][2]
            rows = x.shape[LAYOUTS[layout][2]] if known else 0  # what is wrong here, apply_rope refuses
        cos, sin = self.tables(rows, x.device if isinstance(x, torch.Tensor) else None)
        options: dict[str, Any] = {"rotary_dim": self.dim, "interleaved": self.interleaved, "inverse": inverse}
        options |= {"layout": layout, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
        if k is None:
            return apply_rope(x, cos, sin, **options)
        q_rot, k_rot = apply_rope_qk(x, k, cos, sin, **options)
        return q_rot, k_rot

    def tables(self, seq_len: int, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's cos and sin ``(S, R/2)`` float32 on ``device``, grown to ``seq_len`` rows if need be."""
        check_sizes(seq_len=seq_len)
        known = self._tables
        # "cuda" is any GPU.
        places = () if known is None else (known[0].device, torch.device(known[0].device.type))
        if known is None or (device is not None and torch.device(device) not in places):
            rows = max(seq_len, self.max_seq_len)
        elif known[0].shape[0] < seq_len:
            rows, device = max(seq_len, 2 * known[0].shape[0]), known[0].device  # twice: decoding grows rarely
        else:
            return known
        # Tables made in inference mode could never be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self._tables = rope_tables(rows, self.dim, base=self.base, device=device)
        return self._tables

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": None}

    def extra_repr(self) -> str:
        return f"{self.dim}, max_seq_len={self.max_seq_len}, base={self.base}, interleaved={self.interleaved}"


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
