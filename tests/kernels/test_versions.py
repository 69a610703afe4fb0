"""A window's size is a number that kernels read: other sizes need no other version of them.

Triton asks a hook before it compiles, with the key under which it keeps the kernel. The hook here notes the key and
declines. This file is also the program that counts keys, without a GPU and without compiling, because the compiler may
have been replaced by the interpreter in the process of the tests.
"""

import json

import torch

from tests.support.paths import python
from tools import aot
from tools.jobs import int32, meta

OPTIONS = {"rotary_dim": 64, "causal": True, "softmax_scale": 0.1}


def attend(window):
    """Run the portable forward pass in bfloat16, 1000 tokens of 8 heads of 64 columns."""
    from fused_rope_attn.attention.configs import ForwardConfig, Tile
    from fused_rope_attn.attention.portable.forward import ForwardCall
    from fused_rope_attn.attention.problem import Tensors, describe

    q, k, v = (meta(2, 8, 1000, 64, dtype=torch.bfloat16) for _ in range(3))
    tensors = Tensors(q, k, v, meta(1000, 32), meta(1000, 32))
    problem = describe(tensors, **OPTIONS, window=window)
    ForwardCall(problem.for_launch(), tensors, ForwardConfig("prepass", Tile(64, 64, 4, 2)))(tensors)


def decode(window):
    """Run a generation step of one new token in bfloat16, with caches of 1000 rows of 2 heads of 64 columns."""
    from fused_rope_attn.generation.configs import decode
    from fused_rope_attn.generation.launch import step_call
    from fused_rope_attn.generation.problem import StepTensors, describe_step

    q, k, v = (meta(2, heads, 1, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    caches = (meta(2, 2, 1000, 64, dtype=torch.bfloat16) for _ in range(2))
    tensors = StepTensors(q, *caches, meta(1000, 32), meta(1000, 32), k, v, int32(2))
    problem = describe_step(tensors, cache_is_rotated=True, **OPTIONS, window=window)
    step_call(problem.for_launch(), tensors, decode("sm_90", 2, 64, True))(tensors)


def count(lefts):
    """Return the number of versions that calls with these windows have, by the kernel's name; None is no window."""
    import triton

    keys = {}

    def decline(*, key, fn, **other):
        keys.setdefault(fn.jit_function.fn.__name__, set()).add(key)
        return True

    with aot.compiling_for("sm_90"), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = decline
        for left in lefts:
            for call in (attend, decode):
                call(None if left is None else (left, -1))
    return {name: len(found) for name, found in keys.items()}


def test_windows_share_one_version():
    """768 is a multiple of 16, and 1 is 1: Triton specialises such numbers where it may. No window is another call."""
    result = python("-m", "tests.kernels.test_versions")
    assert result.returncode == 0, result.stderr
    windows, with_none = json.loads(result.stdout)
    kernels = ("prepass_kernel", "forward_kernel", "decode_kernel", "combine_kernel")
    assert windows == dict.fromkeys(kernels, 1)
    assert with_none["forward_kernel"] == with_none["decode_kernel"] == 2


if __name__ == "__main__":
    print(json.dumps([count((777, 768, 1)), count((777, None))]))
