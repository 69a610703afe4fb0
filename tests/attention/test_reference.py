"""The eager reference against oracles written differently: explicit loops, and rotation as a complex product."""

import importlib
import math

import pytest
import torch

from fused_rope_attn.attention import reference


def tables(rows, rotary_dim, *, batch=None, unit=True, seed=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, rotary_dim // 2) if batch is None else (batch, rows, rotary_dim // 2)
    angle = 3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    radius = 1.0 if unit else 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    return (radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=8, dtype=torch.float64):
    q = normal(batch, heads_q, len_q, head_dim, seed=1, dtype=dtype)
    k = normal(batch, heads_kv, len_k, head_dim, seed=2, dtype=dtype)
    v = normal(batch, heads_kv, len_k, head_dim, seed=3, dtype=dtype)
    return q, k, v


def complex_rotation(x, cos, sin, interleaved):
    """One vector x (D,): the pair (a, b) is the number a + ib, turned by cos + i sin. Plain Python numbers."""
    half = len(cos)
    out = [float(value) for value in x]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(out[first], out[second]) * complex(float(cos[i]), float(sin[i]))
        out[first], out[second] = turned.real, turned.imag
    return out


def loop_attention(
    q, k, v, cos, sin, causal=False, *, softmax_scale, rotary_dim, interleaved=False, window=None, softcap=0.0,
    sinks=None, kv_starts=None, kv_lens=None,
):  # fmt: skip
    """The contract, sentence by sentence, one score at a time. cos and sin: (S, R/2) or (B, S, R/2)."""
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_k = k.shape[1], k.shape[2]
    o, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(batch):
        cos_b, sin_b = (cos[b], sin[b]) if cos.ndim == 3 else (cos, sin)
        start = int(kv_starts[b]) if kv_starts is not None else 0
        length = int(kv_lens[b]) if kv_lens is not None else len_k
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for i in range(len_q):
                position = length - len_q + i
                if position < 0:
                    continue
                query = complex_rotation(q[b, h, i], cos_b[position], sin_b[position], interleaved)
                scores = {}
                for j in range(start, length):
                    if causal and j > position:
                        continue
                    if window is not None and window[0] != -1 and j < position - window[0]:
                        continue
                    if window is not None and window[1] != -1 and j > position + window[1]:
                        continue
                    key = complex_rotation(k[b, g, j], cos_b[j], sin_b[j], interleaved)
                    score = softmax_scale * sum(x * y for x, y in zip(query, key))
                    scores[j] = softcap * math.tanh(score / softcap) if softcap else score
                if not scores:
                    continue
                logits = list(scores.values()) + ([float(sinks[h])] if sinks is not None else [])
                top = max(logits)
                total = sum(math.exp(logit - top) for logit in logits)
                lse[b, h, i] = top + math.log(total)
                for j, score in scores.items():
                    o[b, h, i] += math.exp(score - top) / total * v[b, g, j]
    return o, lse


def check(q, k, v, cos, sin, causal=False, **options):
    """Reference and loops agree in float64. The loops take (S, R/2) tables, the reference whatever it is given."""
    options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    half = cos[..., ::2] if options.get("interleaved") else cos[..., : options["rotary_dim"] // 2]
    half_sin = sin[..., ::2] if options.get("interleaved") else sin[..., : options["rotary_dim"] // 2]
    if cos.shape[-1] == options["rotary_dim"] // 2:
        half, half_sin = cos, sin
    if half.ndim == 3 and half.shape[0] == 1:
        half, half_sin = half[0], half_sin[0]
    o, lse = reference.attention(q, k, v, cos, sin, causal, **options)
    expected, expected_lse = loop_attention(q, k, v, half, half_sin, causal, **options)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotate_is_a_complex_product(rotary_dim, interleaved):
    x = normal(2, 3, 5, 8)
    cos, sin = tables(5, rotary_dim, unit=False)
    out = reference.rotate(x, cos, sin, interleaved=interleaved)
    for b in range(2):
        for h in range(3):
            for n in range(5):
                expected = complex_rotation(x[b, h, n], cos[n], sin[n], interleaved)
                torch.testing.assert_close(out[b, h, n], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_rotation_is_the_transpose(interleaved):
    x, y = normal(4, 8, seed=1), normal(4, 8, seed=2)
    cos, sin = tables(4, 6, unit=False)
    forward = reference.rotate(x, cos, sin, interleaved=interleaved)
    backward = reference.rotate(y, cos, sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum())
    unit_cos, unit_sin = tables(4, 6)
    there = reference.rotate(x, unit_cos, unit_sin, interleaved=interleaved)
    back = reference.rotate(there, unit_cos, unit_sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
def test_rotation_is_rounded_once(table_dtype):
    x = normal(64, 32, dtype=torch.float16)
    cos, sin = (t.to(table_dtype) for t in tables(64, 32))
    wide = reference.rotate(x.double(), cos.double(), sin.double())
    error = (reference.rotate(x, cos, sin).double() - wide).abs()
    # Half a unit in the last place, and float32's own error where the two products cancel.
    assert bool((error <= wide.abs() * 2**-11 + 2**-20).all())
    assert reference.rotate(x, cos, sin).dtype == torch.float16


def test_rotate_is_float64_where_a_table_is():
    x = normal(4, 8, dtype=torch.float32)
    cos, sin = tables(4, 8)
    torch.testing.assert_close(
        reference.rotate(x, cos, sin), reference.rotate(x.double(), cos, sin).float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_normalise_tables_gives_views(interleaved):
    half, _ = tables(9, 6)
    full = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
    for given in (half, full, half[None], full[None], full.expand(3, 9, 6)):
        cos, sin = reference.normalise_tables(given, given, 6, interleaved)
        assert cos.shape == sin.shape == (given.shape[0] if given.ndim == 3 else 1, 9, 3)
        assert torch.equal(cos, half.expand_as(cos))
        assert cos.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        again, _ = reference.normalise_tables(cos, sin, 6, interleaved)
        assert torch.equal(again, cos)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 5), (3, 7), (1, 7), (1, 1)])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(2, 2), (6, 2), (3, 1)])
def test_lengths_and_heads(causal, len_q, len_k, heads_q, heads_kv):
    q, k, v = qkv(2, heads_q, heads_kv, len_q, len_k)
    check(q, k, v, *tables(len_k, 8), causal, rotary_dim=8)


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
    check(q, k, v, cos, sin, causal, rotary_dim=rotary_dim, interleaved=interleaved)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (-1, 1), (1, -1), (2, 1), (-1, -1)])
