# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""The torch.library operators of the rotation alone, with norms and without, their autograd, and their launches.

The gradient of a rotation is the transposed rotation of the gradient: the operator is its own backward, so that nothing
but tables and positions is saved, and double backward is exact. With norms the gradient needs what was normed too, has
an operator of its own, and cannot be differentiated again.

A memory-bound kernel needs bytes in flight, whatever the head dimension and the dtype: rows of the table of tiles give
bytes, and the launch turns them into tokens by heads. ``attention/configs.py`` explains tables.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from fused_rope_attn.kernels import tiles
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.rotation import RotaryTables
from fused_rope_attn.rotation import kernel, problem
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator
from fused_rope_attn.runtime.launch import Launch, call_of
from fused_rope_attn.runtime.layouts import table_strides
from fused_rope_attn.runtime.registration import Operator, is_plain
from fused_rope_attn.runtime.rows import find_row


@dataclass(frozen=True)
class RotationConfig:
    """The tile of one program, for the calls that the last three fields select; None matches anything.

    tile_bytes: bytes that it loads; divided by 32 * num_warps, the bytes that a thread has in flight.
    run_bytes: how many of them are neighbours in memory: heads of one token, or tokens of one head, whichever are.
    most_bytes: of a call's largest tensor. norms: whether the call has any.
    """

    tile_bytes: int
    run_bytes: int
    num_warps: int
    arch: tuple[str, ...] | None = None
    most_bytes: int | None = None
    norms: bool | None = None


# fmt: off
TABLE: tuple[RotationConfig, ...] = (
    # More than one tile in few rows, so that small tests cross every border.
    RotationConfig(tile_bytes=1 << 11, run_bytes=1 << 8, num_warps=1, arch=("interpreter",)),
    # Twice the programs, with eight 16-byte loads of a thread in flight. Untimed.
    RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4, most_bytes=4 << 20),
    # 90 registers forward and 128 backward on sm_90, so that smaller tiles keep more in flight. Untimed.
    RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4, norms=True),
    # H200, triton 3.6.0, 2026-11-21: .94 to .99 of a copy at seven shapes, both layouts.
    RotationConfig(tile_bytes=1 << 14, run_bytes=1 << 12, num_warps=8),
)
# fmt: on

# Columns that pass through, as a multiple of those that rotate, up to which a tile's size does not count them.
_MOST_TAIL = 4


