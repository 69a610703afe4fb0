"""Launchers only allocate between launches. Therefore eager calls can be recorded and replayed."""

from functools import wraps

import pytest

from fused_rope_attn.attention.hopper import backward as hopper_backward, forward as hopper_forward
from fused_rope_attn.attention.portable import backward, forward
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Recording
from tools.compile_kernels import Job, find_jobs

CALLS = (
    forward.ForwardCall,
    backward.BackwardCall,
    hopper_forward.ForwardCall,
    hopper_backward.BackwardCall,
    hopper_backward.LatentBackwardCall,
)
JOBS = {job.label: job for job in find_jobs(["sm_90"]) if isinstance(job, Job)}


@pytest.mark.parametrize("label", JOBS)
def test_launchers_only_allocate(label, monkeypatch):
    refusals, job = [], JOBS[label]

    def recorded(run):
        @wraps(run)
        def record(self, *given):
            with Recording() as recording:
                out = run(self, *given)
            refusals.append(recording.refusal)
            return out

        return record

    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    monkeypatch.setattr(Launch, "__call__", lambda self, *given, **own: None)
    for call in CALLS:
        monkeypatch.setattr(call, "__call__", recorded(call.__call__))
    job.launch()
    expected = ""
    if job.direction == "backward" and "sinks" in job.masks:
        expected = "it runs aten.sum.dim_IntList"  # their gradient
    elif "softcap" in job.masks and getattr(job.config, "strategy", "") == "inline":
        expected = "it runs aten.fill_.Scalar"  # the maximum of each head's logits, which no pre-pass fills
    assert refusals == [expected]
