# mypy: disable-error-code="attr-defined, arg-type"
"""Launchers of the gradient of the norms of q and k, and of the weights' gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention import norm_gradient_kernel as kernels
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels import tiles
from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long

# Rows by heads of one program, which writes one sum of its rows' weight gradients.
ROWS, HEADS = 32, 4
# Programs that share the sums of one weight's gradient.
_PARTS = 64


def raw(tensors: Tensors, is_rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k as the caller gave them. is_rotated: ``tensors.q`` and ``k`` are the rotated ones."""
    return (tensors.raw_q, tensors.raw_k) if is_rotated else (tensors.q, tensors.k)


class Sums(NamedTuple):
    """Workspaces of one call: sums of q's and of k's rows by block, partial sums of these, and counters."""

    q: Any
    k: Any
    parts: Any
    counters: Any


NO_SUMS = Sums(None, None, None, None)


class SumsOfLaunches:
    """Workspaces of the sm_90 backward, which adds up the weights' gradients without a launch of its own.

    ``query_programs`` of the post-process write a row of sums each, and the main kernel writes ``key_sums`` rows.
    """

    # Programs of the post-process that add up the sums of the main kernel.
    KEY_PARTS = 16

    def __init__(self, problem: Problem, query_programs: int, key_sums: int):
        parts = triton.cdiv(query_programs, kernels.SUMS.value)
        self.num_counters = parts + 2
        self.shapes = tuple((rows, problem.head_dim) for rows in (query_programs, key_sums, parts + self.KEY_PARTS))

    def allocate(self, where: torch.device, counters: torch.Tensor) -> Sums:
        """Return uninitialised ``Sums``. counters: int32, cleared by the pre-process; the sums use the last ones."""
        q, k, parts = (torch.empty(shape, dtype=torch.float32, device=where) for shape in self.shapes)
        return Sums(q, k, parts, counters)


class WeightGradients:
    """Gradients of both norms' weights from sums of ``q_blocks`` and ``k_blocks`` blocks of rows, (blocks, D) each."""

    def __init__(self, problem: Problem, q_blocks: int, k_blocks: int, pdl: bool):
        self.shapes = (q_blocks, problem.head_dim), (k_blocks, problem.head_dim)
        parts = 2 if is_interpreted() else _PARTS
        self.parts_shape = (2, parts, problem.head_dim)
        options = {"num_warps": 8, **({"launch_pdl": True} if pdl else {})}
        numbers = {"q_blocks": q_blocks, "k_blocks": k_blocks, "PARTS": parts, "PDL": pdl}
        self.launch = Launch(kernels.weight_gradient_kernel, 2 * parts, options, numbers)

    def allocate(self, where: torch.device) -> Sums:
        """Return uninitialised ``Sums``."""
        shapes = (*self.shapes, self.parts_shape)
        q, k, parts = (torch.empty(shape, dtype=torch.float32, device=where) for shape in shapes)
        return Sums(q, k, parts, torch.empty(2, dtype=torch.int32, device=where))

    def __call__(self, stream: int, tensors: Tensors, sums: Sums) -> tuple[torch.Tensor, torch.Tensor]:
        dq_norm, dk_norm = torch.empty_like(tensors.q_norm), torch.empty_like(tensors.k_norm)
        columns = tensors.q.shape[3], block_d(tensors.q.shape[3])
        queries = kernels.WeightSums.host(sums.q, None, sums.parts, sums.counters, dq_norm, *columns)
        keys = kernels.WeightSums.host(sums.k, None, sums.parts, sums.counters, dk_norm, *columns)
        self.launch(stream, queries=queries, keys=keys)
        return dq_norm, dk_norm


class NormGradients:
    """The launches that turn dq and dk of normed rows into those of q and k, in place, after any backward kernels.

    is_rotated: as for the backward passes. strides: of dq, dk and dv.
    """

    def __init__(self, problem: Problem, tensors: Tensors, strides: tuple, is_rotated: bool, pdl: bool):
        rows = raw(tensors, is_rotated)
        q_blocks, k_blocks = (
            problem.batch * triton.cdiv(length, ROWS) * triton.cdiv(heads, HEADS)
            for length, heads in ((problem.len_q, problem.heads_q), (problem.len_k, problem.heads_kv))
        )
        self.problem, self.is_rotated = problem, is_rotated
        self.weights = WeightGradients(problem, q_blocks, k_blocks, pdl)
        is_wide = is_long(*(x.stride() for x in rows), *strides[:2])
        self.format = tiles.RowFormat.host(problem.head_dim, block_d(problem.head_dim), is_wide)
        self.launch = None
        if q_blocks + k_blocks:
            options = {"num_warps": 4, **({"launch_pdl": True} if pdl else {})}
            own = {"B": problem.batch, "HEADS": HEADS, "BLOCK_N": ROWS, "PDL": pdl}
            numbers = arguments.numbers_of(problem) | own
            self.launch = Launch(kernels.norm_gradient_kernel, q_blocks + k_blocks, options, numbers)

    def __call__(
        self, stream: int, tensors: Tensors, dq: torch.Tensor, dk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch, and return the gradients of both weights in the weights' dtypes."""
        if self.launch is None:
            return torch.zeros_like(tensors.q_norm), torch.zeros_like(tensors.k_norm)
        sums = self.weights.allocate(dq.device)
        q, k = raw(tensors, self.is_rotated)

        def rows(x: torch.Tensor, dx: torch.Tensor, weight: torch.Tensor, of_blocks: torch.Tensor) -> Any:
            norm = arguments.norm_of(self.problem, weight)
            return kernels.NormedRows.host(arguments.view(x), arguments.view(dx), norm, of_blocks, self.format)

        queries, keys = rows(q, dq, tensors.q_norm, sums.q), rows(k, dk, tensors.k_norm, sums.k)
        self.launch(stream, queries=queries, keys=keys, counters_ptr=sums.counters)
        return self.weights(stream, tensors, sums)
