"""The rotations that the rivals use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baselines.base import Package, Rotation

Tables = tuple[Tensor, Tensor]


HF_ROTATION = Package("transformers", "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb")
LIGER_ROTATION = Package("liger-kernel", "liger_kernel.ops.rope", "LigerRopeFunction")


def specialised(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that gets kernels of its own for every shape: the rival at its best."""
    # The backward is timed on a graph that is kept, which donated buffers forbid; a rotation gives none.
    # Eight shapes would be the limit.
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(function, dynamic=False, fullgraph=True)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    apply_rotary_pos_emb = HF_ROTATION.load()

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # float32 tables promote; Inductor keeps the float32 in registers and writes the rounded result only.
        q_rot, k_rot = apply_rotary_pos_emb(q, k, cos, sin)
        return q_rot.to(q.dtype), k_rot.to(k.dtype)

    return specialised(rotate)


def _rotate_hf(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    return HF_ROTATION.load()(q, k, *tables)


def _rotate_liger(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    return LIGER_ROTATION.load().apply(q, k, *tables)


def _rotate_compiled(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    return _compiled()(q, k, *tables)


# The function of transformers as its models call it: eight launches, tables in q's dtype, every step rounded.
HF = Rotation("HF rope", _rotate_hf, half_tables=True, missing=HF_ROTATION.missing)

# One launch for q and k, which are overwritten: in a model they are fresh projections without another reader, so
# that is what is timed, without any copy. Timing it again and again on the same q and k rotates them further and
# further: the same work on other values of the same size. In its backward the gradients that the attention hands over
# are rotated in place too, after a copy where their memory order is not (B, N, H, D); the copy is what the pair costs.
LIGER = Rotation("Liger rope", _rotate_liger, in_place=True, missing=LIGER_ROTATION.missing)

# The same formula as HF's, one fused kernel each way, float32 tables, rounded once.
COMPILED = Rotation("compiled rope", _rotate_compiled, missing=HF_ROTATION.missing)


def _rotate_eager(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return q * cos + torch.cat((-q2, q1), -1) * sin, k * cos + torch.cat((-k2, k1), -1) * sin


# The formula of HF without a package, so that a compiler can trace the code around it too.
EAGER = Rotation("eager rope", _rotate_eager, half_tables=True)


def _rotate_apart(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    from fused_rope_attn import apply_rope_qk

    return apply_rope_qk(q, k, *tables)


# This package's own, which is on every machine: attentions are compared by it that no package installs with a rotation.
APART = Rotation("rotation apart", _rotate_apart)
