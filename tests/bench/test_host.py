"""``python -m bench host``: who is timed, what is checked first, and what is printed."""

import contextlib

import pytest
import torch
from torch.backends import cuda

from bench import __main__ as command
from bench import report
from bench.attention.cases import with_dtype
from bench.suite import forward_or_backward
from bench.suites import host
from tests.support.bench import attention_row, run
from tests.support.clocks import WallClock

_PASSES = tuple(host.PASSES)
_HERE = ("fused", "bare_sdpa", "nothing", "nothing_saved")  # whom a machine without cuDNN runs


class _Bursts(WallClock):
    """Every burst of every provider takes 20 µs a call, then 30, 40 and 50."""

    def host_sample(self, fn, calls):
        fn()
        return [0.02, 0.03, 0.04, 0.05]


def _run(*names, clock=None, shape="1,2,2,16,32"):
    suite = host.Host([host.PROVIDERS[name] for name in names])
    case = with_dtype(host.case_of(shape), torch.float16)
    return run(suite, case, clock=clock or _Bursts(), passes=_PASSES, modes=("host",))[0]


def test_a_run_times_three_passes_of_everybody_who_is_right():
    rows = _run(*host.PROVIDERS)
    timed = report.timed(rows)
    assert {(row["provider"], row["pass"]) for row in timed} == {(name, part) for name in _HERE for part in _PASSES}
    for row in timed:
        assert row["mode"] == "host" and row["ms"] == pytest.approx(0.035)
        assert row["p25"] == pytest.approx(0.0275) and row["p75"] == pytest.approx(0.0425)
        assert {"gpu", "driver", "torch", "triton", "commit", "date"} <= set(row)
    assert all(row["plan"].startswith("Plan(") for row in timed if row["ours"])
    assert {row["status"] for row in rows if row["provider"].startswith("bare_cudnn")} == {"unsupported"}
    text = host.summary(rows)
    assert "B1 H2 N16 D32 causal fp16" in text and "forward with gradient" in text and "27.5-42.5" in text
    assert "! bare cuDNN, chosen once: unsupported" in text


@pytest.mark.parametrize("name", ["nothing", "nothing_saved"])
def test_functions_that_do_nothing_do_nothing(name):
    provider = host.PROVIDERS[name]
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    o = provider.run(q, k, v, None, True)
    do = torch.randn_like(o)
    saved = o.grad_fn.saved_tensors
    assert len(saved) == 3 * (name == "nothing_saved") and all(x is y for x, y in zip(saved, (q, k, v)))
    assert torch.equal(o, q) and all(torch.equal(x, do) for x in torch.autograd.grad(o, (q, k, v), do))
    assert "needs k and v of that shape" in provider.unsupported(host.case_of("1,4,2,16,32").case)


def test_a_function_that_does_something_else_is_not_timed(monkeypatch):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return 2 * q

        @staticmethod
        def backward(ctx, do):
            return do, do, do

    monkeypatch.setitem(host.PROVIDERS, "nothing", host.Idle("nothing", "Doubles", Doubles))
    (row,) = _run("nothing")
    assert row["status"] == "failed" and row["detail"] == "must return q, and do as every gradient"


def test_the_backend_is_chosen_once_outside_of_what_is_timed(monkeypatch):
    """Within the samples cuDNN's attention is the only one allowed, and outside of them all are, as before."""
    seen = []

    class Watching(_Bursts):
        def host_sample(self, fn, calls):
            seen.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
            return super().host_sample(fn, calls)

    @contextlib.contextmanager
    def cudnn_and_math():  # cuDNN runs nothing here
        with host.sdpa_kernel([host.SDPBackend.CUDNN_ATTENTION, host.SDPBackend.MATH]):
            yield

    monkeypatch.setattr(host, "_cudnn", cudnn_and_math)
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    rows = _run(host.CHOSEN_ONCE, clock=Watching())
    assert [row["status"] for row in rows] == ["ok"] * 3 and set(seen) == {(True, False, True)}
    assert (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()) == before


def test_forward_with_gradient_builds_a_graph_and_forward_does_not():
    x = torch.randn(3, requires_grad=True)
    assert forward_or_backward(lambda x: 2 * x, [x], None, "fwd_grad")().requires_grad
    assert not forward_or_backward(lambda x: 2 * x, [x], None, "fwd")().requires_grad


def test_ratios_to_functions_that_do_nothing_are_no_losses():
    def row(name, ms, part):
        who = {"provider": name, "label": host.PROVIDERS[name].label, "ours": name == "fused"}
        quartiles = {"p25": 0.9 * ms, "p75": 1.1 * ms}
        return attention_row("Small-512", "fused", ms, part, "host") | who | quartiles

    times = {"fused": 0.08, "bare_sdpa": 0.04, "bare_cudnn": 0.088, "nothing": 0.008}
    rows = [row(name, ms, part) for name, ms in times.items() for part in ("fwd", "both")]
    lines = {line.split("  ")[0]: line for line in host.summary(rows[:-1]).splitlines()}
    assert lines["bare SDPA"].count("0.50x LOSS") == 2 and lines["bare cuDNN"].count("1.10x") == 2
    assert "0.10x" in lines["a function that does nothing"] and "LOSS" not in lines["a function that does nothing"]
    assert "80.0" in lines["fused (auto)"] and "72.0-88.0" in lines["fused (auto)"] and "x" not in lines["fused (auto)"]
    assert host.summary([]) == "nothing was timed"
    table = host.results(rows[:-1]).splitlines()
    assert table[2] == "| `rope_attention` | 80.0 (72.0 to 88.0) | 80.0 (72.0 to 88.0) |"
    assert table[-3] == "| a function that does nothing | 8.0 (7.2 to 8.8) |  |" and "NVIDIA H200" in table[-1]
    with pytest.raises(ValueError, match="no host time of fused"):
        host.results(rows[2:])


def test_the_command_line(capsys, monkeypatch):
    assert command.main(["host", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "B1 H4 N128 D64 causal bf16" in text and all(name in text for name in host.PROVIDERS)
    assert command.main(["host", "--dry-run", "--shape", "2,8,2,64,128", "--dtype", "fp16"]) == 0
    assert "B2 H8/2 N64 D128 causal fp16" in capsys.readouterr().out
    for options, message in (
        (["--shape", "1,2"], "five positive integers"),
        (["--shape", "1,4,4,0,64"], "five positive integers"),
        (["--shape", "1,4,3,8,64"], "HQ a multiple of HKV, not 4 and 3"),
        (["--providers", "nobody"], "unknown provider nobody"),
        (["--passes", "bwd"], "--passes takes fwd, fwd_grad, both"),
    ):
        assert command.main(["host", "--dry-run", *options]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["host"]) == 2