def test_window(causal, window):
    q, k, v = qkv()
    check(q, k, v, *tables(7, 8), causal, rotary_dim=8, window=window)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_scale_and_softcap(softmax_scale, softcap):
    q, k, v = qkv()
    check(q, k, v, *tables(7, 8), True, rotary_dim=8, softmax_scale=softmax_scale, softcap=softcap)


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
        o, lse = reference.attention(q, k, v, cos, sin, causal, softmax_scale=0.3, rotary_dim=8, **options)
        expected, expected_lse = loop_attention(q, k, v, cos, sin, causal, softmax_scale=0.3, rotary_dim=8, **loop)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_a_length_beyond_the_keys_is_clamped():
    q, k, v = qkv()
    long = torch.tensor([9, 7], dtype=torch.int32)
    out = reference.attention(q, k, v, *tables(7, 8), True, softmax_scale=1.0, rotary_dim=8, kv_lens=long)
    exact = reference.attention(q, k, v, *tables(7, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert torch.equal(out[0], exact[0]) and torch.equal(out[1], exact[1])


def test_sinks_and_everything_at_once():
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 3.0, -40.0], dtype=torch.float64)
    check(q, k, v, *tables(7, 8), True, rotary_dim=8, sinks=sinks)
    check(
        q, k, v, *tables(7, 6, batch=2), True, rotary_dim=6, interleaved=True, sinks=sinks, window=(2, 0), softcap=2.0,
        kv_starts=torch.tensor([1, 0], dtype=torch.int32), kv_lens=torch.tensor([6, 3], dtype=torch.int32),
    )  # fmt: skip


