"""The rotation on a GPU: head dims of models against float64, and what only a device has."""

import math

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, rope_tables
from tests.support.calls import assert_right
from tests.support.dtypes import BF16, F32
from tests.support.gpu import capture, skip_below_free_memory
from verification.calls import Machine
from verification.rotation import RopeCheck

pytestmark = pytest.mark.gpu
with_and_without_norms = pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def given(norms, length=333):
    """Return the arguments of ``apply_rope_qk``, those before the tables with gradients."""
    tensors = {name: normal(2, heads, length, 128, seed=heads) for name, heads in (("q", 6), ("k", 2))}
    if norms:
        tensors |= {name: normal(128, dtype=F32, seed=i) for i, name in enumerate(("q_norm", "k_norm"))}
    tables = zip(("cos", "sin"), rope_tables(length, 128, device="cuda"))
    return {name: x.requires_grad_() for name, x in tensors.items()} | dict(tables)


def results(function, tensors):
    """Return the outputs of a function of such arguments, and all gradients."""
    outs = function(**tensors)
    leaves = [x for x in tensors.values() if x.requires_grad]
    return *outs, *torch.autograd.grad(sum(out.float().square().sum() for out in outs), leaves)


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (128, {"form": "sbhd", "names": ("q", "k", "v")}),
        (80, {"tables": "random", "interleaved": True, "positions": "ids"}),
        (128, {"norms": 0.0}),
        (256, {"norms": 1.0, "form": "bshd"}),
        (96, {"norms": 0.0, "rotary_dim": 32, "interleaved": True, "norm_eps": 1e-5}),
    ],
    ids=str,
)
def test_head_dims_of_models(head_dim, changes):
    assert_right(RopeCheck(2, 6, 2, 333, 400, head_dim, dtype=BF16, **changes), Machine.of("cuda"))


@with_and_without_norms
def test_in_a_graph(norms):
    tensors, other, module = given(norms), given(norms), RotaryEmbedding(128)
    if not norms:
        tensors["position_ids"] = other["position_ids"] = torch.arange(333, device="cuda").flip(0)

    def run(tensors):
        return *results(apply_rope_qk, tensors), *module(tensors["q"], tensors["k"])

    graph, found = capture(lambda: run(tensors))
    for x in found:
        x.detach().fill_(math.nan)
    with torch.no_grad():
        tensors["q"].copy_(other["q"].mul_(2))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, run(other)))


@with_and_without_norms
def test_reruns_are_bitwise_equal(norms):
    tensors = given(norms, 2000)
    first = results(apply_rope_qk, tensors)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(results(apply_rope_qk, tensors), first))


@pytest.mark.unpoisoned
@with_and_without_norms
def test_compile(norms):
    torch._dynamo.reset()
    module, options = RotaryEmbedding(128, interleaved=True), {"norm_eps": 1e-5, "norm_offset": 1.0} if norms else {}

    def run(**tensors):
        q, k = apply_rope_qk(**tensors | {"q": 2 * tensors["q"]}, **options)
        return module(q, k)

    compiled = torch.compile(run, fullgraph=True)
    for length in (60, 64, 100):
        tensors = given(norms, length)
        for x, y in zip(results(compiled, tensors), results(run, tensors)):
            torch.testing.assert_close(x, y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device():
    cos, sin = (t.to("cuda:1") for t in rope_tables(64, 128))
    x = torch.randn(2, 4, 64, 128, device="cuda:1", dtype=BF16)
    expected = apply_rope(x.to("cuda:0"), cos.to("cuda:0"), sin.to("cuda:0"))
    assert torch.equal(apply_rope(x, cos, sin).cpu(), expected.cpu())


@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_more_than_two_to_the_31_elements(layout):
    """The elements past the 2**31st, and strides inside a tile that pass it."""
    skip_below_free_memory(20 << 30)
    shape = (2, 33, 2**18, 128) if layout == "bhsd" else (2, 2**18, 33, 128)
    x = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    assert x.numel() > 2**31
    cos, sin = rope_tables(2**18, 128, device="cuda")
    out = apply_rope(x, cos, sin, layout=layout)
    last, found = (y[-1:, -1:, -64:] if layout == "bhsd" else y[-1:, -64:, -1:] for y in (x, out))
    assert torch.equal(found, apply_rope(last.contiguous(), cos[-64:], sin[-64:], layout=layout))
    del x, out, last, found
    torch.cuda.empty_cache()
    storage = torch.empty(2**32 + 2**20, dtype=BF16, device="cuda")
    for size, strides in (((1, 4, 3, 128), (0, 2**30, 128, 1)), ((1, 2, 4, 128), (0, 128, 2**30, 1))):
        far = storage.as_strided(size, strides)
        far.copy_(normal(*size))
        assert torch.equal(apply_rope(far, cos, sin), apply_rope(far.contiguous(), cos, sin))


def test_a_short_rotation_with_a_long_tail():
    """Two sections of one pair each, and 124 columns that pass through, which a tile holds as well."""
    check = RopeCheck(2, 12, 12, 310, 408, 128, dtype=F32, rotary_dim=4, positions="two ids", interleaved=True,
                      tables="random", form="bshd", memory=("bnhd", "bnhd", "wide", "wide"))  # fmt: skip
    assert_right(check, Machine.of("cuda"))
