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
from fused_rope_attn.runtime.calls import Call, Replay
from fused_rope_attn.runtime.launch import Launch
from tools import host_profile

launches, replays, refusals, launch, replay, call = {}, [], set(), Launch.__call__, Replay.__call__, Call.__call__

def note(self, *given, **tensors):
    launch(self, *given, **tensors)
    name = self.kernel.fn.__name__
    launches[name] = launches.get(name, 0) + 1

def count(self, inputs):
    results = replay(self, inputs)
    replays.append(results is not None)
    return results

def ask(self, tensors):
    results = call(self, tensors)
    refusals.add(self.refusal)
    return results

Launch.__call__, Replay.__call__, Call.__call__ = note, count, ask
host_profile.main(["--case", "hopper", "--pass", "forward and backward", "--rounds", "1", "--calls", "2"])
print(json.dumps([launches, replays, sorted(refusals)]))
"""


def test_the_kernels_are_launched_by_the_driver():
    """With it, Triton launches each kernel twice, and without it in all six calls. The third call is a replay."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    *table, found = result.stdout.strip().splitlines()
    assert sum("forward and backward" in line for line in table) == 2
    launches, replays, refusals = json.loads(found)
    assert replays == [True] * 8  # forward and backward
    assert refusals == ["", "not recorded yet", "there is no CUDA driver with the functions that launches need"]
    assert {"rotate_kernel", "forward_kernel", "preprocess_kernel", "backward_kernel"} <= set(launches)
    assert set(launches.values()) == {2 + 6}
