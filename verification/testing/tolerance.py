"""The contract's tolerance: an error budget taken from eager PyTorch's own distance to float64."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verification.testing.cases import Case
from verification.testing.rounding import RandomRounding

# The float32 noise of zeros: two sums of one row's products, in another order, for inputs of order 1.
# Hopper's tensor cores cut off what falls below their sum: 3.4e-6 was seen at D 128 (H200).
_ZERO = 2.0**-17
# So many further draws of eager's error decide where a single one refuses.
DRAWS = 32


@dataclass(frozen=True)
class Finding:
    """One tensor against float64, or a statement, which has no figures. `detail` says what is wrong if it is not `ok`.

    `error` and `eager` are the largest distances from float64, of the tensor and of eager PyTorch. `ratio` is the one
    over the other and fails above 2 (3 for gradients), `row_ratio` the same for the rms error of the worst row and
    fails above 2.5; eps is part of both, as a share of the limit. `backend`: what computed the tensor.
    """

    tensor: str
    ok: bool
    detail: str = ""
    error: float = math.nan
    eager: float = math.nan
    ratio: float = math.nan
    row_ratio: float = math.nan
    backend: str = ""

    @property
    def is_tensor(self) -> bool:
        return not math.isnan(self.eager)

    @property
    def share(self) -> float:
        """The error divided by the tolerance; above 1 is too much."""
        return max(self.ratio / (3.0 if self.tensor.startswith("d") else 2.0), self.row_ratio / 2.5)


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
) -> Finding:
    """Hold `out` against the contract's tolerance, by the rules of docs/design/numerics.md.

    `ref64` float64, `eager` in the input dtype `dtype`, all of one shape (..., N, D), or (...) for "lse" and
    "max_logit". A number that is not finite never passes, except an infinity of lse that float64 has too. `draws`: the
    eager results of the second opinion. `zero`: how much more float32 noise than usual a result has that is zero in
    exact arithmetic (`noise_of_zero`).

    A row of eager may be exact by luck (a single visible key; two roundings that cancel). So eps of a row is its unit
    roundoff, plus eager's rms error around that position (all batches and heads, 16 positions either side, those that
    are zero left out) 2.5 times, 5 times for gradients, because of delta. It stays local, so that late rows of dk, far
    smaller than the early ones, are held to their own size.
    """
    if out.shape != ref64.shape or eager.shape != ref64.shape:
        raise ValueError(
            f"{name} and eager must have the reference's shape {tuple(ref64.shape)}, but have {tuple(out.shape)} and "
            f"{tuple(eager.shape)}"
        )
    if ref64.numel() == 0:
        return Finding(name, True, "empty", 0.0, 0.0, 0.0, 0.0)
    is_number = name in ("lse", "max_logit")
    if is_number:  # a row of one number, where an infinity that float64 has too is right
        same = torch.isinf(ref64) & (out.double() == ref64)
        out, ref64, eager = (x.double().masked_fill(same, 0.0)[..., None] for x in (out, ref64, eager))
    difference = out.double() - ref64
    eager_error, eager_row = _eager_errors(eager, ref64, is_number)
    if is_number:
        eps_row = 1e-5 * (1.0 + ref64.abs().squeeze(-1))
        slack = float(eps_row.max()), eps_row
    else:
        slack = _slack(ref64, eager_row, grad=grad, dtype=dtype, zero=zero)
    found = _judge(name, difference, eager_error, eager_row, *slack, grad=grad)
    if found.ok or draws is None or not bool(torch.isfinite(difference).all()):
        return found
    for draw in draws():
        draw = draw.masked_fill(same, 0.0)[..., None] if is_number else draw
        error, row = _eager_errors(draw, ref64, is_number)
        eager_error = max(eager_error, error / RandomRounding.EXCESS)
        eager_row = torch.maximum(eager_row, row / RandomRounding.EXCESS)
    return _judge(name, difference, eager_error, eager_row, *slack, grad=grad)


def _eager_errors(eager: Tensor, ref64: Tensor, is_number: bool) -> tuple[float, Tensor]:
    """Eager's largest error, and the rms error of each of its rows (...). A number is held to twice the largest."""
    # If eager itself overflowed (float16 logits), it has no error to allow: only eps is left.
    difference = torch.nan_to_num(eager.double() - ref64, nan=0.0, posinf=0.0, neginf=0.0)
    error, row = float(difference.abs().max()), _rms(difference)
    return error, torch.full_like(row, 2.0 / 2.5 * error) if is_number else row


def _judge(
    name: str, difference: Tensor, eager_error: float, eager_row: Tensor, eps: float, eps_row: Tensor, *, grad: bool
) -> Finding:
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
    return Finding(name, not detail, "; ".join(detail), error, eager_error, ratio, 2.5 * worst_excess)


def noise_of_zero(name: str, case: Case, inputs: Any) -> float:
    """Return how much more float32 noise a tensor of a case has than usual at exact zeros: `zero` of `compare`.

    The noise is that of two sums over D products, and the tensor cores cut off a little at every step, so that it grows
    with D. dk and dv add it up over the heads of a group, and dk_rope over all heads, with random signs; dq and dk
    carry it through rotated vectors and back through the rotation, which lengthens them twice, each time by at most the
    largest norm of a pair in the tables ``inputs.cos`` and ``inputs.sin``, and are multiples of the softmax scale,
    which is D ** -0.5 by default. A norm divides them by the rms of short rows, about one half, and its weights'
    gradients add them up over all rows.
    """
    factor = max(1.0, case.score_dim / 128)
    if name == "dk_rope":
        factor *= case.heads_q**0.5
    if name in ("dk", "dv", "dk_norm"):
        factor *= (case.heads_q / case.heads_kv) ** 0.5
    if name in ("dk", "dk_norm") and inputs.cos is None:  # all queries may see one key, and none may be missing
        factor *= max(1, case.len_q) ** 0.5
    if name in ("dq_norm", "dk_norm"):
        heads, length = (case.heads_q, case.len_q) if name == "dq_norm" else (case.heads_kv, case.len_k)
        factor *= max(1, case.batch * heads * length) ** 0.5
    elif case.norms is not None and name in ("dq", "dk"):
        factor *= 2.0
    if name[:2] in ("dq", "dk") and (inputs.cos is None or inputs.cos.numel()):
        if inputs.cos is not None:
            factor *= max(1.0, float((inputs.cos.float().square() + inputs.sin.float().square()).max()))
        factor *= max(1.0, abs(case.scale) * case.score_dim**0.5)
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
    # The last term is for exact zeros: with one key ds = p * (dp - delta), where dp = delta.
    noise = zero * _ZERO
    eps = max((1e-5 if dtype in (torch.float32, torch.float64) else unit) * rms, noise)
    return eps, eps_row + (eps if dtype in (torch.float32, torch.float64) else noise)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1).sqrt()


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
