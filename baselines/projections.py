"""QuACK's projection to queries, keys and values: the epilogue of its GEMM norms and rotates them.

The epilogue rotates neighbouring columns. Weights have the two halves of a head one after the other, so that their rows
are reordered once (``neighbours``). It computes angles from positions and frequencies. Columns of v have the
frequency 0 and no norm, so that one GEMM makes all three.

QuACK has no backward of this epilogue. Here one compiled function rotates the gradients back and takes them through
the norm, and writes them into one tensor, as every fused projection must; cuBLAS multiplies. The norm's backward
computes its input from the output, which attention keeps anyway: the epilogue saves one float32 a head and token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from baselines.base import Package
from baselines.rotations import specialised

QUACK = Package("quack-kernels", "quack.epilogue.rotary", "rope_posfreq_epi")
# Rows, columns, cluster and ping-pong of the tiles that are tried: QuACK's tuner tries 18, which takes minutes. With
# norms those of whole heads can run.
_TILES = (
    (192, 128, (1, 2), True),
    (128, 192, (2, 1), True),
    (128, 256, (2, 1), False),
    (256, 192, (2, 1), False),
    (256, 128, (2, 1), False),
    (128, 128, (1, 2), True),
)


@functools.cache
def _configs() -> list[Any]:
    from quack.gemm_config import GemmConfig

    return [
        GemmConfig(rows, columns, pingpong=pingpong, is_dynamic_persistent=False, cluster_m=m, cluster_n=n)
        for rows, columns, (m, n), pingpong in _TILES
    ]


@functools.cache
def _epilogue(eps: float | None) -> Any:
    """Return QuACK's epilogue that rotates, or with ``eps`` its composition with a norm of each head."""
    if eps is None:
        return QUACK.load()
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.head_rmsnorm import HeadRstd
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import ColVecLoad, RowVecLoad
    from quack.epilogue.rotary import _angle_turns, _sincos_turns

    rstd = HeadRstd("rstd", eps=eps)
    rows = {name: RowVecLoad(name) for name in ("freq", "weight", "plain")}

    def squares(acc):  # type: ignore[no-untyped-def]
        return {"rstd": acc * acc}

    @gemm_epilogue(
        ops={"pos": ColVecLoad("pos"), "rstd": rstd, **rows},
        prepass=squares,
        prepass_outs=("rstd",),
        extra_ops=(rstd.out("rstd_out"),),
        mode="acc_pair",
    )
    def norm_rotate(acc, pos, freq, rstd, weight, plain):  # type: ignore[no-untyped-def]
        x1, x2 = unpack(acc * rstd * weight + acc * plain)
        s, c = _sincos_turns(*_angle_turns(pos, freq))
        return {"D": pack(x1 * c - x2 * s, x1 * s + x2 * c)}

    return norm_rotate


