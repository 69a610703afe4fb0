"""The rivals without a GPU: the registry is complete and honest, and each part computes what it says.

Rotations and PyTorch's attentions run on CPU tensors through the benchmark's gate, so that they have computed rotary
attention once before a GPU sees them.
"""

import os

import pytest
import torch

import baselines
from baselines import BASELINES, attentions, base, registry, rotations
from baselines.base import Baseline
from bench.attention.cases import BenchCase
from bench.attention.providers import rival
from bench.attention.suite import ATTENTION
from tests.support.bench import run
from verification import testing

_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs Triton kernels on CPU tensors in its interpreter"
)


# Registry


def test_the_registry_holds_the_rivals_of_the_benchmark():
    assert set(BASELINES) == {
        "hf_sdpa",
        "hf_flash_attn",
        "liger_flash",
        "liger_cudnn",
        "liger_fa3",
        "liger_fa4",
        "compiled_cudnn",
        "compiled_fa4",
        "bare_flash",
        "bare_cudnn",
        "bare_fa3",
        "bare_fa4",
    }
    for name, baseline in BASELINES.items():
        assert baseline.name == name and baseline.label
        assert baseline.rotates == (not name.startswith("bare"))
        assert baseline.label.startswith("bare ") != baseline.rotates
    assert len({baseline.label for baseline in BASELINES.values()}) == len(BASELINES)


@pytest.mark.parametrize(
    ("name", "pip"),
    [
        ("hf_sdpa", ("transformers",)),
        ("hf_flash_attn", ("transformers", "flash-attn")),
        ("liger_cudnn", ("liger-kernel",)),
        ("liger_fa3", ("liger-kernel", "fa3-fwd")),
        ("liger_fa4", ("liger-kernel", "flash-attn-4")),
        ("compiled_fa4", ("transformers", "flash-attn-4")),
        ("bare_cudnn", ()),
    ],
)
def test_pip_names(name, pip):
    assert BASELINES[name].pip == pip


def test_a_missing_package_is_reported_with_its_pip_name(monkeypatch):
    def absent(module, attribute):
        return f"ModuleNotFoundError: No module named '{module}'"

    monkeypatch.setattr(base, "import_error", absent)
    reasons = registry.missing()
    for name, baseline in BASELINES.items():
        # flash-attn alone is replaced: PyTorch's build of its kernels.
        for package in set(baseline.pip) - {"flash-attn"}:
            assert f"pip install {package} (ModuleNotFoundError" in reasons[name]
    assert set(reasons) == set(BASELINES) - {"bare_flash", "bare_cudnn"}


def test_a_broken_package_is_reported_with_its_error():
    base.import_error.cache_clear()
    assert base.import_error("json", "dumps") is None
    assert base.import_error("json", "no_such_name").startswith("AttributeError")
    assert base.Package("no-such-thing", "no_such_thing", "f").missing() == (
        "pip install no-such-thing (ModuleNotFoundError: No module named 'no_such_thing')"
    )


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attn_falls_back_to_pytorch_and_says_so(installed, monkeypatch):
    monkeypatch.setattr(base, "import_error", lambda module, attribute: None if installed else "no")
    for name in ("hf_flash_attn", "bare_flash"):
        assert ("PyTorch's build" in BASELINES[name].label) == (not installed)
        assert BASELINES[name].missing() is None or "flash" not in BASELINES[name].missing()


