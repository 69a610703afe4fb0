"""`tools.host_profile` runs the launchers of sm_90 without a GPU: every launch is one that the driver would make."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.aot

PROGRAM = """
import json
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.replay import Replay
from tools import host_profile

found, replays, launch_by_triton, replay = {}, [], Launch.launch_by_triton, Replay.__call__

def note(launch, stream, tensors):
    launch_by_triton(launch, stream, tensors)
    found.setdefault(launch.compiled.name, []).append(launch.refusal)

def count(self, inputs):
    results = replay(self, inputs)
    replays.append(results is not None)
    return results

Launch.launch_by_triton, Replay.__call__ = note, count
host_profile.main(["--case", "hopper", "--pass", "forward and backward", "--rounds", "1", "--calls", "2"])
print(json.dumps([found, replays]))
"""


def test_the_kernels_are_launched_by_the_driver():
    """With it, Triton launches each kernel once, and without it every time. The fourth call is a replay."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    *table, found = result.stdout.strip().splitlines()
    assert sum("forward and backward" in line for line in table) == 2
    launches, replays = json.loads(found)
    assert replays == [True, True]  # forward and backward
    assert {"rotate_kernel", "forward_kernel", "preprocess_kernel", "backward_kernel"} <= set(launches)
    for name, refusals in launches.items():
        assert refusals == ["", *["there is no CUDA driver with cuLaunchKernelEx"] * 4], name
