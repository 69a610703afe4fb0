"""The verification of Co-RoPE tells right from wrong."""

from fused_rope_attn.experimental.corope import launch
from tests.support.corope import NAMES
from tests.support.dtypes import F32
from tests.support.marks import ignore_overflow, interpreted
from verification.corope import CoRopeCheck
from verification.runner import CheckTask


@interpreted
@ignore_overflow
def test_verification_tells_right_from_wrong(monkeypatch):
    task = CheckTask(CoRopeCheck("short", 1, 2, 1, 9, 32), F32, "cpu")
    assert [(row.tensor, row.verdict) for row in task.run()] == [(name, "ok") for name in NAMES]
    right = launch.frequency_tables
    # A distance that is one part in a thousand too long.
    monkeypatch.setattr(launch, "frequency_tables", lambda *x: (right(*x)[0], right(*x)[1] * 1.001))
    verdicts = {row.tensor: row.verdict for row in task.run()}
    assert verdicts["o"] == verdicts["dq"] == "FAIL"
    monkeypatch.setattr(launch, "frequency_tables", None)
    assert [row.verdict for row in task.run()] == ["FAIL"]
