"""The attention operators: as PyTorch's dispatcher sees them, the kernels that they run, and what they save."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from fused_rope_attn.attention.arguments import padded_rows
from fused_rope_attn.attention.configs import BUCKETS
from fused_rope_attn.attention.hopper import backward as hopper_backward, forward as hopper_forward
from fused_rope_attn.attention.portable import backward as portable_backward, forward as portable_forward
from fused_rope_attn.attention.problem import Saving
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Recording
from fused_rope_attn.runtime.layouts import has_descriptor
from tests.support import internals
from tests.support.attention import TWO_BATCHES, assert_equal, packed, packed_case, sequences_of
from tests.support.dtypes import F32
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import MASKS, SMALL, Record, differentiated, kernel_or_reference, small_call
from tests.support.planning import HOPPER, PORTABLE
from tools.compile_kernels import Job, find_jobs
from verification.testing import Case, make_inputs

pytestmark = ignore_overflow
MASKED = replace(SMALL, **MASKS | {"sinks": True, "kv_starts": (0, 2), "kv_lens": (9, 5)})
# The last ones have layouts and empties.
CHECKED = {
    "plain": (replace(SMALL, full_width=True, layout="bhnd"), "prepass"),
    "masks": (MASKED, "inline"),
    "norms": (replace(SMALL, sinks=True, norms=1.0), "prepass"),
    "odd": (replace(SMALL, layout="odd", head_dim=24), "prepass"),
    "one batch": (replace(SMALL, layout="one batch"), "inline"),
    "no batch": (replace(SMALL, batch=0), "prepass"),
    "no queries": (replace(SMALL, len_q=0), "inline"),
    "no keys": (replace(SMALL, len_k=0), "prepass"),
}


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name):
    """The gradients of sinks and norms pass through autograd, the dispatcher and a traced graph too."""
    case, strategy = CHECKED[name]
    inputs = make_inputs(case)
    arguments = internals.operator_arguments(inputs, case, strategy=strategy)
    arguments[internals.ARGUMENT_OF_MAX_LOGIT] = case.sinks
    forward, backward = internals.OPERATORS.attention_forward.default, internals.OPERATORS.attention_backward.default
    o, lse, _ = forward(*arguments)
    for operator, given in ((forward, arguments), (backward, (inputs.do, o, lse, False, *arguments))):
        every = name in ("plain", "masks", "norms")
        torch.library.opcheck(operator, given, **({} if every else {"test_utils": "test_faketensor"}))
    is_weight = [isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim == 1 for x in arguments]
    differentiable = [
        x.detach().clone().requires_grad_() if i < 3 or is_weight[i] else x for i, x in enumerate(arguments)
    ]
    torch.library.opcheck(forward, differentiable, test_utils="test_aot_dispatch_dynamic")


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("name", ["bshd", "latent"])
def test_results_of_bshd_are_contiguous(backend, name):
    run, tensors = small_call(name, layout="bshd", backend=backend)
    tensors = {x: (y.transpose(1, 2) if name == "latent" else y).contiguous() for x, y in tensors.items()}
    o, _, *gradients = differentiated(run, tensors)
    assert o.is_contiguous()
    assert all(x.is_contiguous() if backend == "triton" else x.stride(3) == 1 for x in gradients)


@interpreted
def test_norms_without_unit_strides():
    run, tensors = small_call("norms and intervals", backend="triton")
    apart = [x.repeat_interleave(2)[::2] if x.ndim == 1 else x for x in tensors.values()]
    assert torch.equal(run(*apart)[0], run(*tensors.values())[0])


@interpreted
@pytest.mark.unpoisoned
def test_nothing_of_bshd_is_copied():
    run, tensors = small_call("bshd", backend="triton", return_lse=False)
    leaves = [x.contiguous().requires_grad_() for x in tensors.values()]
    with Record() as record:
        o = run(*leaves)
        o.backward(torch.ones_like(o))
    work = {name for name in record.operators if "transpose" not in name and "detach" not in name}
    operators = {f"fused_rope_attn.attention_{name}.default" for name in ("forward", "backward")}
    assert work == operators | {"aten.ones_like.default"}


def test_heads_share_a_section_by_the_longest_sequence():
    """Not by all tokens; as a power of two, so that batches of about the same lengths share their launches."""
    case = packed((300, 300))
    problem, _ = internals.described(make_inputs(case), case)
    launched = problem.for_launch()
    assert launched.longest(10**6) == 512 and launched.longest(400) == 400
    assert launched == problem._replace(max_seqlen=511).for_launch() != problem._replace(max_seqlen=513).for_launch()
    case = replace(TWO_BATCHES, window=(5, 0))
    assert internals.described(make_inputs(case), case)[0].longest(10**6) == 10**6


@interpreted
@pytest.mark.parametrize(
    ("name", "strategy", "kept", "others"),
    [
        ("plain", "inline", "qkv", 1),  # lse
        ("plain", "prepass", "v", 3),  # q and k rotated, lse
        ("norms and intervals", "prepass", ("q", "k", "v", "q_norm", "k_norm"), 3),
        ("through the dispatcher", "prepass", "qkv", 1),
    ],
)
def test_what_is_saved(name, strategy, kept, others, monkeypatch):
    """No copies of the inputs; q and k rotated where the kernels make and take them so, and then not as given."""
    if name == "through the dispatcher":
        internals.go_through_the_dispatcher(monkeypatch)
        name = "plain"
    run, tensors = small_call(name, backend="triton", strategy=strategy, return_lse=False)
    given = [x.detach().clone().requires_grad_() for x in tensors.values()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = run(*given)
    storages = {x.untyped_storage().data_ptr() for x in saved}
    own = {x.untyped_storage().data_ptr(): name for name, x in zip((*tensors, "o"), (*given, o))}
    assert {own[x] for x in storages & set(own)} == {*kept, "o"}
    tables = 2 + 2 * (name != "plain")  # and intervals
    assert len(storages - set(own)) == others + tables


@interpreted
def test_a_backward_pass_through_the_dispatcher():
    """A mode sees one operator, which takes what was saved, and gives what the kernels give without it."""
    run, tensors = small_call("norms and intervals", backend="triton", strategy="prepass", return_lse=False)
    given = [x.detach().clone().requires_grad_() for x in tensors.values()]
    o = run(*given)
    expected = torch.autograd.grad(o.square().sum(), given, retain_graph=True)
    with Record() as record:
        found = torch.autograd.grad(o.square().sum(), given, create_graph=True)
    assert [name for name in record.operators if "attention" in name] == ["fused_rope_attn.attention_backward.default"]
    assert_equal(found, expected)


@interpreted
@pytest.mark.parametrize("block_m", [64, 128])
def test_the_portable_forward_saves_the_tiles_that_the_sm_90_backward_reads(block_m):
    """Each sequence begins at the row of its first whole tile, with zeros after its last query."""
    case = packed_case(Case(1, 4, 2, 20, 20, 24, dtype=F32), (5, 0, 70, 33, 128), behind=(7, 3))
    inputs = make_inputs(case)
    saved = internals.saved_by_portable_forward
    rows, tiles = (saved(inputs, case, block_m, x).q_rot for x in (Saving.ROWS, Saving.TILES))
    for s, (first, length, _, _) in enumerate(sequences_of(case)):
        if s < len(case.seqlens):
            start, padded = (first // 64 + s) * 64, -(-length // 64) * 64
            assert torch.equal(tiles[:, :, start : start + length], rows[:, :, first : first + length])
            assert not tiles[:, :, start + length : start + padded].any()
    # Smaller tiles would leave padding as it was.
    assert saved(inputs, case, 32, Saving.TILES).q_rot is None


def moved(x):
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("unpack", [moved, lambda x: x.repeat_interleave(2, -1)[..., ::2]], ids=["moved", "apart"])
def test_packed_queries_are_read_by_the_kernels_that_they_were_saved_for(
    arch, tables, monkeypatch, is_portable, unpack
):
    """The sm_90 backward reads whole tiles, the portable one rows. Hooks that move what is saved do not change the
    choice, and the TMA can address what they return. Launchers that compute nothing of their own note their calls."""
    tables(BUCKETS, () if is_portable else BUCKETS)
    tokens, seen = 4096, []
    rows = tokens if is_portable else padded_rows(tokens, 1)

    def forward(problem, tensors, config, saving):
        q = tensors.q
        seen.append((type(config), saving))
        return q.clone(), q.new_zeros(q.shape[:3]).float(), q.new_zeros(1, 2, rows, 256), tensors.k.clone()

    def backward(problem, tensors, config, is_rotated):
        assert is_rotated and tensors.q.shape[2] == rows
        seen.append((type(config), all(has_descriptor(x) for x in tensors[:3])))
        return tensors.q[:, :, :tokens].clone(), tensors.k.clone(), tensors.v.clone()

    internals.replace_launchers(monkeypatch, forward, backward)
    q, k, v = (torch.ones(tokens, heads, 256, dtype=torch.bfloat16) for heads in (2, 1, 1))
    given, table = [x.requires_grad_() for x in (q, k, moved(v))], torch.ones(tokens, 128)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    # The operators themselves, because "auto" takes the reference on a CPU.
    monkeypatch.setattr("fused_rope_attn.attention.planning.choose_backend", lambda problem: ("auto", ""))
    others = table, table, ends, ends, tokens, tokens, True
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        o = rope_attention_varlen(*given, *others)
    torch.autograd.grad(o, given, torch.ones_like(o))
    rope_attention_varlen(*(x.detach() for x in given), *others)
    saved, reader = (Saving.ROWS, PORTABLE[1]) if is_portable else (Saving.TILES, HOPPER[1])
    assert seen == [(HOPPER[0], saved), (reader, True), (HOPPER[0], Saving.NOTHING)]


LAUNCHERS = (
    portable_forward.ForwardCall,
    portable_backward.BackwardCall,
    hopper_forward.ForwardCall,
    hopper_backward.BackwardCall,
    hopper_backward.LatentBackwardCall,
)
JOBS = {job.label: job for job in find_jobs(["sm_90"]) if isinstance(job, Job)}


@pytest.mark.parametrize("label", JOBS)
def test_launchers_only_allocate(label, arch, monkeypatch):
    """Between launches. Therefore eager calls can be recorded and replayed."""
    refusals, job = [], JOBS[label]

    def recorded(run):
        def record(self, *given):
            with Recording() as recording:
                out = run(self, *given)
            refusals.append(recording.refusal)
            return out

        return record

    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    monkeypatch.setattr(Launch, "__call__", lambda self, *given, **own: None)
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "__call__", recorded(launcher.__call__))
    job.launch()
    expected = ""
    if job.direction == "backward" and "sinks" in job.masks:
        expected = "it runs aten.sum.dim_IntList"  # their gradient
    elif "softcap" in job.masks and getattr(job.config, "strategy", "") == "inline":
        expected = "it runs aten.fill_.Scalar"  # the maximum of each head's logits, which no pre-pass fills
    assert refusals == [expected]