def neighbours(x: Tensor, head_dim: int, back: bool = False) -> Tensor:
    """Reorder rows (heads * D, ...) of halves so that the two of a pair are neighbours, or ``back``."""
    halves, pairs = "(h two d) ...", "(h d two) ..."
    return rearrange(x, f"{pairs} -> {halves}" if back else f"{halves} -> {pairs}", two=2, d=head_dim // 2)


def _unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (N, H, D) of neighbours back, in float32."""
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin


def _gradients(grads: list[Tensor], tables: tuple[Tensor, Tensor], saved: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the gradient of the projection (N, columns), and those of the norms' weights.

    grads: of q, k and v, (N, H, D). saved: the output, rstd and the norm's weight of q and of k, if there are norms.
    """
    made = [_unrotate(grad, *tables) for grad in grads[:2]]
    of_weights = []
    for i, (out, rstd, weight) in enumerate(saved):
        normed, scaled = _unrotate(out, *tables) / weight.float(), made[i] * weight.float()
        of_weights.append((made[i] * normed).sum((0, 1)).to(weight.dtype))
        made[i] = rstd[..., None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return [torch.cat([*(x.to(grads[2].dtype) for x in made), grads[2]], 1).flatten(1), *of_weights]


@functools.cache
def _compiled() -> Callable[..., list[Tensor]]:
    return specialised(_gradients)


class Projection:
    """``projection(x, weight, *norms) -> q, k, v``, (1, H, N, D) of neighbours; x is (1, N, width).

    heads: of q and of k. cos, sin: (N, D/2) float32, of the angles that ``base`` gives. norms: as they are given to
    each call, of neighbours; the epilogue multiplies by those that it was made with, so that repeating them costs
    nothing.
    """

    def __init__(
        self, heads: tuple[int, int], cos: Tensor, sin: Tensor, base: float, norms: list[Tensor], eps: float
    ) -> None:
        self.heads, self.base, self.norms, self.eps = heads, base, norms, eps
        self.length, self.head_dim = len(cos), 2 * cos.shape[1]
        self.tables = [torch.stack(x, -1).flatten(1)[:, None] for x in ((cos, cos), (sin, -sin))]

    def __call__(self, x: Tensor, weight: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        return _Project.apply(self, x, weight, *norms)

    @functools.cached_property
    def operands(self) -> dict[str, Any]:
        """Return the epilogue's operands, (1, N) or (1, columns) float32, but for those that it writes."""
        from quack.epilogue.rotary import make_interleaved_inv_freq

        turned, plain = self.head_dim * sum(self.heads), self.head_dim * self.heads[1]
        device = self.tables[0].device
        position, even = torch.arange(self.length, device=device), torch.arange(0, self.head_dim, 2, device=device)
        frequencies = self.base ** (-even.double() / self.head_dim)
        found = {"pos": position[None].float(), "freq": make_interleaved_inv_freq(frequencies, turned, plain)[None]}
        if not self.norms:
            return found
        repeated = torch.cat([weight.float().repeat(count) for weight, count in zip(self.norms, self.heads)])
        weight = F.pad(repeated, (0, plain))[None]
        passes = F.pad(torch.zeros_like(repeated), (0, plain), value=1.0)[None]
        return found | {"rstd": self.head_dim, "weight": weight, "plain": passes}

    def gemm(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output (N, columns), and with norms rstd (N, heads). The first call chooses the tile."""
        epilogue, operands, rstd = _epilogue(self.eps if self.norms else None), self.operands, None
        if self.norms:
            rstd = x.new_empty(len(x), len(weight) // self.head_dim, dtype=torch.float32)
            operands = operands | {"rstd_out": rstd}

        def launch(config: Any) -> Tensor:
            return epilogue(x, weight.T, config=config, **operands)["D"]

        if "config" not in self.__dict__:
            self.config = min(_configs(), key=functools.partial(_milliseconds, launch))
        return launch(self.config), rstd

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v (N, H, D), views of (N, columns)."""
        return x.unflatten(1, (-1, self.head_dim)).split([*self.heads, self.heads[1]], 1)


def _milliseconds(launch: Callable[[Any], Any], config: Any) -> float:
    """Return the time of a configuration; infinity if it does not compile or run here."""
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(config), warmup=5, rep=20, return_mode="median")
    except Exception:
        return float("inf")


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Projection, x: Tensor, weight: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        out, rstd = own.gemm(x[0], weight)
        ctx.own, ctx.norms = own, len(norms)
        ctx.save_for_backward(x, weight, *norms, *((out, rstd) if norms else ()))
        return tuple(part.transpose(0, 1)[None] for part in own.split(out))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        own, of_norms = ctx.own, []
        if ctx.norms:
            *norms, out, rstd = saved
            of_norms = list(zip(own.split(out), rstd.split([*own.heads, own.heads[1]], 1), norms))
        rows = [grad[0].transpose(0, 1) for grad in grads]
        found, *of_weights = _compiled()(rows, own.tables, of_norms)
        return None, (found @ weight)[None], found.T @ x[0], *of_weights
