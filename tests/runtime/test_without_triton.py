"""Without Triton (macOS, Windows) the package imports and the reference serves every public function."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.paths import ROOT

# Python raises ModuleNotFoundError for a module, and for everything below it, if its entry in sys.modules is None.
PREAMBLE = """
import sys
sys.modules["triton"] = None
import torch
import fused_rope_attn
from verification.testing import Case, compare, make_inputs, run_op, run_reference

CASE = Case(batch=2, heads_q=4, heads_kv=2, len_q=33, len_k=33, head_dim=32, causal=True, dtype=torch.float32)
torch.manual_seed(0)
"""


def run(program: str, interpret: str = "0") -> None:
    """Run a program in a process of its own that finds no Triton; what it asserts fails the test."""
    environment = os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there():
    run("""
        for name in fused_rope_attn.__all__:
            getattr(fused_rope_attn, name)
        assert sys.modules["triton"] is None
        assert not any(name.startswith("triton.") for name in sys.modules)
    """)


def test_rope_attention_and_its_gradients():
    run("""
        inputs = make_inputs(CASE)
        exact, eager = run_reference(inputs, CASE, torch.float64), run_reference(inputs, CASE)
        for backend in ("auto", "reference"):
            results = run_op(inputs, CASE, backend=backend)
            for name in ("o", "lse", "dq", "dk", "dv"):
                found = compare(
                    name, getattr(results, name), getattr(exact, name), getattr(eager, name),
                    grad=name.startswith("d"), dtype=torch.float32,
                )
                assert found.ok, (backend, found)
    """)


def test_packed_sequences_are_those_by_themselves():
    run("""
        lengths = (7, 12)
        cu_seqlens = torch.tensor([0, 7, 19], dtype=torch.int32)
        cos, sin = fused_rope_attn.rope_tables(12, 32)
        q, k, v, do = (torch.randn(19, heads, 32, requires_grad=True) for heads in (4, 2, 2, 4))
        o = fused_rope_attn.rope_attention_varlen(q, k, v, cos, sin, cu_seqlens, cu_seqlens, 12, 12, causal=True)
        packed = torch.autograd.grad(o, (q, k, v), do)
        parts = [[x.transpose(0, 1)[None] for x in tensors] for tensors in zip(*(x.split(lengths) for x in (q, k, v)))]
        each = [fused_rope_attn.rope_attention(*part, cos, sin, causal=True)[0].transpose(0, 1) for part in parts]
        joined = torch.cat(each)
        torch.testing.assert_close(o, joined)
        torch.testing.assert_close(packed, torch.autograd.grad(joined, (q, k, v), do))
    """)


def test_a_generation_step_is_the_last_row():
    run("""
        cos, sin = fused_rope_attn.rope_tables(16, 32)
        q, k, v = (torch.randn(2, heads, 10, 32) for heads in (4, 2, 2))
        whole = fused_rope_attn.rope_attention(q, k, v, cos, sin, causal=True)
        k_cache, v_cache = torch.zeros(2, 2, 16, 32), torch.zeros(2, 2, 16, 32)
        k_cache[:, :, :9], v_cache[:, :, :9] = fused_rope_attn.apply_rope(k, cos, sin)[:, :, :9], v[:, :, :9]
        o = fused_rope_attn.rope_attention_with_kvcache(
            q[:, :, 9:], k_cache, v_cache, cos, sin, k[:, :, 9:], v[:, :, 9:],
            cache_seqlens=torch.full((2,), 9, dtype=torch.int32),
        )
        torch.testing.assert_close(o, whole[:, :, 9:])
        torch.testing.assert_close(v_cache[:, :, 9], v[:, :, 9])
    """)


def test_rotation_and_its_gradients():
    run("""
        cos, sin = fused_rope_attn.rope_tables(9, 32)
        q, k, dq, dk = (torch.randn(2, heads, 9, 32, requires_grad=True) for heads in (4, 2, 4, 2))

        def by_hand(x, sign):
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin), dim=-1)

        rotated = fused_rope_attn.apply_rope_qk(q, k, cos, sin)
        torch.testing.assert_close(rotated, (by_hand(q, 1), by_hand(k, 1)))
        gradients = torch.autograd.grad(rotated, (q, k), (dq, dk))
        torch.testing.assert_close(gradients, (by_hand(dq, -1), by_hand(dk, -1)))
    """)


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_kernels_say_what_is_missing_and_the_plan_goes_without(interpret):
    """The message does not say that there is no GPU, because a user would then look for one in vain."""
    run(
        """
        inputs = make_inputs(CASE)
        call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "cos": inputs.cos, "sin": inputs.sin, "causal": True}
        for backend in ("triton", "hopper"):
            try:
                fused_rope_attn.rope_attention(**call, backend=backend)
            except RuntimeError as error:
                assert "the package triton, which is not installed" in str(error), error
            else:
                raise AssertionError(f"{backend}: no error")
        chosen = fused_rope_attn.plan(**call)
        assert chosen.backend == "reference" and chosen.reason, chosen
        """,
        interpret,
    )


def test_the_report_of_the_environment_works():
    run("""
        from fused_rope_attn.env import environment
        facts = environment()
        assert facts["plan"].get("backend") == "reference", facts["plan"]
    """)
