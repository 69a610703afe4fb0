"""Every private name of the package that tests take hold of, in one place: a change of the package is a change here."""

import functools

import torch

from fused_rope_attn.attention import configs, ops, planning
from fused_rope_attn.attention.problem import Gradients, Options, Outputs, Tensors, describe, flatten, problem_of
from fused_rope_attn.generation import launch as generation_launch, problem as generation_problem
from fused_rope_attn.generation.api import rope_attention_with_kvcache
from fused_rope_attn.runtime import checks, launch as calls
from fused_rope_attn.runtime.entry import fill
from verification import decode
from verification.testing import Results, ends_of, masks_of, norms_of

OPERATORS = torch.ops.fused_rope_attn
with_kvcache = functools.partial(rope_attention_with_kvcache, return_lse=True)
write = decode.run_write
share_elements = generation_problem.share_elements
# The names by which a patched model calls the package, in integrations.transformers.attention.
OPERATORS_OF_A_PATCHED_MODEL = (
    "rope_attention",
    "rope_attention_mla",
    "rope_attention_mla_varlen",
    "rope_attention_varlen",
    "rope_attention_with_kvcache",
    "write_kvcache",
)


def described(inputs, case, *, strategy="auto", backend="triton"):
    """(Problem, Tensors) of a case, its masks included, as a public function makes them."""
    device = inputs.q.device
    masks = masks_of(case, device) | norms_of(case, device) | ({} if case.seqlens is None else ends_of(case, device))
    longest = max((max(pair) for pair in case.seqlens or ()), default=0)
    given = vars(case) | masks | {"softmax_scale": case.scale, "strategy": strategy, "backend": backend}
    tensors = fill(Tensors, inputs._asdict() | masks)
    return problem_of(tensors, fill(Options, given), case.rotary, longest), tensors


def described_for_launch(inputs, case):
    """(Problem, Tensors) of a case, as launchers take them."""
    problem, tensors = described(inputs, case)
    return problem.for_launch(), tensors


def operator_arguments(inputs, case, **options):
    """Return the arguments of ``attention_forward`` as a list; ``attention_backward`` has four before them."""
    return list(flatten(*described(inputs, case, **options)))


ARGUMENT_OF_MAX_LOGIT = -1  # whether max_logit is wanted


def run_operators(inputs, case, *, forward, backward, **options):
    """``Results`` of the two operators, called one after the other with a backend each."""
    o, lse, _ = OPERATORS.attention_forward(*operator_arguments(inputs, case, backend=forward, **options))
    dq, dk, dv, dsinks, dq_norm, dk_norm, *_ = OPERATORS.attention_backward(
        inputs.do, o, lse, False, *operator_arguments(inputs, case, backend=backward, **options)
    )
    results = Results(o, lse, dq, dk, dv)
    results.dsinks = dsinks if case.sinks else None
    if case.norms is not None:
        results.dq_norm, results.dk_norm = dq_norm, dk_norm
    return results


def saved_by_portable_forward(inputs, case, block_m, saving):
    """``Outputs`` of the portable forward pass with tiles of block_m rows, q_rot and k_rot as ``Saving`` says."""
    from fused_rope_attn.attention.portable import forward as portable_forward

    problem, tensors = described_for_launch(inputs, case)
    config = configs.ForwardConfig("prepass", configs.Tile(block_m, 32, 4, 1))
    return portable_forward.ForwardCall(problem, tensors, config, saving)(tensors)


def kvcache_arguments(q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, sinks, block_table=None):
    """The arguments of the operator ``attention_with_kvcache``: causal, a rotated cache, the scale of head dim 16."""
    tensors = (q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, None, sinks, block_table, None, None, None, None)
    return (*tensors, 16, True, 0.25, False, None, 0.0, None, None, "auto", False, True)


def go_through_the_dispatcher(monkeypatch):
    """Attention calls its operators by PyTorch's dispatcher, also where it could call the launchers directly."""
    monkeypatch.setattr(ops, "is_plain", lambda *tensors: False)


def replace_launchers(monkeypatch, forward, backward=None):
    """``forward`` and ``backward`` run in the place of the launchers of the portable and of the sm_90 kernels.

    Both are called with (problem, tensors, configuration), forward with a ``Saving`` after them and backward with
    a flag for rotated q and k; they return a launcher's results: (o, lse), or with q_rot and k_rot after them,
    and (dq, dk, dv).
    """

    def prepare_forward(problem, tensors, config, saving):
        return lambda tensors: Outputs(*forward(problem, Tensors(*tensors), config, saving))

    def prepare_backward(problem, tensors, config, is_rotated):
        return lambda tensors: Gradients(*backward(problem, Tensors(*tensors[3:]), config, is_rotated))

    monkeypatch.setattr(ops, "_launchers", lambda portable: (prepare_forward, prepare_backward))
    # Calls prepared before must not be taken for those prepared now.
    monkeypatch.setattr(calls, "_known", {})


def forget_plans():
    """Plans are remembered: after a change of the tables they must be made again."""
    planning._plan.cache_clear()
    forget_calls()


def forget_calls():
    """Every call is examined, prepared and recorded again."""
    ops.forget()
    calls.forget()


def _problem_of_call(given):
    options = {"softmax_scale": 0.1, "rotary_dim": given["q"].shape[3], "interleaved": False} | given
    tensors = Tensors(**{name: options.pop(name) for name in Tensors._fields if name in options})
    return describe(tensors, **options)


def plan_of(given):
    """Return the operators' plan for the result of ``support.planning.call``: they see (B, H, N, D) tensors."""
    return planning.plan_for(_problem_of_call(given))


def backend_of(given, *, backend):
    """Return the backend and the reason that a public function hands to the operators for such a call."""
    return planning.choose_backend(_problem_of_call(given | {"backend": backend}))


def count_prepared_steps():
    """Return the number of kinds of generation steps with prepared launches."""
    return sum(key[0] is generation_launch.prepare_step for key in calls._known)


def rotate_without_the_kernel(monkeypatch):
    """The rotation takes its reference, as on a CPU without the interpreter."""
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


def forget_warnings():
    """Messages that are given once per process are given again."""
    checks._said.clear()
    ops.forget()


def described_problems(monkeypatch):
    """A list to which the forward operator of attention, which then runs as before, adds its problems."""
    seen, call = [], ops.forward_call

    def note(problem, *given, **options):
        seen.append(problem)
        return call(problem, *given, **options)

    monkeypatch.setattr(ops, "forward_call", note)
    return seen
