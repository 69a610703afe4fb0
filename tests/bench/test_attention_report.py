"""The text that a run of attention prints."""

from bench.attention import cases
from bench.suites.attention.report import case_report, summary
from tests.support.bench import attention_row, published


def test_losses_are_printed_like_wins():
    text = summary(published())
    # Small-512, Small-1K, Llama7B-2K, Llama70B-1K beat the strongest separate pair; the other four lose.
    assert "4 not slower, 4 slower" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in cases.TABLE}
    assert set(lines) == set(cases.TABLE)
    assert "0.91x LOSS" in lines["Llama7B-4K"] and "Liger rope + FA4" in lines["Llama7B-4K"]
    assert "0.80x LOSS" in lines["Llama7B-4K"] and "bare FA4" in lines["Llama7B-4K"]
    assert "1.93x" in lines["Small-512"] and "0.83x LOSS" in lines["Small-512"]
    assert len({len(line.rstrip()) for line in text.splitlines()}) > 1


def test_case_report_marks_the_strongest_and_the_reservations():
    rows = [r for r in published() if r["case"] == "Llama7B-4K"]
    rows.append(attention_row("Llama7B-4K", "hf_flash_attn", 1.9, status="loose"))
    failed = {"status": "failed", "detail": "dq: 7 rows beyond 2.5x"}
    rows.append(attention_row("Llama7B-4K", "compiled_fa4", 0.1, **failed))
    text = case_report(rows)
    marked = {line.rsplit("  ", 1)[0].strip(): line for line in text.splitlines() if " * " in f"{line} "}
    assert any("Liger rope + FA4" in line for line in marked.values())
    assert any("bare FA4" in line and "°" in line for line in text.splitlines())
    assert "~ HF rope + FA2" in text and "1.32 times" in text
    assert "compiled rope + FA4 (fwd graph): FAILED the gate: dq: 7 rows" in text
    body = [line for line in text.splitlines() if line.startswith(("fused", "HF", "Liger", "bare"))]
    assert len(body) == 7 and "compiled" not in "".join(body)
