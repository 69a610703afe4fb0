"""FlashAttention-2 in plain Triton, forward and backward, without rotation: what a good portable kernel costs alone.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithms 1
and 2, the backward in two kernels (dK/dV by key block, dQ by query block) so that nothing is added up by atomics.

q ``(B, HQ, NQ, D)``, k and v ``(B, HKV, NK, D)`` of one dtype (float16, bfloat16, float32), last dimension contiguous,
other strides free; GQA by head index; causal masks are bottom-right aligned; any length; D up to 256.

It is kept apart from the package's kernels on purpose: a baseline that shares code with its rival moves along with it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_LOG2E = math.log2(math.e)


class Tile(NamedTuple):
    block_m: int  # query rows
    block_n: int  # key rows
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    forward: Tile
    dkdv: Tile
    dq: Tile


# Keyed by the padded head dimension. The first table is for 16-bit inputs where a block may use at least 160 KB of
# shared memory (sm_80, sm_90, sm_100), the second for every other card (99 KB), the third for float32. Accumulators
# decide: a 128-row block of D = 128 in 8 warps is 64 registers a thread for each of them, and dK/dV holds two.
_LARGE = {
    32: Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 4, 2), Tile(128, 64, 4, 2)),
    64: Tiles(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 1), Tile(128, 32, 8, 1)),
}
_SMALL = {
    32: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(16, 64, 8, 1), Tile(64, 16, 8, 1)),
}
_FLOAT32 = {
    32: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    64: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may use; 0 without a GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def padded_head_dim(head_dim: int) -> int:
    """The power of two (at least 16) that a tile's columns are padded to."""
    return max(16, triton.next_power_of_2(head_dim))


