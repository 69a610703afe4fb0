"""The verification of the sm_90 backend: where it runs, and on which inputs."""

import pytest
import torch

from verification import __main__ as command


def checks(*arguments):
    return command.make_checks(command.parse(["--small", *arguments]))


@pytest.fixture
def on_an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def test_the_sm_90_backend_is_verified_where_it_runs(on_an_h100):
    served = [check for check in checks("--device", "cuda") if ("hopper", "auto") in getattr(check, "variants", ())]
    assert {check.dtype for check in served} == {torch.float16, torch.bfloat16}
    names = {check.name for check in served}
    assert {"causal", "identical reruns", "odd strides, unaligned", "empty batch", "no queries"} <= names
    assert {"D 128", "D 192", "D 256"} <= names and "no keys" not in names
    # Every mask, and the pairs of them that models combine.
    assert {"window + softcap + GQA", "sinks + window", "packed + window", "packed, a short one behind a long one",
            "kv_starts + causal + per-batch tables", "packed, NQ and NK differ, not causal"} <= names  # fmt: skip
    alone = checks("--device", "cuda", "--backend", "hopper")
    assert {check.variants for check in alone} == {(("hopper", "auto"),)}
    assert {(check.name, check.dtype) for check in alone} == {(check.name, check.dtype) for check in served}
    inline = checks("--device", "cuda", "--strategy", "inline")
    assert not any(("hopper", "auto") in check.variants for check in inline)


def test_the_sm_90_backend_is_refused_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, arguments, reason in (
        ((10, 0), (), "needs an sm_90 GPU"),
        ((9, 0), ("--strategy", "inline"), "no --strategy inline"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device, found=capability: found)
        with pytest.raises(SystemExit) as stopped:
            command.parse(["--device", "cuda", "--backend", "hopper", *arguments])
        assert stopped.value.code == 2 and reason in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert command.parse(["--device", "cuda"]).backend == ["reference", "triton"]
    with pytest.raises(SystemExit):
        command.parse(["--device", "cpu", "--backend", "hopper"])
