"""Packed calls with the fewest table rows that are legal: what reads beyond them meets NaN."""

import math

import torch

from fused_rope_attn import rope_attention_varlen

# Queries and keys of every sequence; then rows that belong to none, more of them than there are table rows.
SEQUENCES = {
    "keys behind": [(5, 7), (3, 3)],
    "no keys at all": [(7, 0), (0, 0)],
    "no sequence": [],
    "only queries behind": [(0, 4)],
}
BEHIND = 40


def assert_nothing_reads_behind_the_tables(name, head_dim, dtype, device, **options):
    """Outputs and gradients are finite, zero after the last sequence, and those of tables with rows for all."""
    lengths = torch.tensor(SEQUENCES[name], dtype=torch.int64).reshape(-1, 2)
    generator = torch.Generator().manual_seed(head_dim)
    (total_q, total_k), longest = lengths.sum(0).tolist(), lengths.amax(0).tolist() if len(lengths) else [0, 0]
    q, k, v = (
        torch.randn(total + BEHIND, 2, head_dim, generator=generator).to(device, dtype)
        for total in (total_q, total_k, total_k)
    )
    limits = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0)).int().to(device)
    angles = torch.randn(BEHIND + 7, head_dim // 2, generator=generator).to(device)

    def run(cos, sin):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = rope_attention_varlen(
            *leaves, cos, sin, limits[:, 0].contiguous(), limits[:, 1].contiguous(), *longest, **options
        )
        return (o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o)))

    expected = run(angles.cos(), angles.sin())
    rows = torch.full_like(angles, math.nan)
    rows[: longest[1]] = angles[: longest[1]]
    found = run(rows.cos()[: longest[1]], rows.sin()[: longest[1]])
    for x, y, total in zip(found, expected, (total_q, total_q, total_k, total_k)):
        torch.testing.assert_close(x, y)  # the sm_90 kernels add dq in any order
        assert not x[total:].any()
