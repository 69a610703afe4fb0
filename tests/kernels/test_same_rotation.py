"""One rotation has the same bits in every kernel.

Triton's interpreter rounds a fused multiplication once (from 3.9 on), so that a kernel that fuses another product
differs here too. It cannot show products that the compiler fuses: tests/tools/test_compile_kernels.py looks for those.
"""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk
from fused_rope_attn.attention.hopper import configs as hopper_configs, forward as hopper_forward
from fused_rope_attn.attention.portable.backward import BackwardCall
from fused_rope_attn.attention.problem import Saving
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import is_sm_90
from tests.support.internals import described_for_launch, run_operators, saved_by_portable_forward, with_kvcache, write
from tests.support.marks import interpreted
from verification.testing import Case, make_inputs, norms_of

SMALL = Case(2, 2, 2, 21, 21, 32, dtype=F16)
BASE = Case(2, 4, 4, 333, 333, 128, dtype=BF16)


def in_memory_order(x, case):
    """x (..., D) of kernels, members of pair p in columns 2p and 2p + 1, with its columns as q and k have them."""
    if case.interleaved:
        return x
    half, pairs = case.rotary // 2, torch.arange(case.head_dim // 2)
    is_rotated = pairs < half
    first = torch.where(is_rotated, pairs, pairs + half)
    second = torch.where(is_rotated, pairs + half, pairs + case.head_dim // 2)
    out = torch.empty_like(x)
    out[..., torch.cat((first, second))] = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return out


def rotated_by_every_kernel(case, monkeypatch, device):
    """{which kernel: (q or None, k)} of a case without masks and with as many queries as keys."""
    inputs = make_inputs(case, device)
    q, k, v, cos, sin, _ = inputs
    options = {"interleaved": case.interleaved, "rotary_dim": case.rotary_dim}
    norms = norms_of(case, device)
    found = {"apply_rope_qk": apply_rope_qk(q, k, cos, sin, **options, **norms)}
    if not norms:
        found["apply_rope"] = tuple(apply_rope(x, cos, sin, **options) for x in (q, k))
    # Launchers take aligned rows only; the operators copy others first.
    aligned = inputs._replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    saved = saved_by_portable_forward(aligned, case, 32, Saving.ROWS)
    found["portable forward and pre-pass"] = saved.q_rot, saved.k_rot
    made, make_buffers = [], BackwardCall._rotated
    with monkeypatch.context() as patched:
        patched.setattr(BackwardCall, "_rotated", lambda *given: made.append(make_buffers(*given)) or made[-1])
        run_operators(inputs, case, forward="triton", backward="triton", strategy="prepass")
    found["portable backward"] = made[-1]  # by its pre-process
    for name in found:
        if name.startswith("portable"):
            found[name] = tuple(in_memory_order(x, case) for x in found[name])
    new_tokens = {"steps of three tokens": 3, "a chunk": case.len_k} | ({} if norms else {"write_kvcache": case.len_k})
    for name, count in new_tokens.items():
        caches = [torch.zeros_like(x.contiguous()) for x in (k, v)]
        for first in range(0, case.len_k, count):
            used = torch.full((case.batch,), first, dtype=torch.int32, device=device)
            new_q, *new = (x[:, :, first : first + count] for x in (q, k, v))
            given = {"cache_seqlens": used, "backend": "triton", **options, **norms}
            if name == "write_kvcache":
                write(*new, *caches, cos, sin, **given)
            else:
                with_kvcache(new_q, *caches, cos, sin, *new, **given)
        found[name] = None, caches[0]
    return found


INTERPRETED = (
    replace(SMALL, interleaved=True, dtype=F32),
    replace(SMALL, rotary_dim=12, tables="random"),
    replace(SMALL, norms=1.0, norm_dtype=F16),
    replace(SMALL, norms=0.0, head_dim=24, dtype=F32, interleaved=True),
)
ON_A_GPU = (
    BASE,
    replace(BASE, head_dim=64, layout="odd", dtype=F16, interleaved=True),
    replace(BASE, head_dim=96, rotary_dim=32, tables="random"),
    replace(BASE, norms=1.0, dtype=F16, interleaved=True),
    replace(BASE, norms=0.0, head_dim=64, norm_dtype=BF16, layout="bhnd"),
    replace(BASE, norms=0.0, head_dim=256),
    replace(BASE, norms=0.0, dtype=F32, layout="odd"),
)
PARAMS = [pytest.param(case, "cpu", id=case.name, marks=interpreted) for case in INTERPRETED]
PARAMS += [pytest.param(case, "cuda", id=case.name, marks=pytest.mark.gpu) for case in ON_A_GPU]


@pytest.mark.parametrize(("case", "device"), PARAMS)
def test_every_kernel_gives_the_same_bits(case, device, monkeypatch):
    found = rotated_by_every_kernel(case, monkeypatch, device)
    if device == "cuda" and is_sm_90() and case.dtype != F32 and case.layout != "odd":
        problem, tensors = described_for_launch(make_inputs(case, device), case)
        config = hopper_configs.forward_row(case.head_dim, True, "long", False, False).config
        saved = hopper_forward.ForwardCall(problem, tensors, config, Saving.ROWS)(tensors)
        found["sm_90 forward and pre-pass"] = tuple(in_memory_order(x, case) for x in (saved.q_rot, saved.k_rot))
    (first, expected), *others = found.items()
    for name, pair in others:
        for x, y, letter in zip(pair, expected, "qk"):
            differ = 0 if x is None else int((x != y).sum())
            assert differ == 0, f"{letter} of {name}: {differ} of {y.numel()} numbers differ from those of {first}"
