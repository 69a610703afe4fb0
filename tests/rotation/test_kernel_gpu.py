"""The rotation on a GPU: head dims of models against float64, and what only a device has."""

import functools

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, rope_tables
from tests.support.calls import assert_right
from tests.support.dtypes import BF16, F32
from tests.support.gpu import skip_below_free_memory
from tests.support.rotation import arguments_of_qk
from verification.calls import Machine
from verification.rotation import RopeCheck

pytestmark = pytest.mark.gpu
with_and_without_norms = pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])


given = functools.partial(arguments_of_qk, head_dim=128, heads=(6, 2), dtype=BF16, norm_dtype=F32, device="cuda")


def results(function, tensors):
    """Return the outputs of a function of such arguments, and all gradients."""
    outs = function(**tensors)
    leaves = [x for x in tensors.values() if x.requires_grad]
    return *outs, *torch.autograd.grad(sum(out.float().square().sum() for out in outs), leaves)


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (128, {"form": "sbhd", "names": ("q", "k", "v")}),
        (256, {"norms": 1.0, "form": "bshd"}),
        # Two sections of one pair each, and 124 columns that pass through, which a tile holds as well.
        (128, {"heads_q": 12, "heads_kv": 12, "dtype": F32, "rotary_dim": 4, "positions": "two ids", "form": "bshd",
               "interleaved": True, "tables": "random", "memory": ("bnhd", "bnhd", "wide", "wide")}),
    ],
    ids=str,
)  # fmt: skip
def test_head_dims_of_models(head_dim, changes):
    sizes = {"batch": 2, "heads_q": 6, "heads_kv": 2, "len_q": 333, "len_k": 400, "dtype": BF16}
    assert_right(RopeCheck(head_dim=head_dim, **sizes | changes), Machine.of("cuda"))


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
    """The elements past the 2**31st."""
    skip_below_free_memory(20 << 30)
    shape = (2, 33, 2**18, 128) if layout == "bhsd" else (2, 2**18, 33, 128)
    x = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    assert x.numel() > 2**31
    cos, sin = rope_tables(2**18, 128, device="cuda")
    out = apply_rope(x, cos, sin, layout=layout)
    last, found = (y[-1:, -1:, -64:] if layout == "bhsd" else y[-1:, -64:, -1:] for y in (x, out))
    assert torch.equal(found, apply_rope(last.contiguous(), cos[-64:], sin[-64:], layout=layout))
