"""A window's size is a number that kernels read: other sizes need no other version of them.

Triton asks a hook before it compiles, with the key under which it keeps the kernel. The hook here notes the key and
declines. This file is also the program that counts keys, without a GPU and without compiling, because the compiler may
have been replaced by the interpreter in the process of the tests.
"""

import json

import torch

from fused_rope_attn.attention.configs import ForwardConfig, Tile
from fused_rope_attn.generation.configs import decode
from tests.support.paths import python
from tools import aot, compile_kernels, decode_jobs
from tools.jobs import feature_options

PLAIN = {"arch": "sm_90", "dtype": torch.bfloat16, "head_dim": 64}
FORWARD = compile_kernels.Job(**PLAIN, direction="forward", config=ForwardConfig("prepass", Tile(64, 64, 4, 2)))
STEP = decode_jobs.DecodeJob(**PLAIN, config=decode("sm_90", 2, 64, True))


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
            options = feature_options(False, False, False) | {"window": None if left is None else (left, -1)}
            for module, job in ((compile_kernels, FORWARD), (decode_jobs, STEP)):
                module.feature_options = lambda *features, options=options: options
                job.launch()
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