def tile_shape(config: RotationConfig, row_bytes: int, heads: int, heads_inner: bool) -> tuple[int, int]:
    """Return (tokens, heads) of a tile with rows of ``row_bytes``. Heads are a constant of a model, lengths are not."""
    total = max(1, config.tile_bytes // row_bytes)
    inner = max(1, min(total, config.run_bytes // row_bytes))
    block_heads = min(triton.next_power_of_2(heads), inner if heads_inner else total // inner)
    return total // block_heads, block_heads


def _prepare(key, flat: tuple, *config: RotationConfig):
    """Prepare the launch of one signature. key: the options, and the numbers of xs and of weights."""
    options, count, norms = key
    axes = problem.LAYOUTS[options.layout]

    def split(flat: tuple) -> tuple[RotationTensors, list]:
        cos, sin, ids, ends, *rest = flat[2 * count :]
        tensors = RotationTensors(flat[:count], flat[count : 2 * count], cos, sin, ids, ends, rest[:norms])
        return tensors, rest[norms:]

    def in_order(sizes, absent) -> tuple[int, ...]:
        return tuple(absent if axis is None else sizes[axis] for axis in axes)

    (xs, outs, cos, _, ids, ends, _), normed = split(flat)
    x = xs[0]
    most_bytes = max(x.numel() * x.element_size() for x in xs)
    arch = device.arch(cos.device)
    chosen = config[0] if config else find_row(TABLE, arch=arch, most_bytes=most_bytes, norms=norms > 0)
    heads = [in_order(x.shape, 1)[1] for x in xs]
    batch, _, length, head_dim = in_order(x.shape, 1)
    sections = 1 if ids is None else ids.shape[1]
    width, tail = options.rotary_dim // sections, head_dim - options.rotary_dim
    block_pairs, block_tail = triton.next_power_of_2(width // 2), triton.next_power_of_2(tail) if tail else 1
    # A tile also holds what passes through, which is much where few columns of many rotate.
    columns = max(triton.next_power_of_2(2 * block_pairs * sections), block_tail // _MOST_TAIL)
    if norms:  # or is normed
        columns = triton.next_power_of_2(head_dim)
    # One token (a step of decoding) is all heads, in any order.
    _, head, row, _ = in_order(x.stride(), 0)
    heads_inner = head < row or length == 1
    fewest = min((h for h in heads if h), default=1)
    rows, block_heads = tile_shape(chosen, columns * x.element_size(), fewest, heads_inner)
    # True where an offset between two elements of one tile can pass 2**31.
    strides = [in_order(x.stride(), 0) for x in (*xs, *outs, *normed)]
    is_wide = any(rows * row + block_heads * head + head_dim * column >= 2**31 for _, head, row, column in strides)
    # A norm changes the tail too, which a call in place without norms leaves as it is.
    copies_tail = tail > 0 and not (options.in_place and not norms)
    tile = rows, block_heads, heads_inner, is_wide
    sequences = None if ends is None else ends.shape[0] - 1
    numbers = {
        **dict(itertools.zip_longest(("H0", "H1", "H2"), heads)),
        "N": length,
        "num_positions": cos.shape[-2],
        "num_sequences": sequences,
        "search_steps": None if sequences is None else sequences.bit_length(),
        "shape": kernel.TileShape.host(*tile, head_dim, sections, block_pairs, block_tail, copies_tail),
    }
    programs = [triton.cdiv(length, rows) * batch * triton.cdiv(h, block_heads) for h in heads]
    launch = Launch(kernel.rotation_kernel, sum(programs), {"num_warps": chosen.num_warps}, numbers)
    of_table = width, options.interleaved
    is_full = cos.shape[-1] == width
    of_norm = float(options.norm_eps or 0.0), float(options.norm_offset or 0.0), head_dim

    def run(flat: tuple) -> tuple[torch.Tensor, ...]:
        (xs, outs, cos, sin, ids, ends, weights), normed = split(flat)
        # A program writes one partial sum of its weight's gradient.
        partials = [cos.new_empty((of_x, head_dim), dtype=torch.float32) for of_x, _ in zip(programs, normed)]
        if sum(programs):
            of_norms = [Norm.host(weight, *of_norm) for weight in weights]
            views = [[tiles.view(x, in_order(x.stride(), 0)) for x in several] for several in (xs, outs, normed)]
            several = itertools.zip_longest(*views[:2], of_norms, views[2], partials)
            operands = [kernel.RotatedTensor.host(*operand) for operand in several]
            given = dict(itertools.zip_longest(("tensor0", "tensor1", "tensor2"), operands))
            tables = RotaryTables.host(cos, sin, *table_strides(cos, sin, *of_table), *of_table)
            ids_strides = None if ids is None else (ids.stride(0) if ids.shape[0] > 1 else 0, *ids.stride()[1:])
            angles = kernel.Angles.host(tables, ids, ids_strides, ends, None, None, is_full, options.inverse)
            launch(device.current_stream(cos.device), given, angles=angles)
        return tuple(partials)

    return run


def launch_rotation(
    options: RotationOptions,
    tensors: RotationTensors,
    normed: Sequence[torch.Tensor] = (),
    config: tuple[RotationConfig, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Fill ``outs`` with the rotated ``xs``, in one launch. If there are ``weights``, the first xs are normed before.

    With ``normed``, the forward call's inputs of the norms, the launch is the gradient of norm and rotation: options
    are those of the forward call with the opposite ``inverse``, xs gradients of its outs, and outs receive those of its
    xs. It returns the parts (programs, D) of each weight's gradient, float32 sums of the rows of a tile: to add them up
    in one order gives the same bits in every run. config: one to run instead of the table's.
    """
    xs, outs, *tables, weights = tensors
    flat = (*xs, *outs, *tables, *[w.contiguous() for w in weights], *normed)
    with device.guard(tensors.cos.device):
        return call_of(_prepare, (options, len(xs), len(weights)), flat, *config)(flat)


def _rotate_new(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    # The memory order of the input, as any pointwise operation of PyTorch gives it.
    outs = [torch.empty_like(x) for x in tensors.xs]
    launch_rotation(options, tensors._replace(outs=outs))
    return outs


def _rotate_into(options: RotationOptions, tensors: RotationTensors) -> None:
    pairs = zip(tensors.xs, tensors.outs)
    in_place = all((x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()) for x, out in pairs)
    launch_rotation(options._replace(in_place=in_place), tensors)


class _Rotation(SingleLevelFunction):
    """Saves tables, positions, and the inputs and weights of ``norms`` norms.

    given: cos, sin, two of positions, weights, xs. outs: the results. plain: the call skips the dispatcher.
    """

    @staticmethod
    def forward(ctx, plain: bool, options: RotationOptions, outs: list[torch.Tensor], norms: int, *given):
        ctx.save_for_backward(*given[: 4 + 2 * norms])
        ctx.plain, ctx.norms, ctx.options = plain, norms, options._replace(inverse=not options.inverse)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *dos):
        norms, needed = ctx.norms, ctx.needs_input_grad[8:]
        cos, sin, position_ids, cu_seqlens, *rest = ctx.saved_tensors
        of = [i for i, do in enumerate(dos) if do is not None and (needed[norms + i] or (i < norms and needed[i]))]
        gradients: list[torch.Tensor | None] = [None] * (norms + len(dos))
        if of:
            some = [i for i in of if i < norms]
            given, weights, normed = [dos[i] for i in of], [rest[i] for i in some], [rest[norms + i] for i in some]
            tensors = RotationTensors(given, None, cos, sin, position_ids, cu_seqlens, weights)
            # With create_graph the operator's own autograd must see the call: without norms it is differentiable again.
            plain = ctx.plain and is_plain(*given) and not torch.is_grad_enabled()
            if plain:
                found = _unrotate(ctx.options, tensors, normed) if norms else _rotate_new(ctx.options, tensors)
            elif norms:
                found = _rope_norm_backward(given, normed, *problem.to_arguments(ctx.options, tensors))
            else:
                found = _rope(given, *problem.to_arguments(ctx.options, tensors))
            for place, gradient in zip([norms + i for i in of] + some, found):
                gradients[place] = gradient
        return *(None,) * 8, *gradients


def _rotate(keyset, options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Return rotated copies of ``xs``, differentiable if they or the weights are.

    keyset: the dispatcher's, or None for a call that skips it.
    """
    xs, _, *tables, weights = tensors
    if keyset is None:
        outs = _rotate_new(options, tensors)
    else:
        outs = _rope.below_autograd(keyset, xs, *problem.to_arguments(options, tensors))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*xs, *weights)):
        return list(apply_in_operator(_Rotation, keyset is None, options, outs, len(weights), *tables, *weights, *xs))
    return outs


def _unrotate(options: RotationOptions, tensors: RotationTensors, normed) -> list[torch.Tensor]:
    """Return the gradients of inputs and then of weights; xs are those of the results."""
    # In the memory order of the norms' inputs, or of the gradients.
    dxs = [torch.empty_like(x) for x in (*normed, *tensors.xs[len(normed) :])]
    partials = launch_rotation(options, tensors._replace(outs=dxs), normed)
    return dxs + [part.sum(0).to(w.dtype) for part, w in zip(partials, tensors.weights)]


def _rope_norm_backward_fake(dos, normed, *arguments):
    weights = problem.from_arguments(dos, None, *arguments)[1].weights
    return [torch.empty_like(x) for x in (*normed, *dos[len(normed) :], *weights)]


_rope = Operator(
    f"rope(Tensor[] xs, {problem.SCHEMA}) -> Tensor[]",
    run=lambda xs, *arguments: _rotate_new(*problem.from_arguments(xs, None, *arguments)),
    fake=lambda xs, *arguments: [torch.empty_like(x) for x in xs],
    function="apply_rope",
    autograd=lambda keyset, xs, *arguments: _rotate(keyset, *problem.from_arguments(xs, None, *arguments)),
)
# xs: gradients of the results; normed: inputs of the norms, one for each weight.
_rope_norm_backward = Operator(
    f"rope_norm_backward(Tensor[] xs, Tensor[] normed, {problem.SCHEMA}) -> Tensor[]",
    run=lambda xs, normed, *arguments: _unrotate(*problem.from_arguments(xs, None, *arguments), normed),
    fake=_rope_norm_backward_fake,
    function=problem.WITH_NORMS,
    is_gradient=True,
)
_rope_out = Operator(
    f"rope_out(Tensor[] xs, Tensor(a!)[] outs, {problem.SCHEMA}) -> ()",
    run=lambda xs, outs, *arguments: _rotate_into(*problem.from_arguments(xs, outs, *arguments)),
    fake=lambda *arguments: None,
    function="apply_rope",
)


def rotate_by_kernel(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Rotated copies of ``xs``, or ``outs`` filled with them. Ordinary eager calls skip the dispatcher."""
    xs, outs, *tables, weights = tensors
    plain = is_plain(*xs, *(outs or ()), *tables, *weights)
    if outs is None:
        return _rotate(None, options, tensors) if plain else _rope(xs, *problem.to_arguments(options, tensors))
    if plain:
        _rotate_into(options, tensors)
    else:
        _rope_out(xs, outs, *problem.to_arguments(options, tensors))
    return outs
