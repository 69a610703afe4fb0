"""The generated blocks about attention: what they say, losses included."""

import pytest

from bench.attention import cases, providers, tables
from bench.report import three_digits
from tests.support.bench import FACTS, attention_row

_RIVALS = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")


def _measured():
    """Every shape of the target: 2 ms for ours; hf 4, Liger + FA2 3, Liger + cuDNN 2.2, + FA4 1.6, bare 1.5 and 1."""
    times = dict(zip(("fused", *_RIVALS), (2.0, 4.0, 3.0, 2.2, 1.6, 1.5, 1.0)))
    return [
        attention_row(case, name, ms, part, mode)
        for case in cases.TABLE
        for part in ("fwd", "bwd")
        for mode in ("graph", "eager")
        for name, ms in times.items()
    ]


def _change(rows, ms, **which):
    """The same rows with another time for those that match."""
    return [
        row | {"ms": ms, "rounds": [ms] * 3} if all(row[key] == value for key, value in which.items()) else row
        for row in rows
    ]


def _line(text, begin):
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}"))


def test_results_show_losses_like_wins():
    text = tables.results(_measured())
    assert text.count("Long-64K (1, 8/8, 65536, 128)") == 2
    for case in cases.TABLE:
        cells = [cell.strip() for cell in _line(text, case).split("|")[2:-1]]
        assert cells[0].startswith("2.00 (")
        assert cells[1:] == ["1.60: **0.80×**, Liger rope + FA4", "1.00: **0.50×**, FA4"]
    for fact in ("NVIDIA H200", "0123abcd", "2026-11-21", "torch 2.11.0", "cuDNN 9.19.0", "liger-kernel 0.8.5"):
        assert fact in text


def test_results_name_what_is_missing_and_what_is_loose():
    rows = [row for row in _measured() if row["case"] != "Small-1K" or row["role"] != "bare"]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_fa4" else row for row in rows]
    text = tables.results(rows)
    assert "not measured" in _line(text, "Small-1K") and "Liger rope + FA4 ~" in text and "\n~: " in text
    with pytest.raises(ValueError, match="Long-64K, forward"):
        tables.results([row for row in rows if (row["case"], row["provider"]) != ("Long-64K", "fused")])


def test_standing_counts_every_shape():
    rows = _change(_measured(), 1.9, provider="liger_flash", mode="graph", case="Llama7B-4K", **{"pass": "bwd"})
    text = tables.standing(rows)
    assert [cell.strip() for cell in _line(text, "Liger rope + SDPA flash").split("|")[2:-1]] == [
        "8 of 8",
        "1.50 to 1.50×",
        "7 of 8",
        "0.95 to 1.50×",
    ]
    assert "0 of 8" in _line(text, "bare FA4")
    short = tables.headline(rows)
    assert "at 7 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-2")
    assert "at 0 of 8 shapes" in _line(short, "Liger's rotation + FlashAttention-4")


def test_a_rival_with_one_pass():
    rows = [row for row in _measured() if row["pass"] == "fwd" or row["provider"] != "liger_fa4"]
    assert "| no such pass |" in _line(tables.headline(rows), "Liger's rotation + FlashAttention-4")


def test_rows_without_ours_are_refused():
    with pytest.raises(ValueError, match="hold no times"):
        tables.headline([row for row in _measured() if row["provider"] != "fused"])


@pytest.mark.parametrize(("value", "text"), [(0.01326, "0.0133"), (0.44, "0.440"), (1.0, "1.00"), (113.8, "114")])
def test_milliseconds_have_three_digits(value, text):
    assert three_digits(value) == text
    assert three_digits(1234.5) in ("1234", "1235")


def test_host_time():
    def row(name, ms, part):
        return attention_row("Host", name, ms, part, "host", kind="host", p25=0.9 * ms, p75=1.1 * ms)

    times = {"fused": 0.08, "bare_sdpa": 0.04, "nothing": 0.008}
    rows = [row(name, ms, part) for name, ms in times.items() for part in ("fwd", "both")]
    table = tables.host(rows[:-1]).splitlines()
    assert table[2] == "| `rope_attention` | 80.0 (72.0 to 88.0) | 80.0 (72.0 to 88.0) |"
    assert table[-3] == "| a function that does nothing | 8.0 (7.2 to 8.8) |  |" and "NVIDIA H200" in table[-1]
    with pytest.raises(ValueError, match="no host time of fused"):
        tables.host(rows[2:])


