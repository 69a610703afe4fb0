"""Portable attention backward: one pre-process, then dK/dV by key blocks and dQ by query blocks; no atomics.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per block.
"""

import torch
import triton
import triton.language as tl

from fused_rope_attn import device
from fused_rope_attn.kernels.launch import (
    Launch,
    PreparedCalls,
    Source,
    block_d,
    dot_precision,
    has_descriptor,
    heads_per_section,
    is_long,
    output_strides,
    scale_and_sign,
    table_strides,
)
from fused_rope_attn.kernels.primitives import (
    LN2,
    LOG2E,
    add_product,
    head_source,
    head_tables,
    let_next_launch_start,
    load_head_tile,
    load_rotated,
    load_tile,
    scheduled_tile,
    store_tile,
    store_unrotated,
    visible,
    wait_for_previous_launch,
)
from fused_rope_attn.kernels.rotary import rotate_rows


@triton.jit(do_not_specialize=["NQ", "pitch", "NK", "B", "HQ", "HKV", "position_limit"])
def preprocess_kernel(o_ptr, do_ptr, lse_ptr, stats_ptr, accumulator_ptr, q_ptr, q_rot_ptr, k_ptr, k_rot_ptr,
                      cos_ptr, sin_ptr, o_strides, do_strides, q_strides, q_rot_strides, k_strides, k_rot_strides,
                      cos_strides, sin_strides, q_sign, B, HQ, HKV, NQ, pitch, NK, position_limit,
                      HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr,
                      BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATE: tl.constexpr, CLEAR: tl.constexpr,
                      LONG: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Row statistics, and with ROTATE the rotated copies of q and k. Grid: query programs, then key programs.

    ``stats`` (2, B, HQ, pitch) float32: lse in base 2 (+inf where a row saw nothing, so that p = exp2(s - lse) = 0) and
    delta = sum(o * do); both are 0 from NQ to pitch. With CLEAR ``accumulator`` (B, HQ, pitch, BLOCK_D) float32 is set
    to zero.
    """
    let_next_launch_start(PDL)
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(pitch, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    if pid < q_blocks * q_chunks * B:
        chunk = (pid // q_blocks) % q_chunks
        batch = (pid // (q_blocks * q_chunks)).to(tl.int64)
        start = (pid % q_blocks) * BLOCK_N
        start64 = tl.cast(start, tl.int64)
        rows = tl.arange(0, BLOCK_N)
        left = NQ - start
        last_head = tl.minimum(chunk * HEADS + HEADS, HQ)
        for head in range(chunk * HEADS, last_head):
            h = tl.cast(head, tl.int64)
            o_rows = o_ptr + batch * o_strides[0] + h * o_strides[1] + start64 * o_strides[2]
            do_rows = do_ptr + batch * do_strides[0] + h * do_strides[1] + start64 * do_strides[2]
            o = load_tile(o_rows, rows, left, o_strides[2], o_strides[3], D, BLOCK_D, True, LONG)
            do = load_tile(do_rows, rows, left, do_strides[2], do_strides[3], D, BLOCK_D, True, LONG)
            bh = batch * HQ + h
            lse = tl.load(lse_ptr + bh * NQ + start + rows, mask=rows < left, other=0.0)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            row_index = bh * pitch + start + rows
            tl.store(stats_ptr + row_index, lse, mask=rows < pitch - start)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(stats_ptr + tl.cast(B, tl.int64) * HQ * pitch + row_index, delta, mask=rows < pitch - start)
            if CLEAR:
                nothing = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                cleared = accumulator_ptr + (bh * pitch + start) * BLOCK_D
                store_tile(cleared, nothing, rows, pitch - start, BLOCK_D, 1, BLOCK_D, BLOCK_D, False)
        if ROTATE:
            tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
            rotate_rows(
                q_ptr, q_rot_ptr, q_strides, q_rot_strides, tables, q_sign, NQ, NK - NQ, position_limit, batch,
                chunk * HEADS, last_head, start, BLOCK_N, D, R, BLOCK_D, INTERLEAVED, LONG,
            )  # fmt: skip
    else:
        if ROTATE:
            pid -= q_blocks * q_chunks * B
            k_blocks = tl.cdiv(NK, BLOCK_N)
            k_chunks = tl.cdiv(HKV, HEADS)
            chunk = (pid // k_blocks) % k_chunks
            batch = (pid // (k_blocks * k_chunks)).to(tl.int64)
            tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
            rotate_rows(
                k_ptr, k_rot_ptr, k_strides, k_rot_strides, tables, 1.0, NK, 0, position_limit, batch, chunk * HEADS,
                tl.minimum(chunk * HEADS + HEADS, HKV), (pid % k_blocks) * BLOCK_N, BLOCK_N, D, R, BLOCK_D, INTERLEAVED,
                LONG,
            )  # fmt: skip


@triton.jit
def dkdv_range(dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
               batch, head, first, count, jump_after, jump_to, q_offset, NQ, NK, qk_scale, q_sign, D: tl.constexpr,
               R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
               IS_CAUSAL: tl.constexpr, INLINE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
               TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Add ``count`` query blocks to dk and dv: from block ``first`` on, with one jump to block ``jump_to``.

    Key rows past NK need no mask here: they only reach rows of dk and dv that are never stored.
    """
    rows = tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        if MASKED:
            start_m = tl.where(i < jump_after, start_m, jump_to * BLOCK_M)
        left = NQ - start_m
        if INLINE:
            q = load_rotated(
                q_source + tl.cast(start_m, tl.int64) * q_strides[2], rows, left, q_strides, tables,
                start_m + q_offset, NK, q_sign, D, R, BLOCK_D, INTERLEAVED, MASKED, LONG,
            )  # fmt: skip
        else:
            q = load_head_tile(
                q_source, batch, head, start_m, rows, NQ, q_strides[2], q_strides[3], D, BLOCK_M, BLOCK_D, TMA,
                MASKED, LONG,
            )  # fmt: skip
        if MASKED:
            lse = tl.load(lse_base + start_m + rows, mask=rows < left, other=float("inf"))
        else:
            lse = tl.load(lse_base + start_m + rows)
        scores_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p_t = tl.math.exp2(scores_t * qk_scale - lse[None, :])
        if MASKED:
            if IS_CAUSAL:
                positions_q = start_m + q_offset + rows
                p_t = tl.where(visible(positions_q[None, :], positions_k[:, None], NK, IS_CAUSAL), p_t, 0.0)
        do = load_head_tile(
            do_source, batch, head, start_m, rows, NQ, do_strides[2], do_strides[3], D, BLOCK_M, BLOCK_D, TMA, MASKED,
            LONG,
        )  # fmt: skip
        dv = add_product(p_t.to(do.dtype), do, dv, PRECISION)
        if MASKED:
            delta = tl.load(delta_base + start_m + rows, mask=rows < left, other=0.0)
        else:
            delta = tl.load(delta_base + start_m + rows)
        dp_t = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = add_product(ds_t.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section"])
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dk_ptr, dv_ptr, q_strides, k_strides,
                v_strides, do_strides, dk_strides, dv_strides, cos_strides, sin_strides, qk_scale, q_sign, num_heads,
                HKV, GROUP_SIZE, NQ, NK, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
                INLINE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (key blocks * B * HKV).
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    tile, bh = scheduled_tile(tl.program_id(0), tl.cdiv(NK, BLOCK_N), num_heads, section, LAST_FIRST=False)
    batch = (bh // HKV).to(tl.int64)
    head = (bh % HKV).to(tl.int64)
    start_n = tile * BLOCK_N
    left = NK - start_n
    rows = tl.arange(0, BLOCK_N)
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    k_rows = k_ptr + batch * k_strides[0] + head * k_strides[1] + tl.cast(start_n, tl.int64) * k_strides[2]
    v_rows = v_ptr + batch * v_strides[0] + head * v_strides[1] + tl.cast(start_n, tl.int64) * v_strides[2]
    if INLINE:
        k = load_rotated(
            k_rows, rows, left, k_strides, tables, start_n, NK, 1.0, D, R, BLOCK_D, INTERLEAVED, True, LONG,
        )  # fmt: skip
    else:
        k = load_tile(k_rows, rows, left, k_strides[2], k_strides[3], D, BLOCK_D, True, LONG)
    v = load_tile(v_rows, rows, left, v_strides[2], v_strides[3], D, BLOCK_D, True, LONG)

    # Query blocks [first, full) cross the diagonal, [full, whole) see every key, block `whole` (if any) is partial.
    q_offset = NK - NQ
    whole = NQ // BLOCK_M
    blocks = tl.cdiv(NQ, BLOCK_M)
    first = 0
    full = 0
    if IS_CAUSAL:
        first = tl.minimum(blocks, tl.maximum(0, start_n - q_offset) // BLOCK_M)
        full = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - q_offset), BLOCK_M))
    diagonal = full - first
    partial = tl.where(full < blocks, blocks - whole, 0)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    positions_k = start_n + rows
    stats_size = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ
    for member in range(GROUP_SIZE):
        head_q = head * GROUP_SIZE + member
        q_source = head_source(q_ptr, batch, head_q, q_strides, TMA)
        do_source = head_source(do_ptr, batch, head_q, do_strides, TMA)
        lse_base = stats_ptr + (batch * HKV * GROUP_SIZE + head_q) * NQ
        delta_base = lse_base + stats_size
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
            batch, head_q, first, diagonal + partial, diagonal, whole, q_offset, NQ, NK, qk_scale, q_sign, D, R,
            BLOCK_M, BLOCK_D, INTERLEAVED, IS_CAUSAL, INLINE, True, PRECISION, TMA, LONG,
        )  # fmt: skip
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
            batch, head_q, full, whole - full, 0, 0, q_offset, NQ, NK, qk_scale, q_sign, D, R, BLOCK_M, BLOCK_D,
            INTERLEAVED, IS_CAUSAL, INLINE, False, PRECISION, TMA, LONG,
        )  # fmt: skip
    dv_rows = dv_ptr + batch * dv_strides[0] + head * dv_strides[1] + tl.cast(start_n, tl.int64) * dv_strides[2]
    store_tile(dv_rows, dv, rows, left, dv_strides[2], dv_strides[3], D, BLOCK_D, LONG)
    dk_rows = dk_ptr + batch * dk_strides[0] + head * dk_strides[1] + tl.cast(start_n, tl.int64) * dk_strides[2]
    store_unrotated(
        dk_rows, dk * (qk_scale * LN2), rows, left, dk_strides, tables, start_n, NK, D, R, BLOCK_D, INTERLEAVED,
        LONG,
    )  # fmt: skip


