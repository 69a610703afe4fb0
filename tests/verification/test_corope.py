"""The verification of Co-RoPE tells right from wrong."""

from fused_rope_attn.experimental.corope import launch
from tests.support.corope import NAMES
from tests.support.dtypes import F32
from tests.support.marks import ignore_overflow, interpreted
from verification.attention import CoRopeCheck
from verification.calls import Machine
from verification.report import rows_of
from verification.workers import run_check


@interpreted
@ignore_overflow
def test_verification_tells_right_from_wrong(monkeypatch):
    check = CoRopeCheck(1, 2, 1, 9, 9, 32, dtype=F32)

    def rows():
        return rows_of(run_check(check, Machine.of("cpu")))

    assert [(row.tensor, row.verdict) for row in rows()] == [(name, "ok") for name in NAMES]
    right = launch.frequency_tables
    # A distance that is one part in a thousand too long.
    monkeypatch.setattr(launch, "frequency_tables", lambda *x: (right(*x)[0], right(*x)[1] * 1.001))
    verdicts = {row.tensor: row.verdict for row in rows()}
    assert verdicts["o"] == verdicts["dq"] == "FAIL"
    monkeypatch.setattr(launch, "frequency_tables", None)
    assert [row.verdict for row in rows()] == ["FAIL"]
