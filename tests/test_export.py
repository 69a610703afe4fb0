"""torch.export in its default mode, with named, inferred and dynamic dimensions, of attention and of the rotation."""

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import masks
from tests.support.export import check_export, dimension, for_each
from tests.support.marks import ignore_overflow

pytestmark = [pytest.mark.unpoisoned, ignore_overflow]
NORM = torch.linspace(0.5, 1.5, 16)


def plain(q, k, v, cos, sin, *_):
    return package.rope_attention(q, k, v, cos, sin, causal=True)


def with_every_option(q, k, v, cos, sin, kv_starts, kv_lens, query_starts, query_ends):
    bounds = {"kv_starts": kv_starts, "kv_lens": kv_lens, "query_starts": query_starts, "query_ends": query_ends}
    options = {"window": (5, 2), "softcap": 3.0, "sinks": NORM[:4], "q_norm": NORM, "k_norm": NORM}
    results = {"return_lse": True, "return_max_logit": True}
    return package.rope_attention(q, k, v, cos, sin, **bounds, **options, **results)


def latent(q, k, v, cos, sin, *_):
    return package.rope_attention_mla(q[:, :2], q[:, 2:], k, k[:, :1], v, cos, sin, causal=True)


def rotated(q, k, v, cos, sin, *_):
    return package.apply_rope(q, cos, sin, interleaved=True)


def rotated_at_positions(q, k, v, cos, sin, *_):
    return package.apply_rope(q, cos, sin, position_ids=torch.arange(q.shape[2]).flip(0)[None])


def rotated_with_norms(q, k, v, cos, sin, *_):
    return package.apply_rope_qk(q, k, cos, sin, q_norm=NORM, k_norm=NORM)


def batch_and_length(batch, length):
    starts, ends = (x.expand(batch, -1).contiguous() for x in masks.chunks(4, length))
    return (
        torch.randn(batch, length, 4, 16).transpose(1, 2),
        *torch.randn(2, batch, 2, length, 16).unbind(),
        *package.rope_tables(length, 16),
        torch.arange(batch, dtype=torch.int32) % 2,
        torch.full((batch,), length - 1, dtype=torch.int32),
        starts,
        ends,
    )


@for_each(plain, with_every_option, latent, rotated, rotated_at_positions, rotated_with_norms)
def test_export(function, kind):
    batch, length = dimension(kind, "b"), dimension(kind, "n")
    rows = ({0: batch, 2: length},) * 3
    axes = (*rows, {0: length}, {0: length}, {0: batch}, {0: batch}, *({0: batch, 1: length},) * 2)
    check_export(function, batch_and_length, axes)


def packed(q, k, v, cos, sin, ends, **options):
    options |= {"return_lse": True, "return_max_logit": True}
    return package.rope_attention_varlen(q, k, v, cos, sin, ends, ends, q.shape[0], k.shape[0], True, **options)


def with_token_tables(*given):
    return packed(*given, token_tables=True)


def rotated_packed(q, k, v, cos, sin, ends):
    return package.apply_rope(q, cos, sin, layout="thd", cu_seqlens=ends)


def sequences_and_tokens(sequences, tokens):
    ends = torch.linspace(0, tokens, sequences + 1).int()
    return torch.randn(tokens, 4, 16), *torch.randn(2, tokens, 2, 16).unbind(), *package.rope_tables(tokens, 16), ends


@for_each(packed, with_token_tables, rotated_packed)
def test_export_of_packed_sequences(function, kind):
    tokens = dimension(kind, "t")
    check_export(function, sequences_and_tokens, (*({0: tokens},) * 5, {0: dimension(kind, "ends", least=3)}))
