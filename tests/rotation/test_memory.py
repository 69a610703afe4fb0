"""The rotation reads and writes memory: strides, offsets beyond 32 bits, nothing outside the tensors."""

import sys

import pytest
import torch

from fused_rope_attn import apply_rope, rope_tables
from tests.support.dtypes import F64
from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import KINDS, assert_close, normal, rotate_by_matrix, strided

pytestmark = ignore_overflow


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind, interleaved):
    x = strided(normal(2, 3, 9, 16).float(), kind)
    cos, sin = rope_tables(9, 12)
    leaf = x.detach().requires_grad_()
    out = apply_rope(leaf, cos, sin, rotary_dim=12, interleaved=interleaved)
    assert_close(out.detach(), rotate_by_matrix(x.double(), cos.double(), sin.double(), 12, interleaved, False), 1e-5)
    do = strided(normal(2, 3, 9, 16, seed=2).float(), kind)
    (dx,) = torch.autograd.grad(out, leaf, do)
    assert_close(dx, rotate_by_matrix(do.double(), cos.double(), sin.double(), 12, interleaved, True), 1e-5)
    (dx,) = torch.autograd.grad(apply_rope(leaf, cos, sin, rotary_dim=12, interleaved=interleaved).sum(), leaf)
    assert_close(
        dx, rotate_by_matrix(torch.ones(x.shape, dtype=F64), cos.double(), sin.double(), 12, interleaved, True), 1e-5
    )


def test_tables_with_odd_strides():
    cos, sin = (strided(t[None, None], "columns apart")[0, 0] for t in rope_tables(9, 16))
    x = normal(1, 2, 9, 16).float()
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x, cos.contiguous(), sin))
    assert torch.equal(apply_rope(x, cos.mT.contiguous().mT[None], sin[None]), apply_rope(x, cos, sin))


def test_memory_order_follows_the_input():
    cos, sin = rope_tables(9, 16)
    for kind in ("contiguous", "bshd view"):
        x = strided(normal(2, 3, 9, 16).float(), kind).requires_grad_()
        out = apply_rope(x, cos, sin)
        assert out.stride() == x.stride()
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@interpreted
@pytest.mark.parametrize("axis", ["batch", "head", "row", "column"])
def test_offsets_pass_two_to_the_31(axis):
    """Strides that fit 32 bits, products that do not; only the touched pages are real."""
    far, near = 2**30, 64
    sizes = {"batch": (3, 2, 2, 16), "head": (1, 3, 2, 16), "row": (1, 2, 3, 16), "column": (1, 1, 1, 16)}[axis]
    strides = {
        "batch": (far, near, 16, 1),
        "head": (near, far, 16, 1),
        "row": (near, 16, far, 1),
        "column": (1, 1, 1, far // 7),
    }[axis]
    x = normal(*sizes).float()
    cos, sin = rope_tables(3, 16)
    expected = apply_rope(x, cos, sin)
    storage = torch.empty(2**31 + 2**29)
    view = storage.as_strided(sizes, strides)
    view.copy_(x)
    out = torch.empty(2**31 + 2**29).as_strided(sizes, strides)
    assert torch.equal(apply_rope(view, cos, sin, out=out), expected)
    apart = (2**30, 1) if axis == "batch" else (0, 2**30)
    ids = torch.empty(2**31 + 2**29, dtype=torch.int32).as_strided((sizes[0], sizes[2]), apart)
    ids.copy_(torch.arange(sizes[2]).expand(sizes[0], -1))
    assert torch.equal(apply_rope(x, cos, sin, position_ids=ids), expected)


GUARD = """
import torch
from fused_rope_attn import apply_rope, apply_rope_qk
from tests.support.guard_pages import abut

for shape, layout, width, options in (
    ((1, 3, 37, 24), "bhsd", 5, {"rotary_dim": 10}),
    ((1, 37, 3, 24), "bshd", 24, {"interleaved": True}),
    ((2, 5, 9, 12), "bhsd", 6, {"interleaved": True, "position_ids": torch.randint(0, 40, (2, 9))}),
    ((2, 5, 9, 12), "bhsd", 3, {"rotary_dim": 12, "position_ids": torch.randint(0, 40, (2, 2, 9))}),
    ((19, 3, 10), "thd", 5, {"cu_seqlens": torch.tensor([0, 4, 11, 19], dtype=torch.int32)}),
):
    x, cos, sin = torch.randn(shape), torch.randn(40, width), torch.randn(40, width)
    expected = apply_rope(x, cos, sin, layout=layout, **options)
    for at_end in (True, False):
        guarded = {k: abut(v, at_end) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        tensors = [abut(t, at_end) for t in (x, cos, sin)]
        out = apply_rope(*tensors, layout=layout, out=abut(torch.zeros_like(x), at_end), **guarded)
        assert torch.equal(out, expected), (shape, layout)

for width, options in ((12, {}), (5, {"interleaved": True})):
    tensors = [torch.randn(1, heads, 9, 24) for heads in (3, 1)] + [torch.randn(40, width) for _ in range(2)]
    weights = torch.randn(2, 24).unbind()
    names, dos = ("q_norm", "k_norm"), [torch.randn_like(x) for x in tensors[:2]]
    found = []
    for place in (lambda t: t, lambda t: abut(t, True), lambda t: abut(t, False)):
        leaves = [place(t).detach().requires_grad_() for t in (*tensors[:2], *weights)]
        outs = apply_rope_qk(*leaves[:2], *map(place, tensors[2:]), **dict(zip(names, leaves[2:])), **options)
        found.append((*outs, *torch.autograd.grad(outs, leaves, [place(do) for do in dos])))
    assert all(torch.equal(x, y) for more in found[1:] for x, y in zip(found[0], more)), options
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    hold_within_bounds(GUARD)
