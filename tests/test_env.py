"""``python -m fused_rope_attn.env`` prints the facts that a bug report needs, on every machine."""

import json
import platform
import sys

import pytest
import torch

import fused_rope_attn
from fused_rope_attn import env
from tests.support.paths import python


@pytest.mark.parametrize("interpreter", [False, True])
def test_json_names_versions_and_the_plan(interpreter):
    switches = {"TRITON_INTERPRET": "1"} if interpreter else {}
    program = "import runpy, torch; runpy.run_module('fused_rope_attn.env', run_name='__main__')"
    program += "; assert not torch.cuda.is_initialized()"
    result = python("-c", program, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", **switches)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["fused_rope_attn"] == fused_rope_attn.__version__ and facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version() and facts["triton"] == env.package_version("triton")
    assert facts["interpreter"] is interpreter
    assert facts["switches"].get("TRITON_INTERPRET") == switches.get("TRITON_INTERPRET")
    assert facts["gpus"] == [] and facts["plan"]["backend"] == "reference" and "cpu" in facts["plan"]["call"]


def test_a_missing_triton_is_said_and_cards_are_listed(monkeypatch):
    assert env.package_version("no-such-package-anywhere") is None
    card = {"index": 0, "name": "NVIDIA H200", "arch": "sm_90", "multiprocessors": 132, "memory_gib": 139.8}
    monkeypatch.setattr(env, "package_version", lambda name: None if name == "triton" else "1.0")
    monkeypatch.setattr(env.device, "cards", lambda: [card])
    monkeypatch.setattr(env, "typical_plan", lambda: {"backend": "hopper"})
    facts = env.environment()
    assert facts["triton"] is None and facts["packages"] == dict.fromkeys(env.PACKAGES, "1.0")
    assert facts["gpus"] == [card] and facts["plan"] == {"backend": "hopper"}


def test_the_report_survives_a_question_that_fails(monkeypatch):
    def broken():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(env.device, "cards", broken)
    facts = env.environment()
    assert facts["gpus"] == facts["plan"] == {"error": "RuntimeError: the driver is too old"}
    json.dumps(facts)


def test_a_command_that_fails_says_nothing():
    assert env.run_quietly(sys.executable, "-c", "print('580.1')") == "580.1"
    assert env.run_quietly(sys.executable, "-c", "raise SystemExit(3)") == ""
    assert env.run_quietly("no-such-command-anywhere") == ""


@pytest.mark.gpu
def test_a_gpu_is_described():
    facts = env.environment()
    (first, *_) = facts["gpus"]
    assert first["name"] == torch.cuda.get_device_name(0)
    assert first["multiprocessors"] > 0 and first["memory_gib"] > 1
    assert facts["driver"] and facts["plan"]["backend"] in ("triton", "hopper")
