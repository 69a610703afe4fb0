"""torch.library operator of the generation step, which writes the caches that it is given. It has no gradient.

Plain dispatcher registrations, as in ``ops``.
"""

from __future__ import annotations

import torch

from fused_rope_attn.generation import planning
from fused_rope_attn.generation.launch import attention_with_kvcache as launch
from fused_rope_attn.kernels.arguments import window_bounds
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import like_input
from fused_rope_attn.runtime.registration import is_plain

_LIB = torch.library.Library("fused_rope_attn", "FRAGMENT")
# window_left, window_right: -1 for unbounded. k and v None: the caches are only read.
_LIB.define(
    "attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cos, Tensor sin, Tensor? k, "
    "Tensor? v, Tensor cache_seqlens, Tensor? kv_starts, Tensor? sinks, bool cache_is_rotated, bool causal, "
    "float softmax_scale, int rotary_dim, bool interleaved, SymInt window_left, SymInt window_right, float softcap)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OPERATOR = torch.ops.fused_rope_attn.attention_with_kvcache.default


def _run(q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks, cache_is_rotated, causal, softmax_scale,
         rotary_dim, interleaved, window_left, window_right, softcap):  # fmt: skip
    if q.shape[0] * q.shape[2] == 0:
        return _fake(q)
    # The kernels index these with unit stride; they nearly always have it.
    cache_seqlens, kv_starts, sinks = (
        x if x is None or x.is_contiguous() else x.contiguous() for x in (cache_seqlens, kv_starts, sinks)
    )
    left, right = window_bounds(causal, window_left, window_right)
    with device.guard(q.device):
        out = launch(
            q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, causal=causal, softmax_scale=softmax_scale,
            rotary_dim=rotary_dim, interleaved=interleaved, rotated=cache_is_rotated, left=left, right=right,
            softcap=softcap, kv_starts=kv_starts, sinks=sinks, config=planning.decode_config(q, cache_is_rotated),
        )  # fmt: skip
    if k is not None and not k_cache.is_inference():
        # Autograd should know if it has saved a cache that is another one now.
        torch.autograd.graph.increment_version((k_cache, v_cache))
    return out


def _fake(q, *arguments):
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATOR.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


for _key in ("CPU", "CUDA"):
    _LIB.impl("attention_with_kvcache", _run, _key)
_LIB.impl("attention_with_kvcache", _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("fused_rope_attn::attention_with_kvcache", _fake, lib=_LIB)


def attention_with_kvcache(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); ``arguments`` as the operator takes them. Ordinary eager calls skip the dispatcher, as in ``ops``."""
    plain = is_plain(*(x for x in arguments[:10] if x is not None))
    return (_run if plain else _OPERATOR)(*arguments)