def test_energy():
    def row(case, provider, ms, mj, **extra):
        load = {"mode": "load", "mj": mj, "mj_rounds": [0.99 * mj, mj, 1.01 * mj], "watts": mj / ms, "mhz": 1700}
        return attention_row(case, provider, ms, **load, **extra)

    rows = [
        row("Llama7B-2K", "fused", 0.15, 100.0),
        row("Llama7B-2K", "liger_fa4", 0.16, 110.0),
        row("Llama7B-2K", "bare_cudnn", 0.14, 80.0),
        row("Llama7B-4K", "fused", 0.5, 350.0),
        row("Llama7B-4K", "liger_fa4", 0.48, 300.0, status="loose"),
    ]
    lines = tables.energy(rows).splitlines()
    assert lines[0] == "|  | `rope_attention` | Liger rope + FA4 | bare cuDNN |"
    assert lines[2] == "| Llama7B-2K, forward | 0.1500 ms, 100.0 mJ, 667 W | 1.07 / 1.10× | 0.93 / 0.80× |"
    assert lines[3] == "| Llama7B-4K, forward | 0.5000 ms, 350.0 mJ, 700 W | 0.96 / 0.86× ~ |  |"
    assert "~: outside" in lines[-1] and "NVIDIA H200, bfloat16, driver 580" in lines[-1]
    with pytest.raises(ValueError, match="hold no times"):
        tables.energy([row for row in rows if row["role"] != "ours"])


def test_masks():
    def timed(case, name, part, times, role="ours", **fields):
        row = {"case": case, "provider": name, "label": name, "pass": part, "ms": times[0], "rounds": times}
        row |= {"role": role, "p20": times[0], "p80": times[0], "status": "ok", "mode": "eager", "shape": ""}
        return row | FACTS | fields

    rows = [
        timed("window", "window", "fwd", [1.2, 1.44], backend="hopper"),
        timed("window", "causal", "fwd", [10.0, 12.0], backend="hopper"),
        timed("packed", "packed", "bwd", [1.0], backend="triton"),
        timed("packed", "slow", "bwd", [1.5], "rival"),
    ]
    text = tables.masks(rows)
    assert _line(text, "causal") == "| causal | hopper | 10.00 | 10.00-10.00 | 8.33 |  |  |  |"
    assert "| slow |  |  |  |  | 1.500 | 1.500-1.500 | 1.50 |" in text
    with pytest.raises(ValueError, match="no times"):
        tables.masks([])


def test_norms():
    def rows_of(times, part="fwd", case="Qwen3-8B-4K", **extra):
        rows = [attention_row("Qwen3-8B-4K", name, ms, part, kind="norm") for name, ms in times.items()]
        return [row | {"case": case, "shape": "B2", "peak_mib": 7.0} | extra for row in rows]

    rows = rows_of({"fused": 1.03, "fused_without": 1.0, "norm_liger_fa4": 1.236, "norm_hf_sdpa": 2.06})
    rows += rows_of({"fused": 4.0, "norm_liger_cudnn": 3.8}, "bwd", status="loose")
    block = tables.norm(rows)
    (line,) = (line for line in block.splitlines() if line.startswith("| Qwen3-8B-4K"))
    assert line == "| Qwen3-8B-4K (B2) | 1.03 / 4.00 | 1.030 / - | 7 (7) | 2.00× | 0.95× ~ | 1.20× |"
    assert "~: outside" in block
    for wrong in ([], rows_of({"fused_without": 1.0})):
        with pytest.raises(ValueError, match="hold no times"):
            tables.norm(wrong)


def test_corope():
    rows = [
        attention_row("CoRoPE-1K", name, ms, part, "eager", kind="corope", shape="B1")
        for name, ms in {"corope": 2.0, "dense": 5.0}.items()
        for part in ("fwd", "bwd")
    ]
    slow = attention_row("CoRoPE-1K", "chunked", 1.0, None, None, "unsupported", kind="corope", shape="B1")
    text = tables.corope([*rows, slow | {"detail": "for at most 8 tokens here"}])
    assert "| B1 | `corope_attention` | 2.00 | 2.00 | 64 |" in text
    assert "| B1 | eager, at once | 5.00 (2.5×) | 5.00 (2.5×) | 64 |" in text
    assert "| B1 | eager, in chunks | unsupported: for at most 8 tokens here |  |  |" in text
    with pytest.raises(ValueError, match="corope"):
        tables.corope(rows[2:])


def test_every_table_has_the_providers_of_its_kind():
    plain = providers.table("plain")
    assert list(plain)[:4] == list(providers.OURS)
