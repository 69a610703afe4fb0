"""A run: what becomes of providers and cases that fail, of passes that a provider lacks, and of what is in place."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.backends import cuda

from bench import decode, report
from bench.attention import providers
from bench.attention.providers import fused
from bench.attention.suite import ATTENTION
from bench.report import case_report
from bench.rope import PROVIDERS as ROTATIONS, ROPE, RopeCase, RopeProvider
from bench.suite import forward_or_backward
from tests.support.bench import SHORT, TINY, WallClock, run, scripted, status

OURS = providers.OURS


def raises(error):
    def run(*given):
        raise error

    return run


def test_who_does_not_run_is_named_and_the_others_are_timed():
    """A provider without a backward is judged and timed forward: no gradients are asked for."""

    def forward_only(*given):
        assert not torch.is_grad_enabled()
        return fused(*given)

    people = [
        OURS,
        scripted("broken", raises(RuntimeError("kernel exploded\nwith a long trace"))),
        scripted("hungry", raises(torch.OutOfMemoryError("out of memory"))),
        scripted("limited", raises(NotImplementedError("no such mask"))),
        scripted("absent", lacks="pip install absent"),
        scripted("forward", forward_only, backward=False),
    ]
    rows, measurement = run(ATTENTION, TINY, providers=people, modes=("eager",), passes=("fwd", "bwd", "both"))
    found = {(row["provider"], row["pass"]): (row["status"], row["detail"]) for row in rows}
    lacks = "unsupported", "forward has a forward pass only"
    assert found == {
        ("broken", None): ("error", "RuntimeError: kernel exploded"),
        ("hungry", None): ("oom", "OutOfMemoryError: out of memory"),
        ("limited", None): ("unsupported", "NotImplementedError: no such mask"),
        ("absent", None): ("missing", "pip install absent"),
        **{("fused", part): ("ok", "") for part in ("fwd", "bwd", "both")},
        ("forward", "fwd"): ("ok", ""),
        ("forward", "bwd"): lacks,
        ("forward", "both"): lacks,
    }
    assert len(report.timed(rows)) == 4 and not report.red(rows) and not measurement.not_run
    text = case_report(rows)
    assert "! forward (bwd eager): unsupported: forward has a forward pass only" in text and "! broken: error" in text


def test_a_failed_capture_is_tried_once_and_reported():
    class NoCapture(WallClock):
        attempts = 0

        def capture(self, make):
            self.attempts += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    clock = NoCapture()
    rows, _ = run(ATTENTION, TINY, providers=[OURS], clock=clock, modes=("eager", "graph"), passes=("fwd", "bwd"))
    assert clock.attempts == 1
    assert [row["status"] for row in rows if row["mode"] == "graph"] == ["no-graph", "no-graph"]
    assert all("not permitted" in row["detail"] for row in rows if row["mode"] == "graph")


def test_a_case_whose_inputs_do_not_fit_is_named():
    full = replace(decode.DECODE, trial=raises(torch.OutOfMemoryError("out of memory")))
    rows, measurement = run(full, decode.DecodeCase(2, 32, 4, 2, 16, torch.float32), providers=[])
    assert rows == [] and measurement.not_run == ["B2-32 B2 H4/2 S32 D16 fp32 (memory)"]


def test_each_case_takes_the_modes_that_are_for_it():
    rows, _ = run(ATTENTION, TINY, SHORT, providers=[OURS], modes=("eager", "host"), passes=("fwd",))
    assert [(row["case"], row["mode"]) for row in rows] == [("Tiny-64", "eager"), ("Host", "host")]
    rows, _ = run(ATTENTION, TINY, providers=[OURS], modes=("host",), passes=("fwd",))
    assert [row["mode"] for row in rows] == ["host"]


def test_who_serves_a_step():
    """Rivals take sequences of one length, and copies of large caches are left out."""
    case = decode.DecodeCase(5, 64, 4, 2, 16, torch.float32, mixed=True)
    assert case.lengths == [64, 32, 21, 16, 1] and case.bytes == 134 * 2 * 2 * 16 * 4
    people = [decode.PROVIDERS[name] for name in ("fused", "copy", "fused_page16", "sdpa_flash")]
    found = status(run(decode.DECODE, case, providers=people, modes=("eager",))[0])
    assert found == {"fused": "ok", "copy": "ok", "fused_page16": "ok", "sdpa_flash": "unsupported"}


def test_the_option_for_the_same_bits_is_passed():
    """A step in float8 cannot keep that promise and is refused; no other provider's call can raise this."""
    step = decode.in_float8(decode.DecodeCase(1, 32, 2, 1, 32, torch.float16).step(torch.device("cpu")))
    with pytest.raises(NotImplementedError, match="batch_invariant=True does not serve float8"):
        decode.PROVIDERS["fused_same_bits"].make(step._replace(k_scale=None, v_scale=None))()


def test_providers_in_place_get_copies_and_leave_the_inputs_alone():
    def overwriting(q, k, v, given):
        o = fused(q, k, v, given)
        q.data.zero_()
        k.data.zero_()
        return o

    seen = []

    def spy(q, k, v, given):
        seen.append(q.detach().clone())
        return fused(q, k, v, given)

    people = [scripted("in_place", overwriting, in_place=True), scripted("spy", spy)]
    rows, _ = run(ATTENTION, TINY, providers=people, passes=("fwd",), modes=("eager",))
    assert status(rows) == {"in_place": "ok", "spy": "ok"}
    assert len(seen) > 2 and all(torch.equal(q, seen[0]) for q in seen)


def test_rotations_in_place_work_on_their_own_memory():
    def in_place(xs, tables, weights):
        outs = ROTATIONS["apply_rope"].run(xs, tables, weights)
        for x, out in zip(xs, outs):
            x.data.copy_(out)
        return outs

    people = [RopeProvider("greedy", "greedy", run=in_place, in_place=True), ROTATIONS["apply_rope"]]
    found = status(run(ROPE, RopeCase("Tiny", 2, (4, 2), 16, 8, (), torch.float32), providers=people)[0])
    assert found == {"greedy": "ok", "apply_rope": "ok"}


def test_the_backend_is_chosen_once_outside_of_what_is_timed():
    """Within the samples cuDNN's attention is the only one allowed, and outside of them all are, as before."""
    seen = []

    def allowed():
        return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()

    class Watching(WallClock):
        def host_sample(self, fn, calls):
            seen.append(allowed())
            return super().host_sample(fn, calls)

    @contextlib.contextmanager
    def cudnn_and_math():  # cuDNN runs nothing here
        with providers.sdpa_kernel([providers.SDPBackend.CUDNN_ATTENTION, providers.SDPBackend.MATH]):
            yield

    before = allowed()
    cudnn = replace(providers.table("host")["bare_cudnn_chosen"], active=cudnn_and_math)
    rows, _ = run(ATTENTION, SHORT, providers=[cudnn], clock=Watching())
    assert [row["status"] for row in rows] == ["ok"] * 3 and set(seen) == {(True, False, True)}
    assert allowed() == before


def test_the_functions_of_passes():
    x = torch.randn(3, requires_grad=True)
    assert forward_or_backward(lambda x: 2 * x, [x], None, "fwd_grad")().requires_grad
    assert not forward_or_backward(lambda x: 2 * x, [x], None, "fwd")().requires_grad
    with pytest.raises(ValueError, match="a pass must be fwd, fwd_grad, bwd or both, not 'up'"):
        forward_or_backward(lambda x: 2 * x, [x], None, "up")
