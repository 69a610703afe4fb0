"""``return_max_logit``: the results and their order, and the kernels that run."""

import pytest
import torch

from fused_rope_attn import plan, plan_varlen
from fused_rope_attn.attention.hopper.forward_kernel import max_logit_kernel
from tests.support.operators import assert_close, differentiated, kernel_or_reference, small_call
from tests.support.planning import call, kinds, packed_call


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("name", ["plain", "bshd", "masks", "packed"])
def test_the_results_and_their_order(backend, name):
    """max_logit is the last result, with lse or without, and changes no other result and no gradient."""
    run, tensors = small_call(name, return_max_logit=True, backend=backend)
    o, lse, max_logit, *gradients = differentiated(run, tensors)
    assert max_logit.shape == (2, 2) and max_logit.dtype == torch.float32
    pair = small_call(name, return_max_logit=True, return_lse=False, backend=backend)[0](*tensors.values())
    assert_close(pair, (o, max_logit), 0.0)
    without, _ = small_call(name, return_max_logit=False, backend=backend)
    assert_close(differentiated(without, tensors), (o, lse, *gradients), 0.0)


@pytest.mark.parametrize("ends", [None, [0, 3, 3, 10, 37], [0, 3, 10], [0, -5, 12, 90]])
def test_the_maximum_over_rows(ends):
    """The second launch of the sm_90 forward, over batches and packed rows: empty sequences and wrong ends too."""
    highest = torch.randn(2, 3, 37) if ends is None else torch.randn(3, 37)
    cu_q, entries = (None, 2) if ends is None else (torch.tensor(ends, dtype=torch.int32), len(ends) - 1)
    found = torch.full((entries, 3), float("nan"))
    max_logit_kernel[(entries * 3,)](highest, found, cu_q, H=3, NQ=37, BLOCK=8)
    if ends is None:
        assert torch.equal(found, highest.amax(-1))
    else:
        rows = torch.nn.functional.pad(highest, (0, 1), value=float("-inf"))
        for i, (a, b) in enumerate(zip(ends, ends[1:])):
            assert torch.equal(found[i], rows[:, [*range(max(a, 0), min(b, 37)), 37]].amax(-1))


@kernel_or_reference("reference", "triton")
def test_rows_after_the_last_sequence(backend):
    """They have no maximum of their own, also if there is no sequence at all."""
    for ends in ([0, 3, 7], [0, 3], [0]):
        ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor(ends, dtype=torch.int32))
        run, tensors = small_call("packed", **ends, backend=backend)
        o, _, max_logit = run(*tensors.values())
        assert max_logit.shape == (len(ends["cu_seqlens_q"]) - 1, 2) and bool(max_logit.isfinite().all())
        assert not bool(o[int(ends["cu_seqlens_q"][-1]) :].any())


def test_the_kernels_that_serve_it(arch):
    """Those of other calls, except that none are inline by themselves: a launch has to fill it anyway."""
    assert plan(**call(return_max_logit=True)) == plan(**call()) and kinds(plan(**call())) == "HH"
    tiny = call(64, batch=1, return_max_logit=True)
    assert plan(**tiny | {"return_max_logit": False}).strategy == "inline"
    assert plan(**tiny).strategy == "prepass" and plan(**tiny, strategy="inline").strategy == "inline"
    assert plan_varlen(**packed_call(2, 64, 64, return_max_logit=True)).strategy == "prepass"
