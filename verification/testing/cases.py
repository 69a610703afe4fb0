"""Problems, and random inputs for them in memory layouts of every kind."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fused_rope_attn import masks
from verification.memory import lay

LAYOUTS = ("bnhd", "bhnd", "odd", "one batch")
TABLES = ("rope", "yarn", "random", "none")
# Masks by intervals of query rows. Those up to ``blocks`` have as many queries as keys.
INTERVALS = ("documents", "tree", "prefix", "chunks", "blocks", "random", "shared", "starts", "ends")


@dataclass(frozen=True)
class Case:
    """One problem: sizes, features, and its tensors' memory layout. `head_dim` D, `rotary_dim` R (None: R = D)."""

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
    # "yarn": interpolated and scaled, not unit-norm; "random": not a rotation at all; "none": cos and sin are None
    tables: str = "rope"
    table_dtype: torch.dtype = torch.float32
    table_batch: bool = False  # (B, S, W) tables, another angle in every batch
    full_width: bool = False  # every angle twice: width R instead of R/2
    layout: str = "bnhd"  # of q, k, v and do, one of ``memory.lay``
    extra_rows: int = 0  # table rows beyond len_k
    seed: int = 0
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False  # random ones, and their gradient
    kv_starts: tuple[int, ...] | None = None  # one for each batch entry, like kv_lens
    kv_lens: tuple[int, ...] | None = None
    sinks_dtype: torch.dtype = torch.float32
    norms: float | None = None  # norm_offset of a norm over the heads of q and k; None: no norm
    norm_eps: float = 1e-6
    norm_dtype: torch.dtype = torch.float32
    seqlens: tuple[tuple[int, int], ...] | None = None  # packed: (queries, keys) of each sequence; batch 1
    token_tables: bool = False  # packed: row t of the tables belongs to token t
    lse_gradient: bool = False  # lse has a gradient, too
    intervals: str | Callable[[int], Sequence[Tensor]] | None = None  # one of INTERVALS, or a function of NK to them

    @property
    def rotary(self) -> int:
        if self.tables == "none":
            return 0
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_dim(self) -> int:
        """The number of columns that a score sums up."""
        return self.head_dim

    @property
    def scale(self) -> float:
        return self.score_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def name(self) -> str:
        """Sizes and dtype, then only what differs from the defaults: `B2 H4/2 N63x100 D64 fp16 causal=False`."""
        return f"{described(self)} {_SHORT[self.dtype]}"


@dataclass(frozen=True)
class LatentCase(Case):
    """One problem: head_dim is R, nope and value are DN and DV. heads_kv is heads_q, that of k_nope and of v."""

    nope: int = 32
    value: int = 32

    @property
    def score_dim(self) -> int:
        return self.nope + self.head_dim


def described(case: Case) -> str:
    """Name a case, or a call that has more fields, without its dtype."""
    heads = f"{case.heads_q}/{case.heads_kv}" if case.heads_q != case.heads_kv else f"{case.heads_q}"
    length = f"{case.len_q}x{case.len_k}" if case.len_q != case.len_k else f"{case.len_q}"
    kind = type(case).__name__.removesuffix("Check").removesuffix("Case").removeprefix("Attention").lower()
    words = [kind, f"B{case.batch} H{heads} N{length} D{case.head_dim}"]
    for field in fields(case)[6:]:
        value = getattr(case, field.name)
        if value != field.default and field.name not in ("dtype", "title", "size", "only", "variants"):
            words.append(f"{field.name}={value}".replace("torch.", "").replace(" ", "").removesuffix("=True"))
    return " ".join(words).strip()


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
    starts, ends = intervals_of(case)
    return {
        "query_starts": None if starts is None else starts.to(device),
        "query_ends": None if ends is None else ends.to(device),
        "window": case.window,
        "softcap": case.softcap,
        "sinks": sinks,
        "kv_starts": bounds(case.kv_starts),
        "kv_lens": bounds(case.kv_lens),
    }