def test_more_queries_than_keys():
    q, k, v = qkv(len_q=7, len_k=4)
    check(q, k, v, *tables(4, 8), True, rotary_dim=8)
    o, lse = reference.attention(q, k, v, *tables(4, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert bool((o[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, :, 3:]).all())


@pytest.mark.parametrize(
    ("batch", "len_q", "len_k", "rows"), [(0, 3, 3, 3), (2, 0, 3, 3), (2, 0, 0, 0), (2, 3, 0, 0), (2, 3, 0, 4)]
)
def test_empty(batch, len_q, len_k, rows):
    q, k, v = (x.requires_grad_() for x in qkv(batch, len_q=len_q, len_k=len_k))
    o, lse = reference.attention(q, k, v, *tables(rows, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert bool((o == 0).all()) or len_k > 0
    assert bool((lse == -math.inf).all()) or len_k > 0
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v))):
        assert gradient.shape == x.shape and bool((gradient == 0).all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"softcap": 1.5},
        {"window": (2, 1), "causal": False},
        {"kv_starts": [1, 0], "kv_lens": [5, 2]},
        {"sinks": True},
    ],
    ids=str,
)
def test_gradcheck(options, interleaved):
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 1, 3, 5, 6))
    cos, sin = tables(5, 4, unit=False)
    causal = options.pop("causal", True)
    sinks = normal(2, seed=9).requires_grad_() if options.pop("sinks", False) else None
    for name in ("kv_starts", "kv_lens"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)

    def run(q, k, v, sinks):
        return reference.attention(
            q, k, v, cos, sin, causal, softmax_scale=0.6, rotary_dim=4, interleaved=interleaved, sinks=sinks, **options
        )[0]

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))
    assert torch.autograd.gradgradcheck(run, (q, k, v, sinks), fast_mode=True)  # along one random direction


def test_lse_is_not_differentiable():
    q, k, v = (x.requires_grad_() for x in qkv())
    o, lse = reference.attention(q, k, v, *tables(7, 8), softmax_scale=1.0, rotary_dim=8)
    assert o.requires_grad and not lse.requires_grad