def test_the_official_flash_attn_gets_bnhd(monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        assert q.shape == (2, 16, 4, 8) and k.shape == v.shape == (2, 16, 2, 8) and causal
        return q

    monkeypatch.setattr(base, "import_error", lambda module, attribute: None)
    monkeypatch.setattr(base, "load", lambda module, attribute: flash_attn_func)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    assert torch.equal(attentions.FLASH_ATTN.attend(q, k, k, True), q)


@pytest.mark.parametrize("returns_lse", [True, False])
def test_flash_attention_4_gets_bnhd(returns_lse, monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        assert q.shape == (2, 16, 4, 8) and k.shape == v.shape == (2, 16, 2, 8) and not causal
        return (q, None) if returns_lse else q

    monkeypatch.setattr(base, "load", lambda module, attribute: flash_attn_func)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    assert torch.equal(attentions.FA4.attend(q, k, k, False), q)


@pytest.mark.parametrize("returns_lse", [True, False])
def test_flash_attention_3_gets_bnhd_and_has_no_backward(returns_lse, monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        assert q.shape == (2, 16, 4, 8) and k.shape == v.shape == (2, 16, 2, 8) and causal
        return (q, None) if returns_lse else q

    monkeypatch.setattr(base, "load", lambda module, attribute: flash_attn_func)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    assert torch.equal(attentions.FA3.attend(q, k, k, True), q)
    assert [b.name for b in BASELINES.values() if not b.backward] == ["liger_fa3", "bare_fa3"]


def test_what_a_rival_does_not_serve_is_said():
    def case(**other):
        return testing.Case(**{"batch": 1, "heads_q": 2, "heads_kv": 1, "len_q": 8, "len_k": 8, "head_dim": 64} | other)

    cudnn = BASELINES["liger_cudnn"]
    assert cudnn.unsupported(case()) is None
    assert "float32" in cudnn.unsupported(case(dtype=torch.float32))
    assert BASELINES["hf_sdpa"].unsupported(case(dtype=torch.float32)) is None
    assert "head dims" in cudnn.unsupported(case(head_dim=264))
    assert "head dims" in BASELINES["bare_fa4"].unsupported(case(head_dim=20))
    assert "as many queries" in cudnn.unsupported(case(len_q=4))
    assert "float16" in BASELINES["bare_fa3"].unsupported(case(dtype=torch.float16))
    assert BASELINES["bare_fa3"].unsupported(case(dtype=torch.bfloat16)) is None
    for other in ({"interleaved": True}, {"rotary_dim": 32}, {"table_batch": True}, {"extra_rows": 1}):
        assert "half layout" in cudnn.unsupported(case(**other))


def test_tables_are_prepared_once_in_the_form_of_each_rotation():
    cos, sin = torch.randn(6, 4), torch.randn(6, 4)
    half = rotations.HF.prepare(cos, sin, torch.bfloat16)
    for table, source in zip(half, (cos, sin)):
        assert table.dtype == torch.bfloat16 and table.shape == (1, 6, 8)
        assert torch.equal(table[0, :, 4:], source.bfloat16())
    for rotation in (rotations.LIGER, rotations.COMPILED):
        assert all(table.dtype == torch.float32 for table in rotation.prepare(cos, sin, torch.bfloat16))
    assert BASELINES["bare_cudnn"].prepare(cos, sin, torch.float16) is None
    in_place = [b.name for b in BASELINES.values() if b.in_place]
    assert in_place == ["liger_flash", "liger_cudnn", "liger_fa3", "liger_fa4"]


def test_importing_the_registry_imports_no_rival():
    assert baselines.__all__ == ["BASELINES", "Baseline"]
    source = (
        "import sys, baselines; print([m for m in ('transformers', 'flash_attn', 'liger_kernel') if m in sys.modules])"
    )
    assert _python(source) == "[]"


def _python(source):
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", source], cwd=root, capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()


# Numbers


def _verdict(baseline, case):
    if reason := baseline.missing():
        pytest.skip(reason)
    rows, _ = run(
        ATTENTION, BenchCase("Tiny", "Tiny", (), case), providers=[rival(baseline)], rounds=1, modes=("eager",)
    )
    assert {row["status"] for row in rows} <= {"ok", "loose"}, rows[0]["detail"]


@pytest.mark.parametrize("heads_kv", [4, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["hf_sdpa", "hf_flash_attn", "bare_flash"])
def test_pytorchs_attentions(name, causal, heads_kv):
    _verdict(BASELINES[name], testing.Case(2, 4, heads_kv, 65, 65, 64, causal=causal, dtype=torch.bfloat16))


@_interpreted
def test_liger_rotates_like_everybody():
    _verdict(Baseline("liger", rotations.LIGER, attentions.SDPA), testing.Case(1, 4, 2, 33, 33, 64))


def test_cudnn_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    q = torch.randn(1, 1, 8, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="No available kernel|No viable backend"):
        BASELINES["bare_cudnn"].run(q, q, q, None, True)
