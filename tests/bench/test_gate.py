"""The gate: the errors that it sees in each suite's results, and who is loose."""

from dataclasses import replace

import pytest
import torch

from bench import decode, gate, mla, report, rope
from bench.attention import cases, providers, suite
from bench.attention.suite import ATTENTION, NORM
from bench.decode import DECODE
from bench.gate import Gate
from bench.mla import MLA
from bench.rope import ROPE
from tests.support.bench import SHORT, TINY, run, scripted
from verification.testing import Case, make_inputs

NORMED = cases.BenchCase("Tiny", "Tiny", ("norm",), Case(2, 4, 2, 24, 24, 16, dtype=torch.float32, norms=0.0), "norm")
ROTATED = rope.RopeCase("Tiny", 1, (2, 1), 16, 8, ("norms",), torch.float32, norms=True)
LATENT = mla.MlaCase(1, 3, 33, 33, 32, 16, 48, dtype=torch.float32, interleaved=True)
STEP = decode.DecodeCase(2, 32, 4, 2, 16, torch.float32)


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


def verdict(suite, case, provider, **options):
    """Return the status and the detail of the only provider."""
    rows, _ = run(suite, case, providers=[provider], **options)
    return rows[0]["status"], rows[0]["detail"]


def shifted_angles(q, k, v, given):
    cos, sin = (torch.roll(table, 1, 0) for table in given.tables)
    return providers.fused(q, k, v, given._replace(tables=(cos, sin.neg())))


def last_head(q, k, v, given):
    keep = torch.ones_like(q)
    keep[-1, -1] = 0.5
    return providers.fused(q, k, v, given) * keep


def not_finite(*given):
    return providers.fused(*given) * float("nan")


def coarse(q, k, v, given):
    bump = torch.zeros_like(q)
    bump[:, :, 5] = 2e-3  # one row, a few roundings off
    return providers.fused(q, k, v, given) + bump


@pytest.mark.parametrize(
    ("run", "role", "status", "detail"),
    [
        (providers.fused, "ours", "ok", ""),
        (shifted_angles, "ours", "failed", "rows too far off"),
        (shifted_angles, "rival", "failed", "rows too far off"),
        (last_head, "rival", "failed", "o: "),
        (not_finite, "rival", "failed", "not finite"),
        (coarse, "rival", "loose", "o: "),
        (coarse, "ours", "failed", "o: "),
    ],
)
def test_outputs_of_attention(run, role, status, detail):
    found = verdict(ATTENTION, TINY, scripted("x", run, role=role), modes=("eager",))
    assert found[0] == status and detail in found[1]


def steep(x):
    """Return x with a gradient that is 1 % too large."""
    return 1.01 * x - 0.01 * x.detach()


@pytest.mark.parametrize("name", ["q", "k", "v", "q_norm", "k_norm"])
def test_gradients_of_attention(name):
    def steeper(q, k, v, given):
        found = {"q": q, "k": k, "v": v} | given.weights
        found[name] = steep(found[name])
        weights = {weight: found[weight] for weight in given.weights}
        return providers.fused(found["q"], found["k"], found["v"], given._replace(weights=weights))

    status, detail = verdict(NORM, NORMED, replace(providers.table("norm")["fused"], run=steeper))
    assert status == "failed" and detail.startswith(f"d{name}: ")


@pytest.mark.parametrize("broken", range(5))
def test_gradients_of_latent_attention(broken, monkeypatch):
    own = mla.rope_attention_mla

    def steeper(*rows, **options):
        return own(*(steep(x) if i == broken else x for i, x in enumerate(rows)), **options)

    monkeypatch.setattr(mla, "rope_attention_mla", steeper)
    status, detail = verdict(MLA, LATENT, mla.PROVIDERS["fused"])
    assert status == "failed" and f"{('dq_nope', 'dq_rope', 'dk_nope', 'dk_rope', 'dv')[broken]}:" in detail


@pytest.mark.parametrize("name", ["o", "dx", "dweight"])
def test_results_of_the_rotation(name):
    def wrong(xs, tables, weights):
        xs = [steep(x) for x in xs] if name == "dx" else xs
        weights = {"o": [1.01 * w for w in weights], "dweight": [steep(w) for w in weights]}.get(name, weights)
        return rope.PROVIDERS["apply_rope"].run(xs, tables, weights)

    status, detail = verdict(ROPE, ROTATED, rope.RopeProvider("wrong", "wrong", run=wrong))
    assert status == "failed" and detail.startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["fused", "fused_page16", "fused_float8"])
def test_angles_of_a_step(name):
    def wrong(step):
        return decode.PROVIDERS[name].make(step._replace(cos=step.cos.roll(1, 0)))

    assert verdict(DECODE, STEP, replace(decode.PROVIDERS[name], make=wrong))[0] == "failed"


def test_ceilings():
    doubles = replace(providers.table("host")["nothing"], run=lambda q, k, v, given: 2 * q + 0 * (k + v))
    assert verdict(ATTENTION, SHORT, doubles) == ("failed", "must return q, and do as every gradient")
    copy = rope.RopeProvider("copy", "copy", "ceiling", run=lambda xs, tables, weights: [2 * x for x in xs])
    assert verdict(ROPE, ROTATED, copy) == ("failed", "is no copy")


def test_rows_of_another_sequence(monkeypatch):
    """The gate sees one sequence's rows in another's place, where each sequence is a padded batch entry."""
    right = suite.Problem.as_case
    monkeypatch.setattr(suite.Problem, "as_case", lambda self, x, form: right(self, x, form).roll(1, 2))
    case = cases.packed(Case(1, 4, 2, 24, 24, 16, dtype=torch.float32), (5, 12, 1, 7))
    packed = replace(cases.MASKED[1], case=case)
    rows, _ = run(ATTENTION, packed, providers=[providers.table("packed")["padded"]])
    assert [row["status"] for row in rows] == ["failed"] and report.red(rows)


def test_long_cases_compare_fewer_heads(monkeypatch):
    case = replace(NORMED.case, heads_q=6, heads_kv=3)
    ends = Gate(case, make_inputs(case)).do
    assert ends[0, :2].any() and ends[1, 4:].any() and not ends[0, 2:].any() and not ends[1, :4].any()
    monkeypatch.setattr(gate, "_LONG", case.len_k)
    last = Gate(case, make_inputs(case)).do
    assert last[1, 4:].any() and not last[0].any() and not last[1, :4].any()
    rows, _ = run(NORM, replace(NORMED, case=case), providers=[providers.table("norm")["fused"]])
    assert {row["status"] for row in rows} == {"ok"}
