"""Inputs, references, tolerances and poisoning: what the tests, the verification and the benchmark's gate share.

The tolerance is an error budget taken from eager PyTorch's own distance to float64, on the whole tensor and on every
row (one batch, head, position). The row rule is the one that sees rotary bugs: a table shifted by one in the last
rows, or one key dropped for them, passes any rule on the whole tensor.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_attn.attention import reference

__all__ = [
    "Case",
    "Comparison",
    "Inputs",
    "RandomRounding",
    "Results",
    "compare",
    "make_inputs",
    "masks_of",
    "noise_of_zero",
    "poison_empty",
    "run_op",
    "run_reference",
]

LAYOUTS = ("bnhd", "bhnd", "odd", "expanded")
TABLES = ("rope", "yarn", "random")

# Above this a score block of the reference is cut by rows: float64 and its gradient keep about eight such blocks alive.
_BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
# The float32 noise of what should be zero: two sums of one row's products, in another order, for inputs of order 1.
# Hopper's tensor cores cut off what falls below their sum: 3.4e-6 was seen at D 128 (H200).
_ZERO = 2.0**-17
# So many further draws of eager's error decide where a single one refuses.
DRAWS = 32
# torch.empty of more elements is left as it is: poisoning would make the pages of a sparse allocation real.
_POISON_LIMIT = 1 << 28


@dataclass(frozen=True)
class Case:
    """One problem: sizes, features, and how its tensors lie in memory. `head_dim` D, `rotary_dim` R (None: R = D)."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    causal: bool = True
    rotary_dim: int | None = None
    interleaved: bool = False
    dtype: torch.dtype = torch.float16
    softmax_scale: float | None = None
    tables: str = "rope"  # "yarn": interpolated and scaled, not unit-norm; "random": not a rotation at all
    table_dtype: torch.dtype = torch.float32
    table_batch: bool = False  # (B, S, W) tables, another angle in every batch
    full_width: bool = False  # every angle twice: width R instead of R/2
    layout: str = "bnhd"  # "bhnd": contiguous; "odd": unaligned, odd strides; "expanded": one batch, stride 0
    extra_rows: int = 0  # table rows beyond len_k
    seed: int = 0
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False  # random ones, and their gradient
    kv_starts: tuple[int, ...] | None = None  # one for each batch entry, like kv_lens
    kv_lens: tuple[int, ...] | None = None
    sinks_dtype: torch.dtype = torch.float32
    seqlens: tuple[tuple[int, int], ...] | None = None  # packed: (queries, keys) of each sequence; batch 1

    @property
    def rotary(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def name(self) -> str:
        """Sizes, then only what differs from the defaults: `B2 H4/2 N63x100 D64 causal fp16 R=16 interleaved`."""
        heads = f"{self.heads_q}/{self.heads_kv}" if self.heads_q != self.heads_kv else f"{self.heads_q}"
        length = f"{self.len_q}x{self.len_k}" if self.len_q != self.len_k else f"{self.len_q}"
        words = [f"B{self.batch} H{heads} N{length} D{self.head_dim}", "causal" if self.causal else "full"]
        words.append(_SHORT[self.dtype])
        if self.rotary_dim is not None:
            words.append(f"R={self.rotary_dim}")
        if self.interleaved:
            words.append("interleaved")
        if self.softmax_scale is not None:
            words.append(f"scale={self.softmax_scale:g}")
        if self.tables != "rope":
            words.append(self.tables)
        if self.table_dtype != torch.float32:
            words.append(f"{_SHORT[self.table_dtype]}-tables")
        if self.table_batch:
            words.append("per-batch")
        if self.full_width:
            words.append("full-width")
        if self.layout != "bnhd":
            words.append(self.layout)
        if self.extra_rows:
            words.append(f"S=NK+{self.extra_rows}")
        if self.window is not None:
            words.append(f"window={self.window[0]},{self.window[1]}")
        if self.softcap:
            words.append(f"softcap={self.softcap:g}")
        if self.sinks:
            words.append("sinks" if self.sinks_dtype == torch.float32 else f"{_SHORT[self.sinks_dtype]}-sinks")
        for name in ("kv_starts", "kv_lens"):
            if (bounds := getattr(self, name)) is not None:
                words.append(f"{name}={','.join(map(str, bounds))}")
        if self.seqlens is not None:
            words.append("packed=" + ",".join(f"{q}" if q == k else f"{q}x{k}" for q, k in self.seqlens))
        if self.seed:
            words.append(f"seed={self.seed}")
        return " ".join(words)


def masks_of(case: Case, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The masks of a case as keyword arguments of ``rope_attention``; sinks (HQ,), where it has some."""
    device = torch.device(device)

    def bounds(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    sinks = None
    if case.sinks:
        # Always as many, and on the CPU: a case of the first heads alone has the same sinks.
        generator = torch.Generator().manual_seed(case.seed + 1)
        sinks = torch.randn(256, generator=generator)[: case.heads_q].to(device, case.sinks_dtype)
    return {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": sinks,
        "kv_starts": bounds(case.kv_starts),
        "kv_lens": bounds(case.kv_lens),
    }


_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class Inputs(NamedTuple):
    """q and do (B, HQ, NQ, D); k and v (B, HKV, NK, D); cos and sin in the form that the case asks for."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    do: Tensor


class _Results(NamedTuple):
    o: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Results(_Results):
    """Outputs and gradients; the gradients are None where they were not asked for, that of the sinks without sinks."""

    dsinks: Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """One tensor against float64. The errors are maxima over it; `detail` says what failed and where.

    `ratio` is error over eager_error and fails above 2 (3 for gradients), `row_ratio` the same for the rms error of the
    worst row and fails above 2.5; eps is part of both, as a share of the limit.
    """

    tensor: str
    error: float
    eager_error: float
    ratio: float
    row_ratio: float
    ok: bool
    detail: str


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Normally distributed q, k, v and do with the case's strides, and its tables; equal for equal seed and device."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(case.seed)
    shape_q = (case.batch, case.heads_q, case.len_q, case.head_dim)
    shape_k = (case.batch, case.heads_kv, case.len_k, case.head_dim)
    q, k, v, do = (_random(shape, case.dtype, case.layout, generator) for shape in (shape_q, shape_k, shape_k, shape_q))
    cos, sin = _tables(case, generator)
    return Inputs(q, k, v, cos, sin, do)


def _random(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, generator: torch.Generator) -> Tensor:
    b, h, n, d = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)

    if layout == "bnhd":
        return normal(b, n, h, d).transpose(1, 2)
    if layout == "bhnd":
        return normal(b, h, n, d)
    if layout == "odd":
        # One element in, so that no row is 16-byte aligned, and 3 (5) more columns (heads), so that no stride is even.
        return normal(b, n, h + 5, d + 3)[:, :, 2 : h + 2, 1 : d + 1].transpose(1, 2)
    if layout == "expanded":
        return normal(1, h, n, d).expand(b, h, n, d)
    raise ValueError(f"layout must be one of {LAYOUTS}, but is {layout!r}")


def _tables(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, half = case.len_k + case.extra_rows, case.rotary // 2
    batch = case.batch if case.table_batch else 1
    device = generator.device
    if case.tables == "random":
        # Any angle, radius 0.5 .. 1.5. Longer tails would only make every softmax a choice of one key.
        uniform = torch.rand((2, batch, rows, half), generator=generator, device=device)
        angle, radius = 2 * math.pi * uniform[0], 0.5 + uniform[1]
        cos, sin = radius * angle.cos(), radius * angle.sin()
    elif case.tables in ("rope", "yarn"):
        # Angles in float64: at position 128K a float32 product is 4e-3 off, and the tables are not under test here.
        frequency = 10000.0 ** -(torch.arange(half, device=device, dtype=torch.float64) / max(half, 1))
        scale = 1.0
        if case.tables == "yarn":
            factor = (
                4.0  # context extension: interpolate the lower half of the frequencies, and scale (2309.00071, 3.4)
            )
            scale = 0.1 * math.log(factor) + 1.0
            frequency = torch.where(torch.arange(half, device=device) >= half // 2, frequency / factor, frequency)
        start = 7.0 * torch.arange(batch, device=device, dtype=torch.float64)
        position = start[:, None] + torch.arange(rows, device=device, dtype=torch.float64)
        angle = position[..., None] * frequency
        cos, sin = scale * angle.cos(), scale * angle.sin()
    else:
        raise ValueError(f"tables must be one of {TABLES}, but is {case.tables!r}")

    def finish(table: Tensor) -> Tensor:
        table = table.to(case.table_dtype)
        if case.full_width:
            table = table.repeat_interleave(2, dim=-1) if case.interleaved else torch.cat((table, table), dim=-1)
        return table if case.table_batch else table[0]

    return finish(cos), finish(sin)


def run_reference(inputs: Inputs, case: Case, dtype: torch.dtype | None = None) -> Results:
    """The reference's outputs and gradients: `ref64` with dtype=torch.float64, `eager` with None (the inputs' dtype).

    Inputs and tables are taken as given and cast, so that a low-precision table is nobody's error. Goes through
    batches, groups of heads and, where one head's scores are too large, blocks of rows; partial gradients are summed in
    at least float32 and rounded once.
    """
    dtype = case.dtype if dtype is None else dtype
    if case.seqlens is not None:
        return _reference_packed(inputs, case, case.seqlens, dtype)
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    wide = dtype == torch.float64
    cos, sin = reference.normalise_tables(inputs.cos, inputs.sin, case.rotary, case.interleaved)
    if wide:
        cos, sin = cos.double(), sin.double()

    lse_dtype = torch.float64 if wide else torch.float32
    o, dq = (torch.zeros(q.shape, dtype=dtype, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(k.shape, dtype=dtype, device=q.device) for _ in range(2))
    lse = torch.zeros(q.shape[:3], dtype=lse_dtype, device=q.device)
    masks = masks_of(case, q.device)
    dsinks = torch.zeros(case.heads_q, dtype=lse_dtype, device=q.device)

    group = case.heads_q // case.heads_kv
    head_bytes = max(1, group * case.len_q * case.len_k * (8 if wide else 4))
    limit = _BLOCK_BYTES.get(q.device.type, _BLOCK_BYTES["cpu"])
    step = max(1, limit // head_bytes)  # key-value heads at once
    rows = max(1, case.len_q if step > 1 else min(case.len_q, limit * case.len_q // head_bytes))
    for b in range(case.batch):
        table = slice(b, b + 1) if cos.shape[0] > 1 else slice(0, 1)
        for first in range(0, case.heads_kv, step):
            kv = (slice(b, b + 1), slice(first, first + step))
            qs = (slice(b, b + 1), slice(first * group, (first + step) * group))
            q_block, k_block, v_block, do_block = (x.detach().to(dtype) for x in (q[qs], k[kv], v[kv], do[qs]))
            part = {name: x if x is None else x[b : b + 1] for name, x in masks.items() if name.startswith("kv_")}
            if case.sinks:
                part["sinks"] = masks["sinks"][qs[1]].to(lse_dtype)
            o[qs], lse[qs], dq[qs], dk[kv], dv[kv], dsinks_part = _reference_heads(
                q_block, k_block, v_block, do_block, cos[table], sin[table], case, rows, **part
            )
            if dsinks_part is not None:
                dsinks[qs[1]] += dsinks_part
    results = Results(o, lse, dq, dk, dv)
    results.dsinks = dsinks if case.sinks else None
    return results


def _reference_packed(inputs: Inputs, case: Case, seqlens: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Results:
    """Each sequence by itself: no mask of packed sequences is involved. Rows behind the last one see nothing."""
    q, k = inputs.q, inputs.k
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    o, dq = (torch.zeros(q.shape, dtype=dtype, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(k.shape, dtype=dtype, device=q.device) for _ in range(2))
    lse = torch.full(q.shape[:3], -math.inf, dtype=lse_dtype, device=q.device)
    dsinks = torch.zeros(case.heads_q, dtype=lse_dtype, device=q.device)
    first_q = first_k = 0
    for len_q, len_k in seqlens:
        if len_q == len_k == 0:  # there may be thousands
            continue
        # Lengths on the device: queries before position 0 see nothing, causal or not.
        one = replace(case, seqlens=None, len_q=len_q, len_k=len_k, kv_lens=(len_k,))
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        some_q, some_k = (x[:, :, rows_q] for x in (q, inputs.do)), (x[:, :, rows_k] for x in (k, inputs.v))
        (q_part, do_part), (k_part, v_part) = some_q, some_k
        part = run_reference(Inputs(q_part, k_part, v_part, inputs.cos, inputs.sin, do_part), one, dtype)
        for whole, x, rows in zip((o, lse, dq, dk, dv), part, (rows_q, rows_q, rows_q, rows_k, rows_k)):
            whole[:, :, rows] = cast(Tensor, x)
        if part.dsinks is not None:
            dsinks += part.dsinks
        first_q, first_k = first_q + len_q, first_k + len_k
    results = Results(o, lse, dq, dk, dv)
    results.dsinks = dsinks if case.sinks else None
    return results


def _reference_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    cos: Tensor,
    sin: Tensor,
    case: Case,
    rows: int,
    sinks: Tensor | None = None,
    **bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`reference.attention` and its gradients for a few heads, `rows` queries at a time."""
    with torch.enable_grad():
        q, k = q.requires_grad_(), k.requires_grad_()
        position, low, high = reference.visible_range(
            case.len_q, case.len_k, case.causal, window=case.window, device=q.device, **bounds
        )
        absent = reference.absent_keys(case.len_k, position, window=case.window, **bounds)
        if absent is not None:
            k, v = (x.detach().masked_fill(absent[:, None, :, None], 0).requires_grad_() for x in (k, v))
        q_rot = reference.rotate(q, *reference.query_rows(cos, sin, position), interleaved=case.interleaved)
        k_rot = reference.rotate(
            k, cos[:, None, : case.len_k], sin[:, None, : case.len_k], interleaved=case.interleaved
        )
        # Cut the graph at the rotated tensors: blocks of rows add up there, and the rotation is undone once.
        leaves = [x.detach().requires_grad_() for x in (q_rot, k_rot, v)]
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        dsinks = None
        if sinks is not None:
            leaves.append(sinks.detach().requires_grad_())
            dsinks = torch.zeros_like(sinks)
        o, dq_rot = torch.zeros_like(q, requires_grad=False), torch.zeros_like(q, requires_grad=False)
        lse = torch.zeros(q.shape[:3], device=q.device, dtype=sum_dtype)
        dk_rot, dv = (torch.zeros(k.shape, dtype=sum_dtype, device=k.device) for _ in range(2))
        for start in range(0, case.len_q, rows):
            part = slice(start, start + rows)
            o_part, lse_part = reference.attend(
                leaves[0][:, :, part], leaves[1], leaves[2], low[:, part], high[:, part], softmax_scale=case.scale,
                softcap=case.softcap, sinks=leaves[3] if sinks is not None else None,
            )  # fmt: skip
            dq_part, dk_part, dv_part, *sinks_part = torch.autograd.grad(o_part, leaves, do[:, :, part])
            if dsinks is not None:
                dsinks += sinks_part[0]
            o[:, :, part], lse[:, :, part] = o_part.detach(), lse_part
            dq_rot += dq_part
            dk_rot += dk_part
            dv += dv_part
        dq, dk = torch.autograd.grad((q_rot, k_rot), (q, k), (dq_rot, dk_rot.to(k.dtype)))
    return o, lse, dq, dk, dv, dsinks


def run_op(
    inputs: Inputs,
    case: Case,
    *,
    backend: str,
    strategy: str = "auto",
    deterministic: bool = False,
    grads: bool = True,
) -> Results:
    """`fused_rope_attn.rope_attention` on the inputs as they lie in memory, with gradients unless `grads` is False."""
    import fused_rope_attn  # here, so that inputs and references need the reference only

    q, k, v = (x.detach().requires_grad_(grads) for x in (inputs.q, inputs.k, inputs.v))
    masks = masks_of(case, q.device)
    if case.sinks:
        masks["sinks"].requires_grad_(grads)
    options: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "rotary_dim": case.rotary_dim,
        "interleaved": case.interleaved,
        "return_lse": True,
        "deterministic": deterministic,
        "backend": backend,
        "strategy": strategy,
        **masks,
    }
    if case.seqlens is None:
        with warnings.catch_warnings():
            # A case that has more queries than keys has them on purpose.
            warnings.filterwarnings("ignore", "q .* positions and k", UserWarning)
            o, lse = fused_rope_attn.rope_attention(q, k, v, inputs.cos, inputs.sin, case.causal, **options)
    else:
        q_packed, k_packed, v_packed = (x[0].transpose(0, 1) for x in (q, k, v))
        lengths = torch.tensor(case.seqlens, dtype=torch.int32).reshape(-1, 2)
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(q.device)
        max_seqlen_q, max_seqlen_k = (max((n[i] for n in case.seqlens), default=0) for i in range(2))
        del options["kv_starts"], options["kv_lens"]
        o, lse = fused_rope_attn.rope_attention_varlen(
            q_packed, k_packed, v_packed, inputs.cos, inputs.sin, ends[:, 0].contiguous(), ends[:, 1].contiguous(),
            max_seqlen_q, max_seqlen_k, case.causal, **options,
        )  # fmt: skip
        o, lse = o.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    if not grads:
        return Results(o, lse)
    wanted = (q, k, v, masks["sinks"]) if case.sinks else (q, k, v)
    dq, dk, dv, *dsinks = torch.autograd.grad(o, wanted, inputs.do)
    results = Results(o.detach(), lse.detach(), dq, dk, dv)
    results.dsinks = dsinks[0] if dsinks else None
    return results


def compare(
    name: str,
    out: Tensor,
    ref64: Tensor,
    eager: Tensor,
    *,
    grad: bool,
    dtype: torch.dtype,
    draws: Callable[[], Iterable[Tensor]] | None = None,
    zero: float = 1.0,
) -> Comparison:
    """Hold `out` against the contract's tolerance. `name` "lse" gets lse's rule, anything else the rules on rows.

    `ref64` float64, `eager` in the input dtype `dtype`, all of one shape (..., N, D), or (...) for lse. What is not
    finite never passes, except an infinity of lse that float64 has too.

    The row rule is `rms(out - ref64) <= 2.5 * rms(eager - ref64) + eps`. A row of eager is one draw, and may be exact
    by luck (a single visible key; two roundings that cancel), which no other correct program repeats. So eps is the
    unit roundoff of the row, plus eager's rms error around that position (all batches and heads, 16 positions either
    side, those that are zero left out) 2.5 times, 5 times for gradients: delta = rowsum(o * do) from the rounded o
    costs rows with few keys more than eager pays. It stays local, so that late rows of dk, far smaller than the early
    ones, are held to their own size.

    What is zero in exact arithmetic may be float32 noise: 2^-17 for inputs of order 1 and D up to 128, `zero` times as
    much where the caller knows of more (`noise_of_zero`).

    `draws` are for runs over so many rows that chance alone breaks a rule that has one draw on either side. What the
    rule refuses is then held against the largest error that `DRAWS` eager results have in its place, each rounded at
    random (`RandomRounding`), which `draws` computes. Where a row's error comes from one rounding, as with a single
    visible key and a sink (`ds` is one number, and `dq` a multiple of one row of K), both sides of the rule are like
    the absolute value of one normal variable, and one call in some thousands has a row whose eager error is lucky. The
    largest of 32 such values is about 2.5 standard deviations, so that the limit, 2.5 times that, is beyond 6 of them:
    one row in 10^9. Where a row's error is the sum of many roundings, which is where a wrong angle and a lost key
    show, all draws are nearly equal, and their largest is hardly above a single one: there the rule stays what it is.
    """
    if out.shape != ref64.shape or eager.shape != ref64.shape:
        raise ValueError(
            f"{name} and eager must have the reference's shape {tuple(ref64.shape)}, but have {tuple(out.shape)} and "
            f"{tuple(eager.shape)}"
        )
    if ref64.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0, 0.0, True, "empty")
    if name == "lse":
        return _compare_lse(name, out, ref64, eager, draws)

    eager_error, eager_row = _eager_errors(eager, ref64)
    difference = out.double() - ref64
    slack = _slack(ref64, eager_row, grad=grad, dtype=dtype, zero=zero)
    found = _judge(name, difference, eager_error, eager_row, *slack, grad=grad)
    if found.ok or draws is None or not bool(torch.isfinite(difference).all()):
        return found
    for draw in draws():
        error, row = _eager_errors(draw, ref64)
        eager_error = max(eager_error, error / RandomRounding.EXCESS)
        eager_row = torch.maximum(eager_row, row / RandomRounding.EXCESS)
    return _judge(name, difference, eager_error, eager_row, *slack, grad=grad)


def _eager_errors(eager: Tensor, ref64: Tensor) -> tuple[float, Tensor]:
    """Eager's largest error, and the rms error of each of its rows (...)."""
    # Where eager itself overflowed (float16 logits) it has no error to allow: only eps is left.
    difference = torch.nan_to_num(eager.double() - ref64, nan=0.0, posinf=0.0, neginf=0.0)
    return float(difference.abs().max()), _rms(difference)


def _judge(
    name: str, difference: Tensor, eager_error: float, eager_row: Tensor, eps: float, eps_row: Tensor, *, grad: bool
) -> Comparison:
    """The rules on the whole tensor and on its rows."""
    error, row_error = float(difference.abs().max()), _rms(difference)
    factor = 3.0 if grad else 2.0
    allowed, allowed_row = factor * eager_error + eps, 2.5 * eager_row + eps_row
    excess = torch.nan_to_num(row_error / allowed_row.clamp(min=1e-300), nan=math.inf)
    worst = int(excess.argmax())
    worst_excess = float(excess.flatten()[worst])

    detail = []
    if not bool(torch.isfinite(difference).all()):
        where = tuple(int(i) for i in torch.nonzero(~torch.isfinite(difference))[0])
        detail.append(f"not finite, first at {where}")
    else:
        if error > allowed:
            detail.append(f"max error {error:.3g} > {allowed:.3g}")
        if worst_excess > 1.0:
            detail.append(
                f"{int((excess > 1.0).sum())} of {excess.numel()} rows too far off, worst "
                f"{_unravel(worst, excess.shape)}: rms error {float(row_error.flatten()[worst]):.3g} > "
                f"{float(allowed_row.flatten()[worst]):.3g}, eager's {float(eager_row.flatten()[worst]):.3g}"
            )
    ratio = factor * error / max(allowed, 1e-300)
    return Comparison(name, error, eager_error, ratio, 2.5 * worst_excess, not detail, "; ".join(detail))


def noise_of_zero(name: str, case: Case, inputs: Inputs) -> float:
    """How much more float32 noise a tensor of a case has where exact arithmetic gives zero: `zero` of `compare`.

    The noise is that of two sums over D products, and the tensor cores cut off a little at every step, so that it grows
    with D. dk and dv add it up over the heads of a group, with random signs; dq and dk carry it through rotated vectors
    and back through the rotation, which lengthens them twice where a table is not of unit norm, and are multiples of
    the softmax scale, which is D ** -0.5 by default.
    """
    factor = max(1.0, case.head_dim / 128)
    if name in ("dk", "dv"):
        factor *= (case.heads_q / case.heads_kv) ** 0.5
    if name in ("dq", "dk") and inputs.cos.numel():
        norms = inputs.cos.float().square() + inputs.sin.float().square()
        factor *= max(1.0, float(norms.mean()))
        if case.softmax_scale is not None:
            factor *= max(1.0, abs(case.softmax_scale) * case.head_dim**0.5)
    return factor


def _slack(ref64: Tensor, eager_row: Tensor, *, grad: bool, dtype: torch.dtype, zero: float) -> tuple[float, Tensor]:
    """The eps of the whole-tensor rule, and that of every row (...)."""
    rms, unit = float(ref64.square().mean().sqrt()), torch.finfo(dtype).eps / 2
    mean = eager_row.square().reshape(-1, eager_row.shape[-1]).mean(dim=0)
    reach = min(16, mean.numel() - 1)
    # Positions that are zero throughout, such as queries that see nothing, say nothing about their neighbours.
    alive = (ref64 != 0).any(-1).reshape(-1, mean.numel()).any(0).to(mean.dtype)
    sums = torch.stack((mean * alive, alive))
    sums = F.avg_pool1d(sums, 2 * reach + 1, stride=1, padding=reach, count_include_pad=False)
    around = (sums[0] / sums[1].clamp(min=1e-300)).sqrt()
    eps_row = unit * _rms(ref64) + (5.0 if grad else 2.5) * around
    # The last term is for what is zero in exact arithmetic: with one key ds = p * (dp - delta), where dp = delta.
    noise = zero * _ZERO
    eps = max((1e-5 if dtype in (torch.float32, torch.float64) else unit) * rms, noise)
    return eps, eps_row + (eps if dtype in (torch.float32, torch.float64) else noise)


def _compare_lse(
    name: str, out: Tensor, ref64: Tensor, eager: Tensor, draws: Callable[[], Iterable[Tensor]] | None
) -> Comparison:
    infinite = torch.isinf(ref64)
    same = bool((out.double()[infinite] == ref64[infinite]).all())
    zero = torch.zeros_like(ref64)
    difference = torch.where(infinite, zero, out.double() - ref64).abs()

    def eager_error_of(eager: Tensor) -> float:
        error = torch.where(infinite, zero, eager.double() - ref64).abs()
        return float(torch.nan_to_num(error, nan=0.0, posinf=0.0).max())

    eager_error = eager_error_of(eager)
    if draws is not None and not float(difference.max()) <= 2.0 * eager_error + 1e-5:
        eager_error = max(eager_error, *(eager_error_of(draw) / RandomRounding.EXCESS for draw in draws()))
    allowed = 2.0 * eager_error + 1e-5 * (1.0 + torch.where(infinite, zero, ref64).abs())
    excess = torch.nan_to_num(difference / allowed, nan=math.inf)
    worst = int(excess.argmax())
    error = float(difference.max())
    detail = [] if same else ["infinities differ from float64's"]
    if not float(excess.max()) <= 1.0:
        detail.append(f"error {error:.3g}, eager's {eager_error:.3g}, worst {_unravel(worst, ref64.shape)}")
    ratio = 2.0 * float(excess.max())
    return Comparison(name, error, eager_error, ratio, ratio, not detail, "; ".join(detail))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1).sqrt()


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    where = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        where.append(remainder)
    return tuple(reversed(where))


class RandomRounding(TorchDispatchMode):
    """Inside, eager PyTorch rounds the results of matrix products, and what it casts, up or down at random.

    That is Monte Carlo arithmetic (Parker 1997): each run is another draw of what rounding does to the same
    computation. A number goes to one of its two neighbours in the result's dtype, with the probability that keeps the
    mean (stochastic rounding), and one that needs no rounding stays. Products of float32 are taken in float64 first,
    those of 16 bits in float32. Gradients that are computed inside are rounded so too.

    The backward pass of a softmax subtracts ``delta = rowsum(dp * p)``, which FlashAttention-2 computes as
    ``rowsum(do * o)``, from the rounded o. That is as right, and its error is not smaller where dp happens to be: a
    draw takes it too. The mode knows ``p v`` for the product that follows a softmax, and do for the left factor of the
    next product with o's shape, which is the order in which autograd goes.

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
        self._error_of_o: Tensor | None = None  # of the last product with probabilities
        self._error_of_delta: Tensor | None = None

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
        result = func(*args, **kwargs)
        if func is aten._softmax.default:
            self._softmax_was_last = True
        elif func is aten._softmax_backward_data.default and self._error_of_delta is not None:
            probabilities = args[1]
            result = result - probabilities * self._error_of_delta.reshape(probabilities.shape[:-1]).unsqueeze(-1)
            self._error_of_delta = None
        return result

    def _product(self, func: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        exact = func(*(x.to(torch.float64 if x.dtype == torch.float32 else torch.float32) for x in (left, right)))
        rounded = self._round(exact, left.dtype)
        if self._softmax_was_last:
            self._softmax_was_last = False
            self._error_of_o = rounded.to(exact.dtype) - exact
        elif self._error_of_o is not None and self._error_of_o.shape == left.shape:
            self._error_of_delta = (self._error_of_o * left).sum(-1).float()
            self._error_of_o = None
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


# Bits of the significand, and the exponent of the smallest normal number.
_PRECISION = {torch.float16: (11, -14), torch.bfloat16: (8, -126), torch.float32: (24, -126)}


@contextmanager
def poison_empty() -> Iterator[None]:
    """Inside, `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return NaN where they return floats,
    so that an output element which nothing wrote shows. Allocations beyond 2^28 elements are left alone."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.numel() <= _POISON_LIMIT:
                with torch.no_grad():
                    x.fill_(math.nan)
            return x

        return allocate_nan

    targets = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in targets]
    try:
        for (owner, name), original in zip(targets, originals):
            setattr(owner, name, poisoned(original))
        yield
    finally:
        for (owner, name), original in zip(targets, originals):
            setattr(owner, name, original)