@triton.jit
def dq_range(dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, batch, head, first,
             last, NK, qk_scale, D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, INLINE: tl.constexpr, MASKED: tl.constexpr,
             PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Add keys [first, last) to dq; ``first`` is a multiple of BLOCK_N."""
    rows = tl.arange(0, BLOCK_N)
    for start_n in range(first, last, BLOCK_N):
        if INLINE:
            k = load_rotated(
                k_source + tl.cast(start_n, tl.int64) * k_strides[2], rows, NK - start_n, k_strides, tables,
                start_n, NK, 1.0, D, R, BLOCK_D, INTERLEAVED, MASKED, LONG,
            )  # fmt: skip
        else:
            k = load_head_tile(
                k_source, batch, head, start_n, rows, NK, k_strides[2], k_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
                LONG,
            )  # fmt: skip
        v = load_head_tile(
            v_source, batch, head, start_n, rows, NK, v_strides[2], v_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
            LONG,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.math.exp2(scores * qk_scale - lse[:, None])
        if MASKED:
            p = tl.where(visible(positions_q[:, None], (start_n + rows)[None, :], NK, IS_CAUSAL), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section"])
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dq_ptr, q_strides, k_strides, v_strides,
              do_strides, dq_strides, cos_strides, sin_strides, qk_scale, q_sign, softmax_scale, num_heads, HQ,
              GROUP_SIZE, NQ, NK, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
              INLINE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head. Grid: (query blocks * B * HQ).

    With PDL it starts while dkdv_kernel drains: it reads only what the pre-process wrote, which dkdv_kernel waited for.
    """
    tile, bh = scheduled_tile(tl.program_id(0), tl.cdiv(NQ, BLOCK_M), num_heads, section, LAST_FIRST=IS_CAUSAL)
    batch = (bh // HQ).to(tl.int64)
    head = (bh % HQ).to(tl.int64)
    start_m = tile * BLOCK_M
    left = NQ - start_m
    q_offset = NK - NQ
    rows = tl.arange(0, BLOCK_M)
    positions_q = start_m + q_offset + rows
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    head_kv = head // GROUP_SIZE
    k_source = head_source(k_ptr, batch, head_kv, k_strides, TMA)
    v_source = head_source(v_ptr, batch, head_kv, v_strides, TMA)
    q_rows = q_ptr + batch * q_strides[0] + head * q_strides[1] + tl.cast(start_m, tl.int64) * q_strides[2]
    do_rows = do_ptr + batch * do_strides[0] + head * do_strides[1] + tl.cast(start_m, tl.int64) * do_strides[2]
    if INLINE:
        q = load_rotated(
            q_rows, rows, left, q_strides, tables, start_m + q_offset, NK, q_sign, D, R, BLOCK_D, INTERLEAVED, True,
            LONG,
        )  # fmt: skip
    else:
        q = load_tile(q_rows, rows, left, q_strides[2], q_strides[3], D, BLOCK_D, True, LONG)
    do = load_tile(do_rows, rows, left, do_strides[2], do_strides[3], D, BLOCK_D, True, LONG)
    stats_base = stats_ptr + tl.cast(bh, tl.int64) * NQ + start_m
    lse = tl.load(stats_base + rows, mask=rows < left, other=float("inf"))
    delta = tl.load(stats_base + tl.cast(num_heads, tl.int64) * NQ + rows, mask=rows < left, other=0.0)

    last = NK
    full = NK
    if IS_CAUSAL:
        last = tl.minimum(NK, tl.maximum(0, start_m + BLOCK_M + q_offset))
        full = tl.minimum(NK, tl.maximum(0, start_m + q_offset + 1))
    full = full // BLOCK_N * BLOCK_N

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq = dq_range(
        dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, batch, head_kv,
        0, full, NK, qk_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL, INLINE, False, PRECISION, TMA, LONG,
    )  # fmt: skip
    dq = dq_range(
        dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, batch, head_kv,
        full, last, NK, qk_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL, INLINE, True, PRECISION, TMA, LONG,
    )  # fmt: skip
    # Not for data: the launch after this one must find dk and dv finished too.
    wait_for_previous_launch(PDL)
    dq_rows = dq_ptr + batch * dq_strides[0] + head * dq_strides[1] + tl.cast(start_m, tl.int64) * dq_strides[2]
    store_unrotated(
        dq_rows, dq * softmax_scale, rows, left, dq_strides, tables, start_m + q_offset, NK, D, R, BLOCK_D,
        INTERLEAVED, LONG,
    )  # fmt: skip


class BackwardCall:
    """The launches of one backward signature: pre-process, dkdv, dq; each None where it has nothing to do."""

    def __init__(self, do, q, k, v, o, cos, sin, causal, softmax_scale, rotary_dim, interleaved, precision, config):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        self.inline = inline = config.strategy == "inline"
        pad_d = block_d(head_dim)
        self.preprocess = self.dkdv = self.dq = None
        group_size = heads_q // heads_kv
        self.strides = dq_strides, dk_strides, dv_strides = output_strides(q), output_strides(k), output_strides(v)
        q_rot, k_rot = self._rotated(q, k)
        qk_scale, q_sign = scale_and_sign(softmax_scale)
        tables = table_strides(cos, sin, rotary_dim, interleaved)
        tma = config.tma and not inline and all(map(has_descriptor, (q_rot, k_rot, v, do)))
        shared = {
            "D": head_dim,
            "R": rotary_dim,
            "BLOCK_D": pad_d,
            "INTERLEAVED": interleaved,
            "LONG": is_long(*(x.stride() for x in (q, k, v, o, do)), *self.strides),
        }
        chunk, block = config.rotate_heads, config.rotate_rows
        programs = triton.cdiv(len_q, block) * triton.cdiv(heads_q, chunk) * batch
        if not inline:
            programs += triton.cdiv(len_k, block) * triton.cdiv(heads_kv, chunk) * batch
        # dq_kernel may only skip its wait when dkdv_kernel, which does wait, runs between it and the pre-process.
        shared["PDL"] = pdl = config.pdl and programs > 0 and batch * len_k > 0
        launch_options = {"launch_pdl": True} if pdl else {}
        if programs:
            self.preprocess = Launch(
                preprocess_kernel,
                programs,
                (
                    o.stride(), do.stride(), q.stride(), q_rot.stride(), k.stride(), k_rot.stride(), *tables, q_sign,
                    batch, heads_q, heads_kv, len_q, len_q, len_k, cos.shape[-2],
                ),
                ordered(preprocess_kernel, shared, HEADS=chunk, BLOCK_N=block, ROTATE=not inline, CLEAR=False),
                {"num_warps": 4},
            )  # fmt: skip
        shared.update(IS_CAUSAL=causal, INLINE=inline, PRECISION=precision, TMA=tma)
        head_bytes = 2 * head_dim * q.element_size()
        if batch * len_k:
            tile, heads = config.dkdv, batch * heads_kv
            self.q_source, self.do_source = (Source(x, tile.block_m, pad_d, tma) for x in (q_rot, do))
            section = heads_per_section(heads, 1, head_bytes * group_size * len_q, config.section_bytes)
            self.dkdv = Launch(
                dkdv_kernel,
                triton.cdiv(len_k, tile.block_n) * heads,
                (
                    q_rot.stride(), k_rot.stride(), v.stride(), do.stride(), dk_strides, dv_strides, *tables,
                    qk_scale, q_sign, heads, heads_kv, group_size, len_q, len_k, section,
                ),
                ordered(dkdv_kernel, shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n),
                {**tile.launch_options, **launch_options},
            )  # fmt: skip
        if batch * len_q:
            tile, heads = config.dq, batch * heads_q
            self.k_source, self.v_source = (Source(x, tile.block_n, pad_d, tma) for x in (k_rot, v))
            section = heads_per_section(heads, group_size, head_bytes * len_k, config.section_bytes)
            self.dq = Launch(
                dq_kernel,
                triton.cdiv(len_q, tile.block_m) * heads,
                (
                    q_rot.stride(), k_rot.stride(), v.stride(), do.stride(), dq_strides, *tables, qk_scale, q_sign,
                    softmax_scale, heads, heads_q, group_size, len_q, len_k, section,
                ),
                ordered(dq_kernel, shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n),
                {**tile.launch_options, **launch_options},
            )  # fmt: skip

    def _rotated(self, q, k):
        """Room for the rotated q and k; q and k themselves where they are rotated inline."""
        if self.inline:
            return q, k
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def __call__(self, do, q, k, v, o, lse, cos, sin):
        dq, dk, dv = (
            torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
            for x, strides in zip((q, k, v), self.strides)
        )
        stats = torch.empty((2, *q.shape[:3]), dtype=torch.float32, device=q.device)
        q_rot, k_rot = self._rotated(q, k)
        stream = device.current_stream(q.device)
        if self.preprocess is not None:
            self.preprocess(stream, o, do, lse, stats, stats, q, q_rot, k, k_rot, cos, sin)
        if self.dkdv is not None:
            self.dkdv(stream, self.q_source(q_rot), k_rot, v, self.do_source(do), stats, cos, sin, dk, dv)
        if self.dq is not None:
            self.dq(stream, q_rot, self.k_source(k_rot), self.v_source(v), do, stats, cos, sin, dq)
        return dq, dk, dv


def ordered(kernel, shared: dict, **own) -> dict:
    """Compile-time arguments in the kernel's order."""
    constants = {**shared, **own}
    return {name: constants[name] for name in kernel.arg_names if name in constants}


_prepared = PreparedCalls(BackwardCall)


def attention_backward(do, q, k, v, o, lse, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config):
    """Run the backward pass; arguments as in ``attention_forward``, ``config`` a ``configs.BackwardConfig``.

    do and o ``(B, HQ, NQ, D)``, lse ``(B, HQ, NQ)`` float32. Returns dq, dk, dv like q, k, v.
    Bitwise deterministic: every output element is summed by one program in a fixed order.
    """
    options = (causal, softmax_scale, rotary_dim, interleaved, dot_precision(q.dtype))
    return _prepared((do, q, k, v, o, cos, sin), options, config)(do, q, k, v, o, lse, cos, sin)
