"""Helpers of attention's tests: runs of a case that are compared with float64, gradients, packed cases."""

from dataclasses import replace
from functools import partial

import torch

from verification.testing import (
    DRAWS,
    Case,
    RandomRounding,
    Results,
    compare,
    make_inputs,
    noise_of_zero,
    run_op,
    run_reference,
)


def assert_matches_float64(case, inputs, out, label=""):
    """Every output and gradient in ``out`` (``Results``) is within the tolerance of float64. The gradients of
    sinks and of norms' weights have no rows of their own, so that each counts as one row; they are compared where
    ``out`` has them."""

    def draws(name):
        """The second opinion of ``compare``: eager results with other roundings, made on demand."""
        with RandomRounding(torch.Generator(inputs.q.device).manual_seed(0)):
            for _ in range(DRAWS):
                yield torch.atleast_2d(getattr(run_reference(inputs, case), name))

    references = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    more = [name for name in ("dsinks", "dq_norm", "dk_norm", "max_logit") if getattr(out, name, None) is not None]
    for name in (*Results._fields, *more):
        tensors = (torch.atleast_2d(getattr(x, name)) for x in (out, *references))
        given = {"grad": name[0] == "d", "dtype": case.dtype, "zero": noise_of_zero(name, case, inputs)}
        result = compare(name, *tensors, **given, draws=partial(draws, name))
        assert result.ok, f"{case.name}{label}: {result}"


def run_and_compare(case, inputs=None, *, strategy, **options):
    """Run the portable kernels and compare with float64: dtypes too, and the inputs stay as they were. The results.

    options: of ``run_op``.
    """
    inputs = make_inputs(case) if inputs is None else inputs
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, backend="triton", strategy=strategy, **options)
    assert all(torch.equal(x, y) for x, y in zip(before, inputs)), "inputs were modified"
    for name in Results._fields:
        assert getattr(out, name).dtype == (torch.float32 if name == "lse" else case.dtype), name
    assert not case.sinks or out.dsinks is not None
    assert case.norms is None or out.dq_norm.dtype == out.dk_norm.dtype == case.norm_dtype
    assert_matches_float64(case, inputs, out, f" [{strategy}]")
    return out


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
