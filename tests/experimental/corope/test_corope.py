"""Co-RoPE: the reference against the definition written out, and the kernels in Triton's interpreter against float64.

The kernels are called below the public function, which sends CPU tensors to the reference. bfloat16 is
test_corope_gpu.py's: the interpreter computes it wrongly.
"""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import kernels, reference
from fused_rope_attn.experimental.corope.api import CoRopeAttention
from fused_rope_attn.experimental.corope.configs import CoRopeConfig
from fused_rope_attn.runtime.device import is_interpreted
from tests.support.corope import NAMES, hold, make, results

ROOT = Path(__file__).parents[3]
F16, F32, F64 = torch.float16, torch.float32, torch.float64
interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def hold_kernels(inputs, *, base=10000.0, scale=None, function=None):
    """Kernels within the tolerance of float64, inputs as they were."""
    dtype, scale = inputs[0].dtype, inputs[0].shape[-1] ** -0.5 if scale is None else scale
    before = [x.clone() for x in inputs]
    out = results(function or (lambda q, k, v: CoRopeAttention.apply(q, k, v, base, scale)), inputs, dtype)
    assert all(torch.equal(x, y) for x, y in zip(before, inputs)), "inputs were modified"
    hold(inputs, out, base=base, scale=scale)


# ---- the reference


def by_hand(q, k, v, base, scale):
    """The definition, one number at a time: q (HQ, N, D), k and v (HKV, N, D), nested lists."""
    group, half = len(q) // len(k), len(q[0][0]) // 2

    def dot(x, y):
        return sum(a * b for a, b in zip(x, y))

    o = []
    for h in range(len(q)):
        keys, values, leader = k[h // group], v[h // group], q[h // group * group]
        rows = []
        for i in range(len(keys)):
            z = [1 / (1 + math.exp(-scale * dot(leader[i], keys[j]))) for j in range(i + 1)]
            a = [sum(z[: j + 1]) for j in range(i + 1)]
            scores = []
            for j in range(i + 1):
                x, y, score = q[h][i], keys[j], 0.0
                for d in range(half):
                    angle = (a[i] - a[j]) * base ** (-2 * d / (2 * half))
                    score += (x[d] * y[d] + x[d + half] * y[d + half]) * math.cos(angle)
                    score -= (x[d + half] * y[d] - x[d] * y[d + half]) * math.sin(angle)
                scores.append(math.exp(scale * score))
            rows.append([dot(scores, column) / sum(scores) for column in zip(*values[: i + 1])])
        o.append(rows)
    return o


def test_reference_is_the_definition():
    q, k, v, _ = make(1, 6, 2, 9, 8, F64)
    expected = torch.tensor(by_hand(q[0].tolist(), k[0].tolist(), v[0].tolist(), 50.0, 0.4), dtype=F64)
    torch.testing.assert_close(corope_attention(q, k, v, base=50.0, softmax_scale=0.4)[0], expected)


def test_reference_gradients(monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_ANGLES", 16)  # two rows in a chunk
    q, k, v, _ = (x.requires_grad_() for x in make(1, 3, 1, 4, 4, F64))
    assert torch.autograd.gradcheck(lambda *x: corope_attention(*x, base=30.0), (q, k, v))


def test_reference_chunks_change_nothing(monkeypatch):
    inputs = make(1, 4, 2, 33, 8, F64)
    whole = results(corope_attention, inputs, F64)
    monkeypatch.setattr(reference, "_CHUNK_ANGLES", 33 * 4 * 5)  # five rows
    for x, y in zip(whole, results(corope_attention, inputs, F64)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_constant_steps_are_rope():
    """A leader that is zero gives z = 1/2 everywhere: the other heads see RoPE at half the distance."""
    from fused_rope_attn import rope_attention

    q, k, v, _ = make(1, 3, 1, 20, 16, F64)
    q[:, 0] = 0.0
    omega = 10000.0 ** -(torch.arange(8, dtype=F64) / 8)
    angle = 0.5 * torch.arange(20, dtype=F64)[:, None] * omega
    expected = rope_attention(q, k, v, angle.cos(), angle.sin(), causal=True, backend="reference")
    torch.testing.assert_close(corope_attention(q, k, v), expected)


def test_the_future_does_not_matter():
    q, k, v, _ = make(1, 2, 1, 12, 8, F64)
    o = corope_attention(q, k, v)
    k[:, :, 7:], v[:, :, 7:] = 50.0, -1e6
    assert torch.equal(corope_attention(q, k, v)[:, :, :7], o[:, :, :7])


def test_nothing_in_nothing_out():
    for batch, length in ((0, 5), (2, 0)):
        q, k, v, do = make(batch, 2, 1, length, 32, F32)
        for function in (corope_attention, lambda *x: CoRopeAttention.apply(*x, 10000.0, 0.1)):
            for x, like in zip(results(function, (q, k, v, do), F32), (q, q, k, v)):
                assert x.shape == like.shape


# ---- refusals


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, "q must be a torch.Tensor", {"q": [1.0]}),
        (TypeError, "q must be float16", {"q": torch.zeros(1, 4, 5, 8, dtype=torch.int32)}),
        (TypeError, "k must have q's dtype", {"k": torch.zeros(1, 2, 5, 8, dtype=F16)}),
        (ValueError, "v must be on q's device cpu", {"v": torch.zeros(1, 2, 5, 8, device="meta")}),
        (ValueError, r"q must have shape \(B, H, N, D\)", {"q": torch.zeros(4, 5, 8)}),
        (ValueError, "even head dim", {"q": torch.zeros(1, 4, 5, 7)}),
        (ValueError, "k has 3 heads, but q's 4 heads", {"k": torch.zeros(1, 3, 5, 8), "v": torch.zeros(1, 3, 5, 8)}),
        (ValueError, r"k must have shape \(1, 2, 5, 8\)", {"k": torch.zeros(1, 2, 6, 8)}),
        (ValueError, "v must have shape", {"v": torch.zeros(1, 1, 5, 8)}),
        (TypeError, "base must be a float", {"base": "10"}),
        (ValueError, "base must be finite and positive", {"base": -1.0}),
        (TypeError, "softmax_scale must be a float or None", {"softmax_scale": True}),
        (ValueError, "softmax_scale must be finite", {"softmax_scale": math.inf}),
    ],
)
def test_refusals(error, match, change):
    arguments = {"q": torch.zeros(1, 4, 5, 8), "k": torch.zeros(1, 2, 5, 8), "v": torch.zeros(1, 2, 5, 8)} | change
    with pytest.raises(error, match=match):
        corope_attention(**arguments)


