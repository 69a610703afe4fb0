"""Every private name of the package that tests take hold of, in one place: a change of the package is a change here."""

import torch

from fused_rope_attn.attention import ops, planning
from fused_rope_attn.generation import planning as generation_planning
from fused_rope_attn.generation.api import _with_kvcache
from fused_rope_attn.testing import Results, masks_of

OPERATORS = torch.ops.fused_rope_attn
# The generation step with the arguments that are not public: the backend, and the first key of each sequence.
with_kvcache = _with_kvcache
# The names by which a patched model calls the package, in fused_rope_attn.integrations.transformers.attention.
OPERATORS_OF_A_PATCHED_MODEL = ("rope_attention", "rope_attention_varlen", "_with_kvcache")


def operator_options(case, device="cpu", *, strategy="auto", backend="triton"):
    """What stands behind the tables in the schema of the operators ``attention_forward`` and ``attention_backward``:
    the case's options and, where it has masks, those too. The sinks are ``[OPTION_OF_SINKS]`` then."""
    options = (case.causal, case.scale, case.rotary, case.interleaved, strategy, backend, False)
    masks, ends, longest = masks_of(case, device), (None, None), 0
    if case.seqlens is not None:
        ends = torch.tensor(((0, 0), *case.seqlens)).cumsum(0).int().to(device)
        ends, longest = tuple(x.contiguous() for x in ends.unbind(1)), max(max(pair) for pair in case.seqlens)
    tensors = (masks["sinks"], masks["kv_starts"], masks["kv_lens"], *ends)
    if case.window is None and not case.softcap and not any(x is not None for x in tensors):
        return options
    return (*options, *tensors, *(case.window or (-1, -1)), case.softcap, longest)


OPTION_OF_SINKS = 7


def run_operators(inputs, case, *, forward, backward):
    """``Results`` of the two operators, called one after the other with a backend each."""
    q, k, v, cos, sin, do = inputs
    options = [operator_options(case, q.device, backend=backend) for backend in (forward, backward)]
    o, lse = OPERATORS.attention_forward(q, k, v, cos, sin, *options[0])
    dq, dk, dv, dsinks = OPERATORS.attention_backward(do, q, k, v, o, lse, cos, sin, *options[1])
    results = Results(o, lse, dq, dk, dv)
    results.dsinks = dsinks if case.sinks else None
    return results


def go_through_the_dispatcher(monkeypatch):
    """Attention calls its operators by PyTorch's dispatcher, also where it could call the launchers directly."""
    monkeypatch.setattr(ops, "is_plain", lambda *tensors: False)


def _launcher(launch):
    return launch and (lambda *tensors, config, **options: launch(tensors, options, config))


def replace_portable_launchers(monkeypatch, forward, backward=None):
    """``forward`` and ``backward`` run in the place of the portable kernels' launchers. Both are called with (the
    tensors, q first; a dictionary of the call's options; the configuration) and return what a launcher returns."""
    monkeypatch.setattr(ops, "attention_forward", _launcher(forward))
    if backward is not None:
        monkeypatch.setattr(ops, "attention_backward", _launcher(backward))


def replace_sm_90_launchers(monkeypatch, forward, backward=None):
    """The same in the place of the sm_90 kernels' launchers."""
    monkeypatch.setattr(ops, "_hopper", lambda: (_launcher(forward), _launcher(backward)))


def forget_plans():
    """Plans are remembered: after a change of the tables they must be made again."""
    planning._plan.cache_clear()


def plan_of_packed_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, *, strategy, backend, deterministic):
    """The plan that the operators run for packed sequences, causal and without other masks."""
    options = (True, 0.1, q.shape[3], False, strategy, backend, deterministic)
    masks = (None, None, None, cu_seqlens_q, cu_seqlens_k, -1, -1, 0.0, longest)
    chosen, keywords = ops._launcher(q, k, v, (*options, *masks))
    assert keywords["masks"].packed
    return chosen


def set_decode_config(monkeypatch, config):
    """Every generation step runs with this configuration."""
    monkeypatch.setattr(generation_planning, "decode_config", lambda q, rotated: config)


def rotate_without_the_kernel(monkeypatch):
    """The rotation takes its reference, as on a CPU without the interpreter."""
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)