@functools.cache
def tiles(head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Tile sizes of the three kernels for one head dimension, dtype and shared-memory limit (bytes)."""
    if dtype is torch.float32:
        table = _FLOAT32
    else:
        table = _LARGE if shared_memory >= 160 * 1024 else _SMALL
    return table[max(32, padded_head_dim(head_dim))]


@triton.jit
def _load(base, rows, limit, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """(len(rows), BLOCK_D) tile; columns past D, and with CHECK_ROWS rows past ``limit``, are zero."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if CHECK_ROWS and D != BLOCK_D:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    elif D != BLOCK_D:
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(base, tile, rows, limit, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < limit) & (columns[None, :] < D)
    tl.store(base + rows[:, None] * stride + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _head(pointer, strides, batch, head):
    """Start of one head; 64-bit, since a whole tensor may pass 2**31 elements although one head does not."""
    return pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def _query_block(HQ, IS_CAUSAL: tl.constexpr):
    """(query block, batch entry, query head) of this program; causal blocks run longest first."""
    block = tl.program_id(0)
    if IS_CAUSAL:
        block = tl.num_programs(0) - 1 - block
    return block, tl.program_id(1) // HQ, tl.program_id(1) % HQ


@triton.jit
def _key_range(block, shift, NK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(where key blocks that need a mask begin, where the visible keys end) for one query block."""
    if IS_CAUSAL:
        last = tl.minimum(NK, tl.maximum(0, (block + 1) * BLOCK_M + shift))
        unmasked = tl.minimum(NK, tl.maximum(0, block * BLOCK_M + shift + 1)) // BLOCK_N * BLOCK_N
    else:
        last = NK
        unmasked = NK // BLOCK_N * BLOCK_N
    return unmasked, last


@triton.jit
def _exists(offs_m, offs_n, shift, NK, IS_CAUSAL: tl.constexpr):
    """Return the mask of scores that count: (len(offs_m), len(offs_n)), or (1, len(offs_n)) without a causal mask."""
    exists = offs_n[None, :] < NK
    if IS_CAUSAL:
        exists = exists & (offs_n[None, :] <= offs_m[:, None] + shift)
    return exists


@triton.jit
def _attend(acc, row_max, row_sum, q, k_head, v_head, k_stride, v_stride, first, last, offs_m, shift, NK, qk_scale,
            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
            MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold the keys [first, last) into the online softmax; MASKED blocks touch the diagonal or the end of the keys."""
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = _load(k_head, offs_n, NK, k_stride, D, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            exists = _exists(offs_m, offs_n, shift, NK, IS_CAUSAL)
            scores = tl.where(exists, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        subtrahend = new_max
        if MASKED:  # a row that has seen nothing yet: exp2(-inf - 0) = 0 instead of exp2(-inf + inf) = NaN
            subtrahend = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores * qk_scale - subtrahend[:, None])
        correction = tl.math.exp2(row_max - subtrahend)
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v = _load(v_head, offs_n, NK, v_stride, D, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_strides, k_strides, v_strides, o_strides, HQ, GROUP_SIZE, NQ,
                    NK, qk_scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One query block of one head. Grid: (query blocks, B * HQ); causal blocks run longest first."""
    block, batch, head = _query_block(HQ, IS_CAUSAL)
    k_head = _head(k_ptr, k_strides, batch, head // GROUP_SIZE)
    v_head = _head(v_ptr, v_strides, batch, head // GROUP_SIZE)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    shift = NK - NQ
    q = _load(_head(q_ptr, q_strides, batch, head), offs_m, NQ, q_strides[2], D, BLOCK_D, True)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    unmasked, last = _key_range(block, shift, NK, BLOCK_M, BLOCK_N, IS_CAUSAL)
    acc, row_max, row_sum = _attend(acc, row_max, row_sum, q, k_head, v_head, k_strides[2], v_strides[2], 0, unmasked,
                                    offs_m, shift, NK, qk_scale, D, BLOCK_D, BLOCK_N, IS_CAUSAL, False,
                                    PRECISION)  # fmt: skip
    acc, row_max, row_sum = _attend(acc, row_max, row_sum, q, k_head, v_head, k_strides[2], v_strides[2], unmasked,
                                    last, offs_m, shift, NK, qk_scale, D, BLOCK_D, BLOCK_N, IS_CAUSAL, True,
                                    PRECISION)  # fmt: skip
    seen = row_sum > 0.0
    row_sum = tl.where(seen, row_sum, 1.0)
    _store(_head(o_ptr, o_strides, batch, head), acc / row_sum[:, None], offs_m, NQ, o_strides[2], D, BLOCK_D)
    # Base 2, the form in which the backward kernels use it.
    lse2 = tl.where(seen, row_max + tl.math.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * NQ + offs_m, lse2, mask=offs_m < NQ)


@triton.jit
def _delta_kernel(o_ptr, do_ptr, delta_ptr, o_strides, do_strides, HQ, NQ, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_M: tl.constexpr):  # fmt: skip
    """delta = rowsum(o * do), float32. Grid: (query blocks, B * HQ)."""
    batch = tl.program_id(1) // HQ
    head = tl.program_id(1) % HQ
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = _load(_head(o_ptr, o_strides, batch, head), offs_m, NQ, o_strides[2], D, BLOCK_D, True).to(tl.float32)
    do = _load(_head(do_ptr, do_strides, batch, head), offs_m, NQ, do_strides[2], D, BLOCK_D, True).to(tl.float32)
    tl.store(delta_ptr + tl.program_id(1).to(tl.int64) * NQ + offs_m, tl.sum(o * do, 1), mask=offs_m < NQ)


@triton.jit
def _dkdv_range(dk, dv, k, v, q_head, do_head, lse_head, delta_head, q_stride, do_stride, first, last, offs_n, shift,
                NQ, qk_scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, DIAGONAL: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Add the queries [first, last) to dk and dv. Query rows past NQ read as q = do = 0 and add nothing."""
    for start in range(first, last, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        q = _load(q_head, offs_m, NQ, q_stride, D, BLOCK_D, True)
        lse2 = tl.load(lse_head + offs_m, mask=offs_m < NQ, other=0.0)
        p = tl.math.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * qk_scale - lse2[None, :])
        if DIAGONAL:
            p = tl.where(offs_n[:, None] <= offs_m[None, :] + shift, p, 0.0)
        do = _load(do_head, offs_m, NQ, do_stride, D, BLOCK_D, True)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_head + offs_m, mask=offs_m < NQ, other=0.0)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_strides, k_strides, v_strides,
                 do_strides, dk_strides, dv_strides, HQ, HKV, GROUP_SIZE, NQ, NK, qk_scale, softmax_scale,
                 D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One key block of one key-value head, summed over the query heads of its group. Grid: (key blocks, B * HKV)."""
    block = tl.program_id(0)
    batch = tl.program_id(1) // HKV
    head_kv = tl.program_id(1) % HKV
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    shift = NK - NQ
    k = _load(_head(k_ptr, k_strides, batch, head_kv), offs_n, NK, k_strides[2], D, BLOCK_D, True)
    v = _load(_head(v_ptr, v_strides, batch, head_kv), offs_n, NK, v_strides[2], D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first = 0
    unmasked = 0
    if IS_CAUSAL:
        # The first query that sees key n is n - shift; from query (last key of the block) - shift on, all are seen.
        first = tl.maximum(0, block * BLOCK_N - shift) // BLOCK_M * BLOCK_M
        unmasked = tl.maximum(first, tl.cdiv(tl.maximum(0, (block + 1) * BLOCK_N - 1 - shift), BLOCK_M) * BLOCK_M)
        unmasked = tl.minimum(unmasked, tl.maximum(first, tl.cdiv(NQ, BLOCK_M) * BLOCK_M))
    for member in range(GROUP_SIZE):
        head = head_kv * GROUP_SIZE + member
        q_head = _head(q_ptr, q_strides, batch, head)
        do_head = _head(do_ptr, do_strides, batch, head)
        row = (batch * HQ + head).to(tl.int64) * NQ
        if IS_CAUSAL:
            dk, dv = _dkdv_range(dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row, q_strides[2],
                                 do_strides[2], first, tl.minimum(unmasked, NQ), offs_n, shift, NQ, qk_scale, D,
                                 BLOCK_D, BLOCK_M, True, PRECISION)  # fmt: skip
        dk, dv = _dkdv_range(dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row, q_strides[2], do_strides[2],
                             unmasked, NQ, offs_n, shift, NQ, qk_scale, D, BLOCK_D, BLOCK_M, False,
                             PRECISION)  # fmt: skip
    _store(_head(dk_ptr, dk_strides, batch, head_kv), dk * softmax_scale, offs_n, NK, dk_strides[2], D, BLOCK_D)
    _store(_head(dv_ptr, dv_strides, batch, head_kv), dv, offs_n, NK, dv_strides[2], D, BLOCK_D)


@triton.jit
def _dq_range(dq, q, do, lse2, delta, k_head, v_head, k_stride, v_stride, first, last, offs_m, shift, NK, qk_scale,
              D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
              MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = _load(k_head, offs_n, NK, k_stride, D, BLOCK_D, MASKED)
        v = _load(v_head, offs_n, NK, v_stride, D, BLOCK_D, MASKED)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale - lse2[:, None])
        if MASKED:
            exists = _exists(offs_m, offs_n, shift, NK, IS_CAUSAL)
            p = tl.where(exists, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, q_strides, k_strides, v_strides, do_strides,
               dq_strides, HQ, GROUP_SIZE, NQ, NK, qk_scale, softmax_scale, D: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """One query block of one head. Grid: (query blocks, B * HQ); causal blocks run longest first."""
    block, batch, head = _query_block(HQ, IS_CAUSAL)
    k_head = _head(k_ptr, k_strides, batch, head // GROUP_SIZE)
    v_head = _head(v_ptr, v_strides, batch, head // GROUP_SIZE)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    shift = NK - NQ
    row = tl.program_id(1).to(tl.int64) * NQ
    q = _load(_head(q_ptr, q_strides, batch, head), offs_m, NQ, q_strides[2], D, BLOCK_D, True)
    do = _load(_head(do_ptr, do_strides, batch, head), offs_m, NQ, do_strides[2], D, BLOCK_D, True)
    lse2 = tl.load(lse_ptr + row + offs_m, mask=offs_m < NQ, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < NQ, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    unmasked, last = _key_range(block, shift, NK, BLOCK_M, BLOCK_N, IS_CAUSAL)
    dq = _dq_range(dq, q, do, lse2, delta, k_head, v_head, k_strides[2], v_strides[2], 0, unmasked, offs_m, shift, NK,
                   qk_scale, D, BLOCK_D, BLOCK_N, IS_CAUSAL, False, PRECISION)  # fmt: skip
    dq = _dq_range(dq, q, do, lse2, delta, k_head, v_head, k_strides[2], v_strides[2], unmasked, last, offs_m, shift,
                   NK, qk_scale, D, BLOCK_D, BLOCK_N, IS_CAUSAL, True, PRECISION)  # fmt: skip
    _store(_head(dq_ptr, dq_strides, batch, head), dq * softmax_scale, offs_m, NQ, dq_strides[2], D, BLOCK_D)


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _TritonFlashAttention2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale):
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        o = torch.empty_like(q)
        lse2 = torch.empty((batch, heads_q, len_q), dtype=torch.float32, device=q.device)
        tile = tiles(head_dim, q.dtype, _shared_memory(q.device)).forward
        _forward_kernel[(triton.cdiv(len_q, tile.block_m), batch * heads_q)](
            q, k, v, o, lse2, q.stride(), k.stride(), v.stride(), o.stride(), heads_q, heads_q // heads_kv, len_q,
            len_k, softmax_scale * _LOG2E, D=head_dim, BLOCK_D=padded_head_dim(head_dim), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, IS_CAUSAL=causal, PRECISION="ieee", num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse2)
        ctx.causal, ctx.softmax_scale = causal, softmax_scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse2 = ctx.saved_tensors
        do = _rows_contiguous(do)
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        group_size = heads_q // heads_kv
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(lse2)
        block_d = padded_head_dim(head_dim)
        chosen = tiles(head_dim, q.dtype, _shared_memory(q.device))
        qk_scale = ctx.softmax_scale * _LOG2E
        shared = {"D": head_dim, "BLOCK_D": block_d}
        _delta_kernel[(triton.cdiv(len_q, 64), batch * heads_q)](
            o, do, delta, o.stride(), do.stride(), heads_q, len_q, BLOCK_M=64, num_warps=4, **shared
        )
        shared |= {"IS_CAUSAL": ctx.causal, "PRECISION": "ieee"}
        tile = chosen.dkdv
        _dkdv_kernel[(triton.cdiv(len_k, tile.block_n), batch * heads_kv)](
            q, k, v, do, lse2, delta, dk, dv, q.stride(), k.stride(), v.stride(), do.stride(), dk.stride(), dv.stride(),
            heads_q, heads_kv, group_size, len_q, len_k, qk_scale, ctx.softmax_scale, BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages, **shared,
        )  # fmt: skip
        tile = chosen.dq
        _dq_kernel[(triton.cdiv(len_q, tile.block_m), batch * heads_q)](
            q, k, v, do, lse2, delta, dq, q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(), heads_q,
            group_size, len_q, len_k, qk_scale, ctx.softmax_scale, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **shared,
        )  # fmt: skip
        return dq, dk, dv, None, None


def triton_fa2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(D)) v, differentiable once. Shapes and dtypes: see the top of the file; no length is 0."""
    return _TritonFlashAttention2.apply(q, k, v, causal, q.shape[-1] ** -0.5)