def bounds_of(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Return ``kv_starts`` and ``kv_lens`` by name, or the ends of packed sequences."""
    bounds = {name: x for name, x in masks_of(case, device).items() if name.startswith("kv_")}
    return bounds if case.seqlens is None else ends_of(case, device)


def ends_of(case: Case, device: torch.device | str) -> dict[str, Tensor]:
    """Return cu_seqlens_q and cu_seqlens_k of a packed case."""
    ends = torch.tensor(((0, 0), *(case.seqlens or ())), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return {f"cu_seqlens_{name}": ends[:, i].contiguous() for i, name in enumerate("qk")}


def intervals_of(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """The intervals of a case, (1|B, NK) int32 on the CPU, as ``rope_attention`` takes them."""
    if case.intervals is None:
        return None, None
    if callable(case.intervals):
        starts, ends, *_ = case.intervals(case.len_k)
        return starts, ends
    generator = torch.Generator().manual_seed(case.seed + 3)
    rows, keys = case.len_q, case.len_k

    def below(limit: int, *size: int) -> Tensor:
        return torch.randint(0, max(1, limit), size, generator=generator, dtype=torch.int32)

    cuts = torch.cat((torch.zeros(1, dtype=torch.int32), below(keys + 1, 3).sort().values)).int()
    if case.intervals == "documents":
        return masks.documents(cuts, keys)
    if case.intervals == "chunks":
        return masks.chunks(1 + keys // 3, keys)
    if case.intervals == "tree":
        lengths = torch.cat((cuts, torch.tensor([keys], dtype=torch.int32))).diff()
        return masks.prefix_tree([-1, 0, 1, 0], lengths)[:2]
    if case.intervals == "prefix":
        return masks.prefix_lm(below(keys, case.batch), keys)
    if case.intervals == "blocks":
        ids = torch.arange(keys) // (1 + keys // 5)
        return masks.bidirectional_blocks(torch.where(ids % 2 == 0, ids, -1).expand(case.batch, -1))
    # Bounds beyond the rows, empty intervals, and long runs of equal ones, which make blocks that need no comparison.
    batch = 1 if case.intervals == "shared" else case.batch
    first, size = below(rows + 20, batch, keys) - 20, below(rows + 20, batch, keys) - 5
    run = torch.arange(keys) // (1 + keys // 4)
    is_run = (torch.arange(keys) % (1 + keys // 2) > keys // 8).expand(batch, -1)
    starts = torch.where(is_run, (first[:, :1] + 0 * run).clamp(max=rows // 3), first).int().contiguous()
    ends = torch.where(is_run, rows - rows // 4 + run, first + size).int().contiguous()
    return {"starts": (starts, None), "ends": (None, ends)}.get(case.intervals, (starts, ends))


def norms_of(case: Case, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The norms of a case as keyword arguments of ``rope_attention``; weights (D,) around 1, offset included."""
    if case.norms is None:
        return {}
    # On the CPU, as for sinks.
    generator = torch.Generator().manual_seed(case.seed + 2)
    drawn = torch.randn((2, max(256, case.head_dim)), generator=generator)[:, : case.head_dim]
    weights = 1.0 + 0.25 * drawn - case.norms
    q_norm, k_norm = weights.to(device, case.norm_dtype).unbind(0)
    return {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": case.norm_eps, "norm_offset": case.norms}


_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Any
    sin: Any
    do: Tensor


class Inputs(_Inputs):
    """q and do (B, HQ, NQ, D); k and v (B, HKV, NK, D); cos and sin in the form that the case asks for. The gradient of
    lse, ``dlse`` (B, HQ, NQ) float32, is no element, because few cases have one."""

    dlse: Tensor | None = None

    def with_dlse(self, dlse: Tensor | None) -> "Inputs":
        """Set the gradient of lse, and return self."""
        self.dlse = dlse
        return self


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Normally distributed tensors with the case's strides, and its tables; equal for equal seed and device."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(case.seed)
    shape_q = (case.batch, case.heads_q, case.len_q, case.head_dim)
    shape_k = (case.batch, case.heads_kv, case.len_k, case.head_dim)
    q, k, v, do = (_random(shape, case.dtype, case.layout, generator) for shape in (shape_q, shape_k, shape_k, shape_q))
    cos, sin = _tables(case, generator)
    dlse = torch.randn(shape_q[:3], generator=generator, device=device) if case.lse_gradient else None
    return Inputs(q, k, v, cos, sin, do).with_dlse(dlse)


def _random(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, generator: torch.Generator) -> Tensor:
    b, h, n, d = shape
    drawn = shape if layout == "bhnd" else (b, n, h, d)
    x = torch.randn(drawn, generator=generator, device=generator.device, dtype=dtype)
    return lay(x if layout == "bhnd" else x.transpose(1, 2), layout)


def _tables(case: Case, generator: torch.Generator) -> tuple[Any, Any]:
    if case.tables == "none":
        return None, None
    rows, half = case.len_k + case.extra_rows, case.rotary // 2
    batch = case.batch if case.table_batch else 1
    device, radius = generator.device, cast(Any, 1.0)
    if case.tables == "random":
        # Any angle, radius 0.5 .. 1.5. Longer tails would only make every softmax a choice of one key.
        uniform = torch.rand((2, batch, rows, half), generator=generator, device=device)
        angle, radius = 2 * math.pi * uniform[0], 0.5 + uniform[1]
    else:
        # Angles in float64: at position 128K a float32 product is 4e-3 off, and the tables are not under test here.
        frequency = 10000.0 ** -(torch.arange(half, device=device, dtype=torch.float64) / max(half, 1))
        if case.tables == "yarn":  # context extension by 4: lower frequencies, and a scale (2309.00071, 3.4)
            frequency[half // 2 :] /= 4.0
            radius = 0.1 * math.log(4.0) + 1.0
        start = 7.0 * torch.arange(batch, device=device, dtype=torch.float64)
        position = start[:, None] + torch.arange(rows, device=device, dtype=torch.float64)
        angle = position[..., None] * frequency

    def finish(table: Tensor) -> Tensor:
        table = table.to(case.table_dtype)
        if case.full_width:
            table = table.repeat_interleave(2, dim=-1) if case.interleaved else torch.cat((table, table), dim=-1)
        return table if case.table_batch else table[0]

    return finish(radius * angle.cos()), finish(radius * angle.sin())


class LatentInputs(NamedTuple):
    """The tensors of a case, (B, H, N, columns), its tables, and the gradients of o and of lse."""

    q_nope: Tensor
    q_rope: Tensor
    k_nope: Tensor
    k_rope: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    do: Tensor
    dlse: Tensor | None


ROWS = LatentInputs._fields[:5]


def make_latent_inputs(case: LatentCase, device: torch.device | str = "cpu") -> LatentInputs:
    """Return normally distributed views, as a model's projections give them, and the tables of the case.

    q_nope and q_rope are views of one tensor, k_nope and v of another, and k_rope of a third.
    """
    generator = torch.Generator(device).manual_seed(case.seed + 3)
    others = make_inputs(replace(case, heads_kv=1, layout="bhnd"), device)

    def normal(length: int, heads: int, *columns: int) -> tuple[Tensor, ...]:
        shape = (case.batch, length, heads, sum(columns))
        x = torch.randn(shape, generator=generator, device=generator.device, dtype=case.dtype)
        return x.transpose(1, 2).split(columns, -1)

    q_nope, q_rope = normal(case.len_q, case.heads_q, case.nope, case.head_dim)
    k_nope, v = normal(case.len_k, case.heads_q, case.nope, case.value)
    _, k_rope = normal(case.len_k, 1, 64, case.head_dim)
    (do,) = normal(case.len_q, case.heads_q, case.value)
    return LatentInputs(q_nope, q_rope, k_nope, k_rope, v, others.cos, others.sin, do, others.dlse)
