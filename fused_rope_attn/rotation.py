"""Rotation alone: every RoPE convention through one kernel, and the tables and weight layouts that go with it."""

from __future__ import annotations

import torch

from fused_rope_attn import device as machine
from fused_rope_attn import reference, rotation_ops
from fused_rope_attn.validation import LAYOUTS, check_rotation

__all__ = [
    "RotaryEmbedding",
    "apply_rope",
    "apply_rope_qk",
    "permute_rope_layout",
    "rope_tables",
    "rope_tables_2d",
]


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    layout: str = "bhsd",
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate every head of x by the angles of its tokens (RoFormer, Su et al. 2021, eq. 34); differentiable.

    Args:
        x: ``(B, H, N, D)``, or what ``layout`` says; float16, bfloat16, float32 or float64, any strides, no copies.
        cos: ``(S, R/2)``, ``(S, R)``, or either with a leading 1 or B; float32 (preferred) or x's dtype; no gradient.
            Need not be unit-norm. A full-width table is taken column by column, ``x * cos + rotate_half(x) * sin``.
        sin: shape and dtype of cos.
        rotary_dim: R, even, at most D; columns R to D pass through. Default: a table of width W is full-width (R = W)
            when ``W > D/2``, else half-width (R = 2W). Needed for a full-width table with ``R <= D/2``.
        interleaved: False turns pairs ``(x[i], x[i + R/2])`` (NeoX, Llama), True ``(x[2i], x[2i+1])`` (GPT-J).
        inverse: rotate by the negative angle, the transpose (the inverse where ``cos**2 + sin**2 = 1``).
        layout: ``"bhsd"``, ``"bshd"``, ``"sbhd"``: the order of batch, tokens, heads; ``"thd"``: packed, (T, H, D).
        position_ids: ``(N,)`` or ``(B, N)`` int32 or int64: the table row of every token; default its index. Or
            ``(B, 2, N)``: the first R/2 columns turn by the first id and the next R/2 by the second, each like a head
            of its own, with tables for R/2 columns. A position outside the tables gives NaN.
        cu_seqlens: ``(sequences + 1,)`` int32, for ``"thd"``: where each sequence begins; positions restart there. What
            lies behind the last sequence passes through unrotated.
        out: written instead of a new tensor; may be x itself, and must not overlap with it otherwise. No gradient.

    Returns:
        shape and dtype of x, in its memory order, or ``out``. Computed in float32 (float64 for float64), rounded once.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range, device or combination.
    """
    outs = None if out is None else {"out": out}
    (turned,) = _apply({"x": x}, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs)
    return turned


def apply_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    v: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    layout: str = "bhsd",
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """``apply_rope`` of q and k, and of v where it is given, in one launch: the same tokens, any numbers of heads.

    Args:
        q: as x of ``apply_rope``, and so are the other arguments.
        k: shape of q apart from the heads, q's dtype and device.
        v: as k; some conventions (Paddle's) rotate it too.
        out: ``(q, k)``, or ``(q, k, v)`` with v: written instead of new tensors.

    Returns:
        ``(q, k)``, or ``(q, k, v)`` with v, rotated.

    Raises:
        TypeError, ValueError: as ``apply_rope``.
    """
    xs = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    outs = None
    if out is not None:
        if not isinstance(out, (tuple, list)):
            raise TypeError(f"out must be a tuple of {len(xs)} tensors or None, but is {type(out).__name__}")
        if len(out) != len(xs):
            raise ValueError(f"out must hold {len(xs)} tensors, for {', '.join(xs)}, but holds {len(out)}")
        outs = {f"out[{i}]": x for i, x in enumerate(out)}
    return tuple(_apply(xs, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs))


def _apply(xs, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs):
    rotary_dim = check_rotation(
        xs, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved, inverse=inverse, layout=layout,
        position_ids=position_ids, cu_seqlens=cu_seqlens, outs=outs,
    )  # fmt: skip
    if position_ids is not None and position_ids.ndim < 3:
        position_ids = position_ids[None, None] if position_ids.ndim == 1 else position_ids[:, None]
    given = None if outs is None else list(outs.values())
    return _turn(list(xs.values()), given, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout)


def _turn(tensors, given, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout):
    """What ``_apply`` does to arguments that were checked: for callers who know that theirs are right."""
    if _has_kernel(tensors[0]):
        return rotation_ops.rope(
            tensors, given, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout
        )
    turned = [
        _reference(x, LAYOUTS[layout], cos, sin, rotary_dim=rotary_dim, interleaved=interleaved, inverse=inverse,
                   position_ids=position_ids, cu_seqlens=cu_seqlens)
        for x in tensors
    ]  # fmt: skip
    return turned if given is None else [out.copy_(x) for out, x in zip(given, turned)]


def _has_kernel(x: torch.Tensor) -> bool:
    """GPUs; CPUs under Triton's interpreter, but for bfloat16, which it gets wrong. float64 takes the reference."""
    if x.dtype is torch.float64:
        return False
    return x.is_cuda or (machine.is_interpreted() and x.device.type == "cpu" and x.dtype is not torch.bfloat16)


def _reference(x, axes, cos, sin, **options):
    if axes[0] is None:  # packed tokens: one batch
        axes, x = (0, *(axis + 1 for axis in axes[1:])), x.unsqueeze(0)
        return _reference(x, axes, cos, sin, **options).squeeze(0)
    turned = reference.rotation(x.permute(axes), cos, sin, **options)
    return turned.permute([axes.index(axis) for axis in range(4)])


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
    _check_sizes(seq_len=seq_len)
    _check_frequencies(rotary_dim, 2, base)
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

    The first R/4 pairs turn by the token's row, the others by its column, each with the frequencies of a head of R/2:
    ``base ** (-4i / R)`` (axial RoPE of vision transformers). R must be a multiple of 4; the rest as ``rope_tables``.
    """
    _check_sizes(height=height, width=width)
    _check_frequencies(rotary_dim, 4, base)
    rows = _angles(torch.arange(height, device=device), rotary_dim // 2, base)[:, None].expand(-1, width, -1)
    columns = _angles(torch.arange(width, device=device), rotary_dim // 2, base)[None].expand(height, -1, -1)
    angles = torch.cat((rows, columns), dim=-1).flatten(0, 1)
    return angles.cos().float(), angles.sin().float()


def _angles(positions: torch.Tensor, rotary_dim: int, base: float) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / rotary_dim
    return positions.double()[:, None] * float(base) ** -exponents


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, but is {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must be at least 0, but is {size}")


def _check_frequencies(rotary_dim: int, multiple: int, base: float) -> None:
    if not isinstance(rotary_dim, int) or isinstance(rotary_dim, bool):
        raise TypeError(f"rotary_dim must be an int, but is {type(rotary_dim).__name__}")
    if rotary_dim < multiple or rotary_dim % multiple:
        kind = "even" if multiple == 2 else f"a multiple of {multiple}"
        raise ValueError(f"rotary_dim must be {kind} and positive, but is {rotary_dim}")
    if not base > 0:
        raise ValueError(f"base must be positive, but is {base}")


class RotaryEmbedding(torch.nn.Module):
    """``apply_rope`` with tables of its own, which grow when a longer sequence comes.

    Args:
        dim: R, the rotary dim; heads may be wider, what is behind passes through.
        max_seq_len: rows of the tables at first.
        base: of the frequencies.
        interleaved: the layout of the pairs.

    The tables are no parameters and no buffers: they stay float32 in a module that is cast to bfloat16, are in no
    state_dict, and are made anew, exactly equal, wherever the module is moved, copied or unpickled.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10000.0, interleaved: bool = False):
        _check_frequencies(dim, 2, base)
        _check_sizes(max_seq_len=max_seq_len)
        if not isinstance(interleaved, bool):
            raise TypeError(f"interleaved must be a bool, but is {type(interleaved).__name__}")
        super().__init__()
        self.dim, self.max_seq_len, self.base, self.interleaved = dim, max_seq_len, base, interleaved
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None

    def forward(
        self,
        x: torch.Tensor,
        k: torch.Tensor | None = None,
        *,
        layout: str = "bhsd",
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
        options = {"rotary_dim": self.dim, "interleaved": self.interleaved, "inverse": inverse, "layout": layout}
        options |= {"position_ids": position_ids, "cu_seqlens": cu_seqlens}
        return apply_rope(x, cos, sin, **options) if k is None else apply_rope_qk(x, k, cos, sin, **options)

    def tables(self, seq_len: int, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's cos and sin ``(S, R/2)`` float32 on ``device``, grown to ``seq_len`` rows if need be."""
        _check_sizes(seq_len=seq_len)
        cos, sin = self._cos, self._sin
        if cos is None or sin is None or not _on(cos.device, device):
            cos, sin = self._grow(max(seq_len, self.max_seq_len), device)
        elif cos.shape[0] < seq_len:
            cos, sin = self._grow(max(seq_len, 2 * cos.shape[0]), cos.device)  # twice: a loop of decoding grows rarely
        return cos, sin

    def _grow(self, rows: int, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        # Tables made in inference mode could never be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self._cos, self._sin = rope_tables(rows, self.dim, base=self.base, device=device)
        return self._cos, self._sin

    def __getstate__(self):
        return self.__dict__ | {"_cos": None, "_sin": None}

    def extra_repr(self) -> str:
        return f"{self.dim}, max_seq_len={self.max_seq_len}, base={self.base}, interleaved={self.interleaved}"


def _on(device: torch.device, wanted: torch.device | str | None) -> bool:
    """True where ``device`` is the wanted one; "cuda" is any GPU."""
    if wanted is None:
        return True
    wanted = torch.device(wanted)
    return device.type == wanted.type and wanted.index in (None, device.index)


def permute_rope_layout(
    x: torch.Tensor, head_dim: int | None = None, *, rotary_dim: int | None = None, dim: int = -1, inverse: bool = False
) -> torch.Tensor:
    """Reorder the columns of heads from the half layout to the interleaved one; with ``inverse`` back.

    With half-width tables, ``apply_rope(permute_rope_layout(x), cos, sin, interleaved=True)`` is
    ``permute_rope_layout(apply_rope(x, cos, sin))``; full-width tables are permuted like an x of width R. For weights
    and biases of the q and k projections ``dim`` is the axis of their outputs, as in
    ``permute_rope_layout(weight, head_dim, dim=0)``. Scores do not change as long as q and k are permuted alike.

    Args:
        x: any tensor whose axis ``dim`` holds H heads of ``head_dim`` columns.
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
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"{name} must be an int, but is {type(size).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be an axis of x with {x.ndim} dimensions, but is {dim}")
    columns = x.shape[dim]
    head_dim = columns if head_dim is None else head_dim
    if head_dim < 1 or columns % head_dim:
        raise ValueError(f"head_dim must divide the {columns} columns of x, but is {head_dim}")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be even and between 2 and head_dim = {head_dim}, but is {rotary_dim}")
    turning = torch.arange(rotary_dim, device=x.device)
    turning = turning.view(-1, 2).T.flatten() if inverse else turning.view(2, -1).T.flatten()
    order = torch.cat((turning, torch.arange(rotary_dim, head_dim, device=x.device)))
    starts = torch.arange(0, columns, head_dim, device=x.device)
    return x.index_select(dim, (starts[:, None] + order).flatten())
