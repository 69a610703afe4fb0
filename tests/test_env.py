"""``python -m fused_rope_attn.env`` prints the facts that a bug report needs, on every machine."""

import json
import os
import platform
import subprocess
import sys

import pytest
import torch

import fused_rope_attn
from fused_rope_attn import env
from tests.support.paths import ROOT


def run(*arguments: str, **variables: str) -> str:
    """Return the output of a process without a GPU, outside Triton's interpreter unless `variables` say otherwise."""
    surroundings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    surroundings |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} | variables
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_json_names_versions_and_the_plan():
    facts = json.loads(run("-m", "fused_rope_attn.env"))
    assert facts["fused_rope_attn"] == fused_rope_attn.__version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["triton"] == env.package_version("triton")
    assert facts["interpreter"] is False
    assert facts["gpus"] == []
    assert facts["plan"]["backend"] == "reference" and "cpu" in facts["plan"]["call"]


def test_json_sees_the_interpreter():
    facts = json.loads(run("-m", "fused_rope_attn.env", TRITON_INTERPRET="1"))
    assert facts["interpreter"] is True
    assert facts["switches"]["TRITON_INTERPRET"] == "1"


def test_importing_starts_no_cuda():
    run("-c", "import torch, fused_rope_attn.env; assert not torch.cuda.is_initialized()")


def test_a_missing_triton_is_said(monkeypatch):
    def version(name):
        if name == "triton":
            raise env.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(env.metadata, "version", version)
    facts = env.environment()
    assert facts["triton"] is None
    assert facts["packages"] == dict.fromkeys(env.PACKAGES, "1.0")


def test_cards_are_listed_with_their_facts(monkeypatch):
    card = {"index": 0, "name": "NVIDIA H200", "arch": "sm_90", "multiprocessors": 132, "memory_gib": 139.8}
    monkeypatch.setattr(env.device, "cards", lambda: [card])
    monkeypatch.setattr(env, "typical_plan", lambda: {"backend": "hopper"})
    assert env.environment()["gpus"] == [card]


def test_the_report_survives_a_question_that_fails(monkeypatch):
    def broken():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(env.device, "cards", broken)
    facts = env.environment()
    assert facts["gpus"] == facts["plan"] == {"error": "RuntimeError: the driver is too old"}
    json.dumps(facts)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((sys.executable, "-c", "print('580.1')"), "580.1"),
        ((sys.executable, "-c", "raise SystemExit(3)"), ""),
        (("no-such-command-anywhere",), ""),
    ],
)
def test_a_command_that_fails_says_nothing(command, expected):
    assert env.run_quietly(*command) == expected


@pytest.mark.gpu
def test_a_gpu_is_described():
    facts = env.environment()
    (first, *_) = facts["gpus"]
    assert first["name"] == torch.cuda.get_device_name(0)
    assert first["multiprocessors"] > 0 and first["memory_gib"] > 1
    assert facts["driver"] and facts["plan"]["backend"] in ("triton", "hopper")