def test_autocast():
    q, k, v, _ = make(1, 2, 1, 6, 8, F32)
    with torch.autocast("cpu", torch.bfloat16):
        assert corope_attention(q, k, v).dtype == torch.bfloat16
        assert corope_attention(q.double(), k.double(), v.double()).dtype == F64


# ---- the kernels


@interpreted
@quiet
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1, 32), F16),
        ((2, 2, 1, 17, 32), F32),
        ((1, 3, 1, 45, 64), F16),  # three heads in a tile of four
        ((2, 16, 2, 18, 32), F16),  # blocks and heads in one grid
        ((1, 8, 1, 37, 32), F16),
        ((1, 2, 1, 67, 32), F16),
        ((1, 2, 2, 17, 128), F32),
        ((1, 1, 1, 21, 34), F32),  # D with padding
    ],
    ids=str,
)
def test_kernels(shape, dtype):
    hold_kernels(make(*shape, dtype))


@interpreted
@quiet
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale_and_base(scale):
    hold_kernels(make(1, 2, 1, 35, 32, F32), base=7.0, scale=scale)


@interpreted
@quiet
def test_more_heads_than_a_program_holds():
    """Chunks of a group add their shares of the distance gradients, which are linear, to the same leader."""
    config = CoRopeConfig(16, 16, heads=2, num_warps=4)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, *stats = kernels.corope_forward(q, k, v, base=100.0, softmax_scale=0.2, config=config)
            ctx.save_for_backward(q, k, v, o, *stats)
            return o

        @staticmethod
        def backward(ctx, do):
            return kernels.corope_backward(do, *ctx.saved_tensors, base=100.0, softmax_scale=0.2, config=config)

    hold_kernels(make(1, 3, 1, 19, 32, F32), base=100.0, scale=0.2, function=Chunked.apply)


@interpreted
@quiet
def test_strides_and_expanded_gradients():
    q, k, v, _ = make(1, 2, 1, 20, 40, F32)
    k = torch.randn(1, 1, 20, 80, generator=torch.Generator().manual_seed(1))[..., ::2]
    do = torch.ones(()).expand(q.shape)
    hold_kernels((q[..., 3:35], k[..., 4:36], v[..., :32].transpose(2, 3).contiguous().transpose(2, 3), do[..., :32]))


