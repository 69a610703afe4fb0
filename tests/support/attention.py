"""Helpers of attention's tests: runs of a case that are compared with float64, gradients, packed cases."""

from dataclasses import replace
from functools import partial

import torch

from verification.attention import AttentionCheck
from verification.testing import Case, Results


def assert_matches_float64(case, inputs, out):
    """Every output and gradient in ``out`` (``Results``) is within the tolerance of float64. The gradients of sinks and
    of norms' weights count as one row; they, and max_logit, are compared where ``out`` has them."""
    check = AttentionCheck.of(case)
    references = check.references(check.made(inputs), inputs.q.device)
    for name in (*Results._fields, "dsinks", "dq_norm", "dk_norm", "max_logit"):
        x = getattr(out, name, None)
        if name in Results._fields or x is not None:
            result = references.compare(name, x if x.ndim > 2 else x.reshape(references.exact[name].shape))
            assert result.ok, f"{case.name}: {result}"


def leaves(inputs, wanted="qkv"):
    """Return copies of q, k and v; those named in ``wanted`` require a gradient."""
    return [x.detach().clone().requires_grad_(name in wanted) for name, x in zip("qkv", inputs[:3])]


def gradients(function, inputs):
    """[o, dq, dk, dv] of ``function(q, k, v)``, with the gradient ``inputs.do`` for o."""
    q, k, v = leaves(inputs)
    o = function(q, k, v)
    o.backward(inputs.do.to(o.dtype))
    return [o.detach(), q.grad, k.grad, v.grad]


def assert_equal(xs, ys):
    """Tensor by tensor the same bits."""
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        assert torch.equal(x, y), f"tensor {i}"


def packed_case(base, seqlens, behind=(0, 0), **changes):
    """Return ``base`` with packed sequences of so many tokens (or (queries, keys)), and after the last of them
    ``behind`` = (rows of q, rows of k) more."""
    pairs = tuple(n if isinstance(n, tuple) else (n, n) for n in seqlens)
    total_q, total_k = (sum(n[i] for n in pairs) + behind[i] for i in range(2))
    return replace(base, batch=1, len_q=total_q, len_k=total_k, seqlens=pairs, **changes)


def sequences_of(case):
    """Return (first query, queries, first key, keys) of each sequence, and of the unseeing rows after the last."""
    first_q = first_k = 0
    for len_q, len_k in case.seqlens:
        yield first_q, len_q, first_k, len_k
        first_q, first_k = first_q + len_q, first_k + len_k
    yield first_q, case.len_q - first_q, first_k, 0


# Cases of a few tiles, for tests in the interpreter.
TWO_BATCHES = Case(2, 1, 1, 70, 110, 16)
packed = partial(packed_case, Case(1, 2, 1, 0, 0, 16))