def test_what_overflows_where_nothing_is_visible_stays_there():
    """float16: do v^T is infinite for the last key, which the first query does not see; its gradients are finite."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 3, 3, dtype=torch.float16))
    with torch.no_grad():
        v[:, :, 2] = 300.0
    do = torch.zeros_like(q)
    do[:, :, 0] = 300.0
    o, _ = reference.attention(q, k, v, *tables(3, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert all(bool(torch.isfinite(x).all()) for x in (o, *torch.autograd.grad(o, (q, k, v), do)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sinks", [False, True])
def test_nan_outside_the_bounds_never_leaks(dtype, sinks):
    """Left- and right-padded batches: NaN in absent keys and in dead queries, and in the gradient of dead rows."""
    q, k, v = qkv(2, 4, 2, 7, 7, dtype=dtype)
    starts, lens = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    cos, sin = tables(7, 8, dtype=torch.float32)
    sink = torch.ones(4, dtype=torch.float32) if sinks else None

    def run(q, k, v, do):
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        o, lse = reference.attention(
            q, k, v, cos, sin, True, softmax_scale=0.4, rotary_dim=8, sinks=sink, kv_starts=starts, kv_lens=lens
        )
        return o, lse, *torch.autograd.grad(o, (q, k, v), do)

    do = normal(*q.shape, seed=5, dtype=dtype)
    clean = run(q, k, v, do)
    q, k, v, do = q.clone(), k.clone(), v.clone(), do.clone()
    for x in (k, v):
        x[0, :, :3] = math.nan
        x[1, :, 4:] = math.inf
    for x in (q, do):
        x[0, :, :3] = math.nan  # positions 0..2 come before the first key
        x[1, :, :3] = math.nan  # positions -3..-1
    poisoned = run(q, k, v, do)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), clean, poisoned):
        assert torch.equal(a, b), name
    assert bool((poisoned[0][0, :, :3] == 0).all()) and bool((poisoned[1][0, :, :3] == -math.inf).all())
    assert bool((poisoned[3][0, :, :3] == 0).all()) and bool((poisoned[4][1, :, 4:] == 0).all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3e-3), (torch.bfloat16, 3e-2), (torch.float32, 2e-6)])
@pytest.mark.parametrize("table_dtype", [torch.float32, "input"])
def test_low_precision(dtype, tolerance, table_dtype):
    q, k, v = qkv(2, 4, 2, 33, 40, 16, dtype=dtype)
    cos, sin = tables(40, 16, dtype=dtype if table_dtype == "input" else table_dtype)
    o, lse = reference.attention(q, k, v, cos, sin, True, softmax_scale=0.25, rotary_dim=16)
    wide = (x.double() for x in (q, k, v, cos, sin))
    o64, lse64 = reference.attention(*wide, True, softmax_scale=0.25, rotary_dim=16)
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), o64, rtol=0, atol=2 * tolerance)
    torch.testing.assert_close(lse.double(), lse64, rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("logit", [1e4, -1e4, -2.45e5])
def test_extreme_logits(logit):
    """A head whose scores are all far below zero is not silenced: the softmax sees differences only."""
    q, k, v = qkv(1, 1, 1, 4, 9, 8)
    k = 1e-3 * k
    q[..., 0], k[..., 0] = 1.0, 1.0
    cos, sin = torch.ones(9, 4, dtype=torch.float64), torch.zeros(9, 4, dtype=torch.float64)
    check(q, k, v, cos, sin, rotary_dim=8, softmax_scale=logit)


def test_inputs_are_not_modified_and_groups_are_not_expanded():
    q, k, v = qkv(1, 8, 1, 16, 16, 8, dtype=torch.float32)
    cos, sin = tables(16, 8, dtype=torch.float32)
    before = [x.clone() for x in (q, k, v, cos, sin)]
    o, _ = reference.attention(
        q, k, v, cos, sin, True, softmax_scale=1.0, rotary_dim=8,
        kv_lens=torch.tensor([12], dtype=torch.int32),
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v, cos, sin)))
    expanded, _ = reference.attention(
        q, k.expand(1, 8, 16, 8), v.expand(1, 8, 16, 8), cos, sin, True, softmax_scale=1.0, rotary_dim=8,
        kv_lens=torch.tensor([12], dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(o, expanded)


def test_autocast_does_not_cast_a_second_time():
    q, k, v = qkv(dtype=torch.float32)
    cos, sin = tables(7, 8, dtype=torch.float32)
    plain, _ = reference.attention(q, k, v, cos, sin, softmax_scale=1.0, rotary_dim=8)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = reference.attention(q, k, v, cos, sin, softmax_scale=1.0, rotary_dim=8)
    assert inside.dtype == torch.float32 and torch.equal(plain, inside)


def test_traces_with_dynamic_lengths():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def run(q, k, v, cos, sin, lens):
        return reference.attention(
            q, k, v, cos, sin, True, softmax_scale=0.3, rotary_dim=6, interleaved=True, window=(3, 0), kv_lens=lens
        )

    for len_q, len_k in ((5, 7), (6, 9), (11, 13)):
        q, k, v = qkv(len_q=len_q, len_k=len_k)
        cos, sin = tables(len_k, 6)
        lens = torch.tensor([len_k, len_k - 2], dtype=torch.int32)
        o, lse = run(q, k, v, cos, sin, lens)
        expected = reference.attention(
            q, k, v, cos, sin, True, softmax_scale=0.3, rotary_dim=6, interleaved=True, window=(3, 0), kv_lens=lens
        )
        torch.testing.assert_close((o, lse), expected)
    assert counter.frame_count == 1


def test_agrees_with_hugging_face():
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    glm = importlib.import_module("transformers.models.glm.modeling_glm")
    q, k, v = qkv(2, 4, 2, 9, 9, 16)
    cos, sin = tables(9, 16)
    full_cos, full_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    q_rot, k_rot = llama.apply_rotary_pos_emb(q, k, full_cos, full_sin)
    k_rot, values = k_rot.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q_rot, k_rot, values, is_causal=True)
    o, _ = reference.attention(q, k, v, full_cos, full_sin, True, softmax_scale=0.25, rotary_dim=16)
    torch.testing.assert_close(o, expected)

    # GLM: interleaved pairs, the first half of the columns only, and tables of full width for that half.
    cos, sin = tables(9, 8)
    full_cos, full_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    q_rot, k_rot = glm.apply_rotary_pos_emb(q, k, full_cos, full_sin)
    torch.testing.assert_close(reference.rotate(q, cos, sin, interleaved=True), q_rot)
    torch.testing.assert_close(reference.rotate(k, cos, sin, interleaved=True), k_rot)
