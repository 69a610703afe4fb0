"""Attention by the kernels: eager calls, the torch.library operators, their autograd, and the launchers' calls."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_rope_attn.attention import configs, planning, problem as records
from fused_rope_attn.attention.problem import Gradients, Outputs, Problem, Saved, Saving, Tensors, flatten, rebuild
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator, in_forward_mode
from fused_rope_attn.runtime.entry import in_context_parallel
from fused_rope_attn.runtime.launch import Call, call_of, signature
from fused_rope_attn.runtime.layouts import like_input, with_aligned_rows
from fused_rope_attn.runtime.registration import Operator, is_plain


def _launchers(portable: bool) -> tuple[Callable, Callable]:
    """Return (forward, backward) of the portable or of the sm_90 backend, imported when a call first needs them.

    Each takes (problem, tensors, configuration, saving) and prepares the launches. saving: in forward a ``Saving``, in
    backward whether q and k are rotated.
    """
    if portable:
        from fused_rope_attn.attention.portable import backward, forward

        return forward.ForwardCall, backward.BackwardCall
    from fused_rope_attn.attention.hopper import backward as of_hopper
    from fused_rope_attn.attention.hopper.forward import ForwardCall

    return ForwardCall, of_hopper.backward_call


def _readable(tensors: Sequence, of_backward: bool) -> tuple:
    """Return the tensors of a pass as kernels read them; those with another layout are copied.

    Rows of q, k, v, do and o begin at multiples of 16 bytes. Tensors that only the device reads have unit stride.
    tensors: the fields of ``Tensors`` and output buffers, after do, o and lse in a backward pass.
    """
    if of_backward:
        do, o, lse, *tensors = tensors
        return (with_aligned_rows(do), with_aligned_rows(o), lse, *_readable(tensors, False))
    given, outputs = records.split_outputs(tensors, 0)
    copies: dict[str, Callable] = dict.fromkeys(("q", "k", "v", "q_nope", "k_nope"), with_aligned_rows)
    copies |= dict.fromkeys(records.READ_BY_THE_DEVICE, torch.Tensor.contiguous)
    found = {name: copy(x) for name, copy in copies.items() if (x := getattr(given, name)) is not None}
    return (*given._replace(**found), *outputs)


def _prepare(
    problem: Problem, tensors: Sequence, of_backward: bool, rotated: bool, plan: planning.Plan | None = None
) -> Callable[[Sequence], Any]:
    """Return a pass by its launches. rotated: forward saves q and k rotated, if its kernels can; backward gets such."""
    readable = _readable(tensors, of_backward)
    if not all(map(operator.is_, readable, tensors)):
        run = _prepare(problem, readable, of_backward, rotated, plan)
        return lambda tensors: run(_readable(tensors, of_backward))
    plan = plan or planning.plan_for(problem)
    config = plan.backward if of_backward else plan.forward
    prepare = _launchers(isinstance(config, (configs.ForwardConfig, configs.BackwardConfig)))[of_backward]
    if of_backward:
        return prepare(problem, tensors, config, rotated)
    saving = Saving.NOTHING
    if rotated and plan.saves_rotated:
        reads_tiles = isinstance(plan.backward, configs.HopperBackwardConfig) and problem.is_packed
        saving = Saving.TILES if reads_tiles else Saving.ROWS
    return prepare(problem, tensors, config, saving)


def forward_call(
    problem: Problem, tensors: Sequence, saves_rotated: bool = False, plan: planning.Plan | None = None
) -> Call:
    """Return the call of a forward pass, which takes these tensors and returns ``Outputs``.

    tensors: ``Tensors``, perhaps followed by a buffer for o. saves_rotated: also return q_rot and k_rot, if the kernels
    support it; else they are None. plan: of the kernels, by default that of the problem.
    """
    return call_of(_prepare, problem.for_launch(), tensors, False, saves_rotated, plan)


def run_forward(
    problem: Problem, tensors: Tensors, plan: planning.Plan | None = None, out: torch.Tensor | None = None
) -> Outputs:
    """Run a forward pass that saves nothing. plan: as in ``forward_call``. out: a buffer for o, if not new memory."""
    given = tensors if out is None else (*tensors, out)
    with device.guard(problem.device):
        return forward_call(problem, given, plan=plan)(given)


def run_backward(
    problem: Problem, do: torch.Tensor, saved: Saved, plan: planning.Plan | None = None, outputs: tuple = ()
) -> Gradients:
    """Run a backward pass. plan: as in ``forward_call``. outputs: buffers for dq, dk and dv, None for new memory."""
    given = (do, saved.o, saved.lse, *saved.tensors, *outputs)
    with device.guard(problem.device):
        return call_of(_prepare, problem.for_launch(), given, True, saved.is_rotated, plan)(given)


def _forward_impl(*arguments):
    results = run_forward(*rebuild(*arguments))
    lacks = results.max_logit is None
    return results.o, results.lse, results.lse.new_empty(0) if lacks else results.max_logit


def _backward_impl(do, o, lse, is_rotated, *arguments):
    problem, tensors = rebuild(*arguments)
    # Saved q_rot holds packed queries with padding.
    problem = problem._replace(len_q=o.shape[2])
    return without_none(run_backward(problem, do, Saved(o, lse, tensors, is_rotated)), do)


def without_none(gradients: Gradients, do: torch.Tensor) -> Gradients:
    """Return empty tensors in place of None, because an operator returns tensors only."""
    return Gradients(*(do.new_empty(0) if gradient is None else gradient for gradient in gradients))


def _forward_fake(*arguments):
    problem, tensors = rebuild(*arguments)
    q = tensors.q
    shape = problem.maxima_shape if problem.return_max_logit else (0,)
    o, lse = like_input(q, problem.value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)
    return o, lse, lse.new_empty(shape)


def backward_fake(do, o, lse, is_rotated, *arguments):
    """Return uninitialised gradients, as ``without_none`` returns them, for tracing."""
    _, tensors = rebuild(*arguments)
    dq, dk = tensors.q, tensors.k
    if is_rotated:  # the layouts of the caller's q and k are those of other tensors
        dq, dk = (o, tensors.v) if tensors.q_nope is None else (tensors.q_nope, dk)
    rest = [getattr(tensors, name) for name in _WEIGHTS]
    empty = [do.new_empty(0) if x is None else torch.empty_like(x) if x.ndim == 1 else like_input(x) for x in rest]
    return like_input(dq, tensors.q.shape[3]), like_input(dk), like_input(tensors.v), *empty


# Tensors that may have a gradient, in addition to q, k and v: name in ``Tensors`` to index in ``Gradients``.
_WEIGHTS = {"sinks": 3, "q_norm": 4, "k_norm": 5, "q_nope": 6, "k_nope": 7}


def needs_gradient(tensors: Tensors) -> bool:
    """Return whether a call of these tensors must be differentiable."""
    if not torch.is_grad_enabled():
        return False
    if tensors.q.requires_grad or tensors.k.requires_grad or tensors.v.requires_grad:
        return True
    others = (tensors.sinks, tensors.q_norm, tensors.k_norm, tensors.q_nope, tensors.k_nope)
    return any(x is not None and x.requires_grad for x in others)


class AttentionCall:
    """Attention by the kernels for all calls of one signature: ``call(tensors)`` returns (o, lse, max_logit or None).

    Args:
        problem: one that ``planning.choose_backend`` admits to the kernels.
        tensors: those of one such call. Only their presence is read.
        returns_lse: the caller gets lse, which then has a gradient.
        keyset: None in ordinary eager mode. In a call by PyTorch's dispatcher, its set of dispatch keys. The call then
            saves q and k unrotated, because the kernels are not known while a graph is traced, and not every backward
            kernel reads rotated q and k.
    """

    __slots__ = ("problem", "returns_more", "weights", "keyset", "_passes")

    def __init__(self, problem: Problem, tensors: Tensors, returns_lse: bool = True, keyset: Any = None):
        self.problem, self.keyset = problem, keyset
        self.returns_more = returns_lse or problem.return_max_logit
        self.weights = tuple((name, i) for name, i in _WEIGHTS.items() if getattr(tensors, name) is not None)
        # The forward pass with gradients (True), which also saves q and k rotated, and the one without (False).
        self._passes: dict[bool, Call] = {}

    def __call__(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        needed = needs_gradient(tensors)
        if self.keyset is None:
            call = self._passes.get(needed)
            if call is None:
                call = self._passes[needed] = forward_call(self.problem, tensors, saves_rotated=needed)
            with device.guard(self.problem.device):
                outputs = call(tensors)
        else:
            o, lse, max_logit = forward_operator.below_autograd(self.keyset, *flatten(self.problem, tensors))
            outputs = Outputs(o, lse, max_logit=max_logit)
        if not needed:
            return outputs.o, outputs.lse, outputs.max_logit
        # Those that may have a gradient, in the order of ``Gradients``.
        differentiable = tensors.q, tensors.k, tensors.v, *[getattr(tensors, name) for name, _ in self.weights]
        if self.keyset is not None:
            return apply_in_operator(Attention, self, outputs, tensors, *differentiable)
        if self.returns_more:
            return Attention.apply(self, outputs, tensors, *differentiable)
        return Attention.apply(self, outputs, tensors, *differentiable), outputs.lse, None


class Attention(SingleLevelFunction):
    """The gradient of attention. Its results are o, lse and max_logit, or o alone.

    Every further argument and result costs the host time, so that only those tensors that may have a gradient are
    arguments of their own, and lse is a result if the caller gets it.
    """

    @staticmethod
    def forward(ctx, call: AttentionCall, outputs: Outputs, tensors: Tensors, *differentiable):
        o, lse, q_rot, k_rot, max_logit = outputs
        ctx.call, ctx.is_rotated = call, q_rot is not None
        if ctx.is_rotated:
            if call.problem.has_norms:  # their gradient needs the caller's q and k
                tensors = tensors._replace(raw_q=tensors.q, raw_k=tensors.k)
            tensors = tensors._replace(q=q_rot, k=k_rot)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        if not call.returns_more:
            return o
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        o, lse, *given = ctx.saved_tensors
        call, tensors = ctx.call, Tensors(*given)._replace(dlse=dlse)
        do = torch.zeros_like(o) if do is None else do
        # With create_graph, or where dO has a tangent, the operator's own autograd must see the call, to refuse it.
        if call.keyset is None and type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            gradients = run_backward(call.problem, do, Saved(o, lse, tensors, ctx.is_rotated))
        else:
            gradients = _backward(do, o, lse, ctx.is_rotated, *flatten(call.problem, tensors))
        return None, None, None, *gradients[:3], *[gradients[i] for _, i in call.weights]


def _forward_autograd(keyset, *arguments):
    problem, tensors = rebuild(*arguments)
    return AttentionCall(problem, tensors, keyset=keyset)(tensors)


# backend="auto" is resolved inside the operators. The last result is max_logit, empty unless the call asks for it.
forward_operator = Operator(
    f"attention_forward({records.SCHEMA}) -> (Tensor, Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    function="rope_attention",
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The results after dv are empty if the call has no such tensor. With is_rotated q and k are those that an eager forward
# pass saved rotated; a second differentiation then reaches this operator through o.
_backward = Operator(
    f"attention_backward(Tensor do, Tensor o, Tensor lse, bool is_rotated, {records.SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=backward_fake,
    function="rope_attention",
    is_gradient=True,
)


def attention(
    problem: Problem, tensors: Tensors, returns_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (o, lse, max_logit) of a problem that ``planning.choose_backend`` has admitted to the kernels.

    returns_lse: lse has a gradient. max_logit is meaningful only if the problem asks for it. Tracing, fake tensors and
    modes see one operator. Ordinary calls skip the dispatcher.
    """
    if not is_plain(*tensors):
        return forward_operator(*flatten(problem, tensors))
    return AttentionCall(problem, tensors, returns_lse)(tensors)


