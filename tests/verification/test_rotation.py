"""The verification of the rotation alone."""

from dataclasses import replace

import torch

import fused_rope_attn
from verification import __main__ as command
from verification.calls import Machine
from verification.matrix import ROTATION
from verification.report import rows_of
from verification.workers import run_check


def test_the_rotation_alone_is_checked(monkeypatch, tmp_path, capsys):
    arguments = ["--device", "cpu", "--filter", "rotation with two ids", "--dtype", "float32", "--jobs", "0"]
    assert command.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    assert "4 of 4 tensors within tolerance" in capsys.readouterr().out
    assert command.main([*arguments, "--strategy", "inline"]) == 2  # the rotation alone is without strategies

    right = fused_rope_attn.apply_rope_qk

    def wrong(q, k, cos, sin, **options):
        return right(q, k, torch.cat((cos[:-8], cos[-9:-1])), sin, **options)

    check = replace(ROTATION[0], dtype=torch.float32)
    monkeypatch.setattr(fused_rope_attn, "apply_rope_qk", wrong)
    assert {row.verdict for row in rows_of(run_check(check, Machine.of("cpu")))} == {"FAIL"}
    monkeypatch.setattr(fused_rope_attn, "apply_rope_qk", lambda *args, **options: 1 / 0)
    (row,) = rows_of(run_check(check, Machine.of("cpu")))
    assert row.verdict == "FAIL" and "ZeroDivisionError" in row.detail
