"""Launcher of the rotation alone."""

import triton

from fused_rope_attn.rotation.configs import RotationConfig
from fused_rope_attn.rotation.kernel import IDS, INDEX, PACKED, rope_kernel
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import table_strides


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tile_shape(config: RotationConfig, row_bytes: int, heads: int, heads_inner: bool) -> tuple[int, int]:
    """(tokens, heads) of a tile whose rows have ``row_bytes``; heads are a constant of a model, lengths are not."""
    total = max(1, config.tile_bytes // row_bytes)
    inner = max(1, min(total, config.run_bytes // row_bytes))
    block_heads = min(_power_of_two(heads), inner if heads_inner else total // inner)
    return total // block_heads, block_heads


class Rope:
    """One launch for tensors of one signature.

    ``xs`` and ``outs`` hold one to three tensors of equal batch, length, head dim and dtype; ``axes`` says which of
    their axes is B, H, N and D (None for the batch of packed tokens). ``position_ids`` is (1|B, SECTIONS, N), or None.
    ``in_place`` says that ``outs`` are ``xs``: columns that pass through are there already.
    """

    def __init__(self, xs, outs, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, conjugate, axes, in_place,
                 config: RotationConfig):  # fmt: skip
        shapes = [_canonical(x.shape, axes, 1) for x in xs]
        batch, _, length, head_dim = shapes[0]
        heads = [shape[1] for shape in shapes]
        x_strides = [_canonical(x.stride(), axes, 0) for x in xs]
        out_strides = [_canonical(out.stride(), axes, 0) for out in outs]
        sections = 1 if position_ids is None else position_ids.shape[1]
        width = rotary_dim // sections
        block_p = _power_of_two(width // 2)
        cos_strides, sin_strides = table_strides(cos, sin, width, interleaved)
        position_strides = (0, 0, 0)
        if position_ids is not None:
            position_strides = position_ids.stride()
            position_strides = (position_strides[0] if position_ids.shape[0] > 1 else 0, *position_strides[1:])
        num_sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1

        # One token (a step of decoding) is all heads, however they lie.
        heads_inner = x_strides[0][1] < x_strides[0][2] or length == 1
        rows, block_heads = tile_shape(config, 2 * block_p * xs[0].element_size(), min(heads), heads_inner)
        chunks = sum(triton.cdiv(h, block_heads) for h in heads)
        missing = 3 - len(xs)
        self.launch = Launch(
            rope_kernel,
            triton.cdiv(length, rows) * chunks * batch,
            (
                *x_strides, *x_strides[:1] * missing, *out_strides, *out_strides[:1] * missing, cos_strides,
                sin_strides, position_strides, *heads, *[0] * missing, length, cos.shape[-2], num_sequences,
                num_sequences.bit_length(),
            ),
            {
                "COUNT": len(xs),
                "D": head_dim,
                "R": width,
                "SECTIONS": sections,
                "ROWS": rows,
                "HEADS": block_heads,
                "BLOCK_P": block_p,
                "BLOCK_TAIL": _power_of_two(head_dim - rotary_dim) if head_dim > rotary_dim else 1,
                "INTERLEAVED": interleaved,
                "CONJUGATE": conjugate,
                "WIDE": cos.shape[-1] == width,
                "POSITIONS": IDS if position_ids is not None else PACKED if cu_seqlens is not None else INDEX,
                "HEADS_INNER": heads_inner,
                "COPY_TAIL": head_dim > rotary_dim and not in_place,
                "LONG": _is_long(x_strides + out_strides, rows, block_heads, head_dim),
            },
            {"num_warps": config.num_warps},
        )  # fmt: skip

    def __call__(self, stream, xs, outs, cos, sin, position_ids, cu_seqlens) -> None:
        x, out = xs[0], outs[0]
        missing = 3 - len(xs)
        # A pointer that the kernel does not read must still be one.
        ids = cos if position_ids is None else position_ids
        ends = cos if cu_seqlens is None else cu_seqlens
        self.launch(stream, *xs, *[x] * missing, *outs, *[out] * missing, cos, sin, ids, ends)


def _canonical(sizes, axes, absent) -> tuple[int, ...]:
    return tuple(absent if axis is None else sizes[axis] for axis in axes)


def _is_long(strides, rows: int, heads: int, head_dim: int) -> bool:
    """True when an offset between two elements of one tile can pass 2**31."""
    return any(rows * row + heads * head + head_dim * column >= 2**31 for _, head, row, column in strides)