@interpreted
def test_double_backward_raises():
    q, k, v, _ = (x.requires_grad_() for x in make(1, 1, 1, 3, 32, F32))
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(CoRopeAttention.apply(q, k, v, 10.0, 0.1).sum(), q, create_graph=True)


@triton.jit
def write_phases(out_ptr, mileage_ptr, local_ptr, multiples_ptr, turns_ptr, D: tl.constexpr, PADDED: tl.constexpr,
                 ROWS: tl.constexpr, METHOD: tl.constexpr):  # fmt: skip
    """cos and sin of every row's distance (mileage in fixed point plus local steps) at each frequency."""
    rows, pairs, key = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, 1)
    whole, rest = kernels.split_mileage(tl.load(mileage_ptr + rows))
    local = tl.load(local_ptr + rows)[:, None]
    cos, sin = kernels.distance_phases(pairs, whole, rest, local, (multiples_ptr, turns_ptr), D, METHOD)
    out = out_ptr + (rows[:, None, None] * (D // 2) + pairs[None, :, None]) * 2 + key
    exists = pairs[None, :, None] < D // 2
    tl.store(out, cos, mask=exists)
    tl.store(out + 1, sin, mask=exists)


@interpreted
@quiet
@pytest.mark.parametrize("method", ["poly", "libdevice", "table"])
@pytest.mark.parametrize("base", [10000.0, 0.3])
def test_phases_stay_exact(method, base):
    """At 8K steps, and at a million, a float32 distance times a frequency would be 2e-4 and 6e-2 off."""
    head_dim, rows = 62, 32
    generator = torch.Generator().manual_seed(0)
    largest = torch.tensor([8192.0, 2.0**20], dtype=F64).repeat(rows // 2)
    mileage = (torch.rand(rows, generator=generator, dtype=F64) * largest * 2**23).to(torch.int64)
    mileage[0], mileage[1] = 0, -3  # what rounding differences of two passes can leave at the diagonal
    local = torch.rand(rows, generator=generator) * 64
    out = torch.zeros(rows, head_dim // 2, 2)
    tables = kernels.frequency_tables(base, head_dim, torch.device("cpu"))
    write_phases[(1,)](out, mileage, local, *tables, D=head_dim, PADDED=32, ROWS=rows, METHOD=method)
    omega = base ** -(torch.arange(head_dim // 2, dtype=F64) / (head_dim // 2))
    angle = (mileage.double() / 2**23 + local.double())[:, None] * omega
    expected = torch.stack((angle.cos(), angle.sin()), -1)
    # What remains: local times the frequency, two roundings of at most T * 2**-24 turns, and the evaluation.
    turns = 1.0 + 64 * float(omega.max()) / (2 * math.pi)
    limit = 2 * math.pi * 2 * turns * 2.0**-24 + 6e-7
    assert float((out.double() - expected).abs().max()) < limit


# ---- what stands around it


@interpreted
@quiet
def test_verification_tells_right_from_wrong(monkeypatch):
    from verification.corope import CoRopeCheck
    from verification.runner import CheckTask

    task = CheckTask(CoRopeCheck("short", 1, 2, 1, 9, 32), F32, "cpu")
    assert [(row.tensor, row.verdict) for row in task.run()] == [(name, "ok") for name in NAMES]
    right = kernels.frequency_tables
    # A distance that is one part in a thousand too long.
    monkeypatch.setattr(kernels, "frequency_tables", lambda *x: (right(*x)[0], right(*x)[1] * 1.001))
    verdicts = {row.tensor: row.verdict for row in task.run()}
    assert verdicts["o"] == verdicts["dq"] == "FAIL"
    monkeypatch.setattr(kernels, "frequency_tables", None)
    assert [row.verdict for row in task.run()] == ["FAIL"]


def test_the_example_asks_what_it_says():
    spec = importlib.util.spec_from_file_location("corope_counting", ROOT / "examples" / "corope_counting.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tokens, answers = example.batch(50, 12, torch.Generator().manual_seed(0))
    for row, answer in zip(tokens.tolist(), answers.tolist()):
        n = row[-1] - 2 * example.LETTERS + 1
        marked = [token - example.LETTERS for token in row[:-1] if token >= example.LETTERS]
        assert 1 <= n <= example.MOST and marked[-n] == answer
    for kind in ("RoPE", "Co-RoPE"):
        assert example.Model(kind)(tokens[:2]).shape == (2, example.LETTERS)
