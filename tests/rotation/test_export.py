"""The rotation alone under torch.export in its default mode."""

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from tests.support.export import check_export, dimension, for_each

pytestmark = pytest.mark.unpoisoned


def rotated(x, cos, sin):
    return apply_rope(x, cos, sin, interleaved=True)


def at_positions(x, cos, sin):
    return apply_rope(x, cos, sin, position_ids=torch.arange(x.shape[2]).flip(0)[None])


def both_with_norms(x, cos, sin):
    weight = torch.linspace(0.5, 1.5, 16)
    return apply_rope_qk(x, x[:, :2], cos, sin, q_norm=weight, k_norm=weight)


def batch_and_length(batch, length):
    return torch.randn(batch, length, 4, 16).transpose(1, 2), *rope_tables(length, 16)


@for_each(rotated, at_positions, both_with_norms)
def test_export(function, kind):
    length = dimension(kind, "n")
    check_export(function, batch_and_length, ({0: dimension(kind, "b"), 2: length}, {0: length}, {0: length}))


def rotated_packed(x, cos, sin, cu_seqlens):
    return apply_rope(x, cos, sin, layout="thd", cu_seqlens=cu_seqlens)


def sequences_and_tokens(sequences, tokens):
    return torch.randn(tokens, 4, 16), *rope_tables(tokens, 16), torch.linspace(0, tokens, sequences + 1).int()


@for_each(rotated_packed)
def test_export_of_packed_sequences(function, kind):
    tokens = dimension(kind, "t")
    check_export(function, sequences_and_tokens, ({0: tokens},) * 3 + ({0: dimension(kind, "ends", least=3)},))