# Calls of ``rope_attention`` by signature. A known call is not checked, described or planned again.
_known: dict[tuple, AttentionCall] = {}
_MAX_KNOWN = 4096
_WINDOW, _RETURN_LSE = map(records.Options._fields.index, ("window", "return_lse"))


def _key(tensors: Tensors, layout: Any, options: tuple) -> tuple | None:
    """Return the signature of a call, with the types of its options, because ``1 == True``.

    It is None for traced calls, in modes and under autocast.
    """
    # The signature has the classes of the tensors, and ``remember`` takes plain ones alone.
    if not is_plain() or in_context_parallel() or torch._C._is_any_autocast_enabled():  # a private name
        return None
    window, q = options[_WINDOW], tensors.q
    if window is not None and type(window) is not tuple:
        return None
    return (
        signature(tensors),
        tensors.cos is not None and (tensors.cos.requires_grad or tensors.sin.requires_grad),  # refused
        layout,
        options,
        *map(type, options),
        *map(type, window or ()),
        torch.are_deterministic_algorithms_enabled(),
        # A setting decides the precision of products in float32, and it may change between calls.
        q.dtype is torch.float32 and device.dot_precision(q.dtype),
    )


def find(tensors: Tensors, layout: Any, options: tuple) -> AttentionCall | None:
    """Return the call that was remembered for this signature, or None."""
    try:
        key = _key(tensors, layout, options)
        return None if key is None else _known.get(key)  # a graph would guard the whole dictionary
    # An argument is no tensor, an option is not hashable, or a tensor has no strides: the checks will refuse it.
    except (AttributeError, TypeError, RuntimeError):
        return None


def remember(tensors: Tensors, layout: Any, options: tuple, problem: Problem, described: Tensors) -> None:
    """Keep a call for ``find``. described: the tensors as (B, H, N, D).

    Forget all calls once there are more than any program uses in turn.
    """
    key = _key(tensors, layout, options) if is_plain(*tensors) else None
    if key is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = AttentionCall(problem, described, options[_RETURN_LSE])


def forget() -> None:
    """Forget all calls, so that each is examined again."""
    _known.clear()
