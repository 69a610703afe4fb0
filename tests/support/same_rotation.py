"""One rotation by every kernel that writes it to memory: q and k of a call, in the order of their columns in memory."""

import torch

from fused_rope_attn import apply_rope, apply_rope_qk
from fused_rope_attn.attention.portable.backward import BackwardCall
from fused_rope_attn.attention.problem import Saving
from tests.support.internals import run_operators, saved_by_portable_forward, with_kvcache, write
from verification.testing import make_inputs, norms_of


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


def rotated_by_backward(inputs, case, monkeypatch):
    """Return q and k as the pre-process of the portable backward pass rotates them."""
    found = []
    make_buffers = BackwardCall._rotated

    def keep(call, q, k):
        found[:] = make_buffers(call, q, k)
        return tuple(found)

    monkeypatch.setattr(BackwardCall, "_rotated", keep)
    run_operators(inputs, case, forward="triton", backward="triton", strategy="prepass")
    monkeypatch.undo()
    return found


def rotated_by_every_kernel(case, monkeypatch, device="cpu"):
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
    found["portable backward"] = rotated_by_backward(inputs, case, monkeypatch)
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


def assert_one_rotation(found):
    """Every kernel's q and k have the bits of the first one's."""
    (first, expected), *others = found.items()
    for name, pair in others:
        for x, y, letter in zip(pair, expected, "qk"):
            differ = 0 if x is None else int((x != y).sum())
            assert differ == 0, f"{letter} of {name}: {differ} of {y.numel()} numbers differ from those of {first}"
