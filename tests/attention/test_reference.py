"""The eager reference against the oracle of tests/support/loop_attention.py in float64: masks, shapes and tables."""

import importlib
import math

import pytest
import torch

from fused_rope_attn.attention import reference
from tests.support.loop_attention import check_reference, loop_attention, qkv, tables
from verification.testing import reference_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 5), (3, 7), (1, 7), (1, 1)])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(2, 2), (6, 2), (3, 1)])
def test_lengths_and_heads(causal, len_q, len_k, heads_q, heads_kv):
    q, k, v = qkv(2, heads_q, heads_kv, len_q, len_k)
    check_reference(q, k, v, *tables(len_k, 8), causal, rotary_dim=8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
@pytest.mark.parametrize("width", ["half", "full"])
@pytest.mark.parametrize("batch", [None, 1, 2])
def test_tables(causal, interleaved, rotary_dim, width, batch):
    q, k, v = qkv()
    cos, sin = tables(9, rotary_dim, batch=batch, unit=False)  # two rows more than keys
    if width == "full":
        double = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
        cos, sin = double(cos), double(sin)
    check_reference(q, k, v, cos, sin, causal, rotary_dim=rotary_dim, interleaved=interleaved)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (-1, 1), (1, -1), (2, 1), (-1, -1)])
def test_window(causal, window):
    q, k, v = qkv()
    check_reference(q, k, v, *tables(7, 8), causal, rotary_dim=8, window=window)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_scale_and_softcap(softmax_scale, softcap):
    q, k, v = qkv()
    check_reference(q, k, v, *tables(7, 8), True, rotary_dim=8, softmax_scale=softmax_scale, softcap=softcap)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("starts", [None, [0, 3], [2, 7], [-4, 5]])
@pytest.mark.parametrize("lens", [None, [7, 4], [5, 2], [0, 7]])
def test_starts_and_lens(causal, starts, lens):
    q, k, v = qkv()
    options = {}
    if starts is not None:
        options["kv_starts"] = torch.tensor(starts, dtype=torch.int32)
    if lens is not None:
        options["kv_lens"] = torch.tensor(lens, dtype=torch.int32)
    # A negative start is no key more: the loop starts at 0.
    loop = {**options, "kv_starts": options["kv_starts"].clamp(min=0)} if starts is not None else options
    for cos, sin in (tables(7, 8), tables(7, 8, batch=2)):
        o, lse = reference_attention(q, k, v, cos, sin, causal, softmax_scale=0.3, rotary_dim=8, **options)
        expected, expected_lse, _ = loop_attention(q, k, v, cos, sin, causal, softmax_scale=0.3, rotary_dim=8, **loop)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_a_length_beyond_the_keys_is_clamped():
    q, k, v = qkv()
    long = torch.tensor([9, 7], dtype=torch.int32)
    out = reference_attention(q, k, v, *tables(7, 8), True, softmax_scale=1.0, rotary_dim=8, kv_lens=long)
    exact = reference_attention(q, k, v, *tables(7, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert torch.equal(out[0], exact[0]) and torch.equal(out[1], exact[1])


def test_sinks_and_everything_at_once():
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 3.0, -40.0], dtype=torch.float64)
    check_reference(q, k, v, *tables(7, 8), True, rotary_dim=8, sinks=sinks)
    check_reference(
        q,
        k,
        v,
        *tables(7, 6, batch=2),
        True,
        rotary_dim=6,
        interleaved=True,
        sinks=sinks,
        window=(2, 0),
        softcap=2.0,
        kv_starts=torch.tensor([1, 0], dtype=torch.int32),
        kv_lens=torch.tensor([6, 3], dtype=torch.int32),
    )


def test_more_queries_than_keys():
    q, k, v = qkv(len_q=7, len_k=4)
    check_reference(q, k, v, *tables(4, 8), True, rotary_dim=8)
    o, lse = reference_attention(q, k, v, *tables(4, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert bool((o[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, :, 3:]).all())


@pytest.mark.parametrize(
    ("batch", "len_q", "len_k", "rows"), [(0, 3, 3, 3), (2, 0, 3, 3), (2, 0, 0, 0), (2, 3, 0, 0), (2, 3, 0, 4)]
)
def test_empty(batch, len_q, len_k, rows):
    q, k, v = (x.requires_grad_() for x in qkv(batch, len_q=len_q, len_k=len_k))
    o, lse = reference_attention(q, k, v, *tables(rows, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert bool((o == 0).all()) or len_k > 0
    assert bool((lse == -math.inf).all()) or len_k > 0
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v))):
        assert gradient.shape == x.shape and bool((gradient == 0).all())


@pytest.mark.parametrize("logit", [1e4, -1e4, -2.45e5])
def test_extreme_logits(logit):
    """A head with scores far below zero is not silenced: the softmax sees differences only."""
    q, k, v = qkv(1, 1, 1, 4, 9, 8)
    k = 1e-3 * k
    q[..., 0], k[..., 0] = 1.0, 1.0
    cos, sin = torch.ones(9, 4, dtype=torch.float64), torch.zeros(9, 4, dtype=torch.float64)
    check_reference(q, k, v, cos, sin, rotary_dim=8, softmax_scale=logit)


def test_inputs_are_not_modified_and_groups_are_not_expanded():
    q, k, v = qkv(1, 8, 1, 16, 16, 8, dtype=torch.float32)
    cos, sin = tables(16, 8, dtype=torch.float32)
    before = [x.clone() for x in (q, k, v, cos, sin)]
    o, _ = reference_attention(
        q, k, v, cos, sin, True, softmax_scale=1.0, rotary_dim=8, kv_lens=torch.tensor([12], dtype=torch.int32)
    )
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v, cos, sin)))
    expanded, _ = reference_attention(
        q,
        k.expand(1, 8, 16, 8),
        v.expand(1, 8, 16, 8),
        cos,
        sin,
        True,
        softmax_scale=1.0,
        rotary_dim=8,
        kv_lens=torch.tensor([12], dtype=torch.int32),
    )
    torch.testing.assert_close(o, expanded)


def test_agrees_with_hugging_face():
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    glm = importlib.import_module("transformers.models.glm.modeling_glm")
    q, k, v = qkv(2, 4, 2, 9, 9, 16)
    cos, sin = tables(9, 16)
    full_cos, full_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    q_rot, k_rot = llama.apply_rotary_pos_emb(q, k, full_cos, full_sin)
    k_rot, values = k_rot.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q_rot, k_rot, values, is_causal=True)
    o, _ = reference_attention(q, k, v, full_cos, full_sin, True, softmax_scale=0.25, rotary_dim=16)
    torch.testing.assert_close(o, expected)

    # GLM: interleaved pairs, the first half of the columns only, and tables of full width for that half.
    cos, sin = tables(9, 8)
    full_cos, full_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    q_rot, k_rot = glm.apply_rotary_pos_emb(q, k, full_cos, full_sin)
    torch.testing.assert_close(reference.rotate(q, cos, sin, interleaved=True), q_rot)
    torch.testing.assert_close(reference.rotate(k, cos, sin, interleaved=True), k_rot)
