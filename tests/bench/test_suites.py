"""One run of each ``python -m bench SUITE`` at tiny cases on a CPU, and the errors that the gate sees.

``cp`` has a file of its own. ``fa3`` needs JAX and a GPU, where the gate judges each run of it.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from baselines import attentions, latent, masked, projections
from baselines.base import Baseline
from baselines.latent import LATENT, LatentBaseline
from baselines.rotations import LIGER
from bench import block, decode, gate, mla, rope
from bench.attention import cases, providers, suite
from bench.attention.suite import ATTENTION
from bench.gate import Gate
from bench.load import Load, Loads
from bench.models import shapes, suite as models
from bench.models.providers import PROVIDERS as OF_MODELS
from bench.suite import Provider
from fused_rope_attn import apply_rope_qk, masks
from tests.support.bench import FACTS, SHORT, TINY, TINY_MODEL, WallClock, run, scripted
from verification.testing import Case, make_inputs

MASKED = Case(1, 4, 2, 24, 24, 16, dtype=torch.float32)
LENGTHS = (5, 12, 1, 7)
DOCUMENTS = cases.packed(replace(MASKED, causal=False), LENGTHS)
NORMED = Case(2, 4, 2, 24, 24, 16, causal=True, dtype=torch.float32)
LATENTS = [mla.MlaCase(1, 3, 3, 33, 33, 16, value=48, dtype=torch.float32, interleaved=True)]
LATENTS.append(mla.MlaCase(2, 2, 2, 16, 16, 16, nope=16, value=16, dtype=torch.float32, interleaved=True))
ROTATED = rope.RopeCase("Normed", 1, (2, 1), 16, 8, (), torch.float32, norms=True)
BLOCKS = [block.BlockCase(1, 4, 2, 40, 40, 16, dtype=torch.float16, norms=norms, norm_dtype=torch.float16, width=48)
          for norms in (None, 0.0)]  # fmt: skip
STEP = decode.DecodeCase(2, 32, 4, 2, 16, torch.float32)


def of_kind(kind, case, name="Tiny", **changed):
    return cases.BenchCase(name, name, (kind,), replace(case, **changed), kind)


def wrong(provider):
    def run(*given):
        out = provider.run(*given)
        return [1.1 * x for x in out] if isinstance(out, list) else 1.1 * out

    return replace(provider, name="wrong", label="wrong", run=run)


def wrong_step(step):
    run = decode.PROVIDERS["fused"].make(step)
    return lambda: 1.1 * run()


def by_document(q, k, v, ends, longest):
    parts = zip(*(x.transpose(0, 1)[None].tensor_split(ends[1:-1].tolist(), 2) for x in (q, k, v)))
    out = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat(out, 2)[0].transpose(0, 1)


def flex(q, k, v, *, block_mask, enable_gqa, kernel_options=None):
    """FlexAttention by SDPA, because without a compiler it has no backward on a CPU."""
    position = torch.arange(k.shape[2])
    visited = block_mask.to_dense()[0, 0].bool()[position // 128][:, position // 128]
    sees = visited & block_mask.mask_mod(0, 0, position[:, None], position)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=enable_gqa)


def masked_people(kind, right, wrong):
    def rotate(q, k, tables):
        return apply_rope_qk(q, k, *(table[..., : table.shape[-1] // 2] for table in tables))

    def rival(name, attend):
        attention = masked.MaskedAttention(name, name, lambda: None, **{mask: attend})
        return providers.masked_rival(attention, mask, replace(LIGER, missing=lambda: None, rotate=rotate))

    mask = "intervals" if kind in cases.INTERVALS else kind
    mine = [provider for provider in providers.table(kind).values() if provider.ours]
    return [*mine, rival("right", right), rival("wrong", wrong)]


def eager_gemm(project, x, weight):
    q, k, v = project.split(F.linear(x.float(), weight.float()))
    rstd = torch.cat([x.square().mean(-1).add(project.eps).rsqrt() for x in (q, k, v)], 1)
    cos, sin = project.tables
    parts = zip((q, k), rstd.split([*project.heads, v.shape[1]], 1), project.norms or (1, 1))
    q, k = (
        projections._unrotate(x * (scale[..., None] * weight if project.norms else 1), cos, -sin)
        for x, scale, weight in parts
    )
    return torch.cat((q, k, v), 1).flatten(1).to(x.dtype), rstd


def wrong_build(rows, tables):
    return latent._hf([rows[0], rows[1].flip(-1), *rows[2:]], tables)


BARE_SDPA = Baseline("", None, attentions.SDPA)
FULL = replace(attentions.SDPA, attend=lambda q, k, v, causal: attentions.SDPA.attend(q, k, v, False))
EAGER_BLOCK = block.PROVIDERS["eager"]
UNMASKED = {name: replace(getattr(EAGER_BLOCK, name), attention=FULL) for name in ("plain", "normed")}
UNMASKED = replace(EAGER_BLOCK, name="wrong", label="wrong", **UNMASKED)
IN_EPILOGUE = [replace(block.PROVIDERS[name], missing=lambda: None) for name in ("quack_fused", "quack_fa4")]
IN_EPILOGUE[1] = replace(IN_EPILOGUE[1], plain=BARE_SDPA, normed=BARE_SDPA)
# They take part in ``python -m bench mla`` here.
LATENT_RIVALS = {
    "bare_sdpa": LatentBaseline("bare_sdpa", None, attentions.SDPA),
    "wrong": LatentBaseline("wrong", replace(latent.HF, build=wrong_build), attentions.SDPA),
}


class Measured(NamedTuple):
    """A run: its cases, who runs, passes, modes, and the figure of a row. "wrong" fails."""

    cases: list
    people: list
    passes: tuple[str, ...] = ("fwd", "bwd")
    modes: tuple[str, ...] = ("graph",)
    figure: str = ""
    arguments: str = ""
    clock: Any = None


class Steady(WallClock):
    measurement = Loads

    def sample(self, fn, calls):
        (ms,) = super().sample(fn, 1)
        return Load(calls, ms, 700.0 * ms)


def rate(case, row):
    """The gradient of a norm reads what was normed too; float8 is half as large."""
    moved = 1.5 if row.get("norms") and row["pass"] == "bwd" and row["provider"] != "copy" else 1.0
    return moved * case.bytes / row["ms"] * 1e-6 / (2 if row["provider"] == "fused_float8" else 1)


# Each figure of a row, computed from its case and its other fields.
FIGURES = {
    "mj": lambda case, row: sum(row["mj_rounds"]) / 2,
    "tflops": lambda case, row: case.flops(row["pass"]) / row["ms"] * 1e-9,
    "gb_s": rate,
    "tokens_s": lambda case, row: case.work.tokens / row["ms"] * 1e3,
}


def select(table, *names):
    return [table[name] for name in names]


PLAIN, NORM = providers.table("plain"), providers.table("norm")
HOST, COROPE = providers.table("host"), providers.table("corope")
WINDOW, INTERVALS = masked.FLEX.window, masked.FLEX.intervals
TREE = of_kind("tree", MASKED, "tree", causal=False, len_q=28, len_k=28)
TREE = replace(TREE, case=replace(TREE.case, intervals=lambda n: masks.prefix_tree([-1, 0, 1, 1, 0, 4, 4], [4] * 7)))
CUMULATED = torch.tensor((0, *LENGTHS)).cumsum(0)
EAGER, BOTH_MODES = ("eager",), ("eager", "graph")
ROTATIONS = [rope.RopeCase("Tiny", 2, (4, 2), 16, 8, (), torch.float32),
             rope.RopeCase("Wide", 1, (2, 2), 256, 8, (), torch.float32), ROTATED]  # fmt: skip
RUNS = {
    "attention": Measured(
        [TINY],
        [*select(PLAIN, "fused", "bare_fused", "hf_sdpa", "hf_flash_attn", "bare_flash"), wrong(PLAIN["fused"])],
        ("fwd", "bwd", "both"), BOTH_MODES, "tflops", "--mode eager,graph --passes fwd,bwd,both"),
    "attention: host": Measured(
        [SHORT], [*select(HOST, "fused", "bare_sdpa", "nothing"), wrong(HOST["nothing"])],
        ("fwd", "fwd_grad", "both"), ("host",)),
    "attention: load": Measured(
        [TINY], [PLAIN["fused"], scripted("rival"), wrong(scripted("rival"))], modes=("load",), figure="mj",
        arguments="--mode load --providers fused,rival,wrong", clock=Steady()),
    "attention: corope": Measured(
        [of_kind("corope", Case(2, 4, 2, 9, 9, 8, dtype=torch.float32))], [*COROPE.values(), wrong(COROPE["corope"])],
        modes=EAGER),
    "attention: window": Measured(
        [of_kind("window", MASKED, window=(6, 0))],
        masked_people("window", WINDOW, lambda q, k, v, left: WINDOW(q, k, v, left + 1)), modes=EAGER),
    "attention: packed": Measured(
        [of_kind("packed", cases.packed(MASKED, LENGTHS))],
        masked_people("packed", by_document, lambda q, k, v, *ends: by_document(q, k, v.flip(0), *ends)), modes=EAGER),
    "attention: intervals": Measured(
        [TREE, of_kind("documents", DOCUMENTS, "documents", intervals=lambda n: masks.documents(CUMULATED, n))],
        masked_people("tree", INTERVALS, lambda q, k, v, *bounds: INTERVALS(q, k, v.flip(2), *bounds)), modes=EAGER),
    "attention: unsplit": Measured(
        [of_kind("unsplit", TINY.case, batch=1, len_q=140, len_k=140)],
        select(providers.table("unsplit"), "fused", "fused_same_bits", "flex16", "flex64"),
        ("fwd",), figure="tflops", arguments="--passes fwd"),
    "norm": Measured(
        [of_kind("norm", NORMED, f"offset-{offset}", norms=float(offset)) for offset in (0, 1)],
        [*select(NORM, "fused", "fused_without", "norm_hf_sdpa"), wrong(NORM["fused"])], figure="tflops"),
    "block": Measured(BLOCKS, [*select(block.PROVIDERS, "fused", "eager"), *IN_EPILOGUE, UNMASKED], ("fwd", "both")),
    "mla": Measured(LATENTS, [*select(mla.PROVIDERS, "fused", "hf_sdpa"),
                              *(Provider(b.name, b.label, b.role) for b in LATENT_RIVALS.values())]),
    "rope": Measured(ROTATIONS, [*select(rope.PROVIDERS, "apply_rope", "copy"), wrong(rope.PROVIDERS["apply_rope"])],
                     figure="gb_s"),
    "decode": Measured(
        [STEP], [*select(decode.PROVIDERS, "fused", "fused_page16", "fused_float8", "fused_same_bits", "copy"),
                 decode.rival("sdpa", attentions.SDPA), decode.DecodeProvider("wrong", "wrong", make=wrong_step)],
        ("decode",), BOTH_MODES, "gb_s"),
    "models": Measured(
        [models.ModelCase(TINY_MODEL, shapes.Work(kind, 2, 16)) for kind in ("train", "step", "prefill", "decode")],
        select(OF_MODELS, "sdpa", "fused"), (), EAGER, "tokens_s"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_who_is_right_is_timed_and_who_is_wrong_is_not(name, measure, monkeypatch, capsys):
    for rival, baseline in LATENT_RIVALS.items():
        monkeypatch.setitem(LATENT, rival, baseline)
    monkeypatch.setattr(projections.Projection, "gemm", eager_gemm)
    monkeypatch.setattr(projections, "_compiled", lambda: projections._gradients)
    monkeypatch.setattr(masked, "compiled_flex", lambda: flex)
    monkeypatch.setattr(attentions, "compiled_flex", lambda: flex)
    chosen, people, passes, modes, figure, arguments, clock = RUNS[name]
    status, rows = measure(name.partition(":")[0], chosen, people, *arguments.split(), clock=clock)
    assert status == any(provider.name == "wrong" and provider.ours for provider in people)
    people, of_case = {each.name: each for each in people}, {(case.name, case.shape): case for case in chosen}
    timed = {tuple(map(row.get, ("case", "shape", "provider", "pass", "mode"))) for row in rows if row["pass"]}
    assert timed == {
        (*of, who, part, mode)
        for of, case in of_case.items()
        for who in people.keys() - {"wrong"}
        for part in passes or [case.work.name]
        for mode in modes
    }, rows
    for row in rows:
        who = people[row["provider"]]
        assert (FACTS | {"role": who.role, "label": who.label}).items() <= row.items()
        if who.name == "wrong":
            assert row["status"] == "failed" and row["detail"]
            continue
        assert row["status"] in (("ok",) if who.ours else ("ok", "loose")) and len(row["rounds"]) == 2
        assert row["p20"] <= row["ms"] <= row["p80"]
        if figure:
            assert row[figure] == pytest.approx(FIGURES[figure](of_case[row["case"], row["shape"]], row))
    out, err = capsys.readouterr()
    assert ("under load" in out) == (modes == ("load",))
    assert "toy, driver 1, torch 2, triton 3" in out and f"{len(rows)} rows in" in out and "gate" in err
    assert ("FAILED the gate" in out) == ("wrong" in people) and all(each.label in out for each in people.values())


def verdict(suite, case, provider):
    rows, _ = run(suite, case, providers=[provider], modes=("eager",))
    return rows[0]["status"], rows[0]["detail"]


def half_the_last_head(q, k, v, given):
    keep = torch.ones_like(q)
    keep[-1, -1] = 0.5
    return providers.fused(q, k, v, given) * keep


def coarse(q, k, v, given):
    bump = torch.zeros_like(q)
    bump[:, :, 5] = 2e-3  # one row, a few roundings off
    return providers.fused(q, k, v, given) + bump


@pytest.mark.parametrize(
    ("run", "role", "status", "detail"),
    [
        (half_the_last_head, "rival", "failed", "rows too far off"),
        (coarse, "rival", "loose", "o: "),
        (coarse, "ours", "failed", "o: "),
    ],
)
def test_outputs_of_attention(run, role, status, detail):
    found = verdict(ATTENTION, TINY, scripted("x", run, role=role))
    assert found[0] == status and detail in found[1]


def steep(*xs):
    return [1.01 * x - 0.01 * x.detach() for x in xs]


def steep_norms(q, k, v, given):
    return providers.fused(
        *steep(q, k, v), given._replace(weights=dict(zip(given.weights, steep(*given.weights.values()))))
    )


def steep_rotation(xs, tables, weights):
    return rope.PROVIDERS["apply_rope"].run(steep(*xs), tables, steep(*weights))


def test_every_gradient_is_compared(monkeypatch):
    own = mla.rope_attention_mla
    monkeypatch.setattr(
        mla, "rope_attention_mla", lambda *rows, **options: own(*steep(*rows[:5]), *rows[5:], **options)
    )
    with_norms = of_kind("norm", NORMED, norms=0.0), replace(NORM["fused"], run=steep_norms)
    for names, *given in (
        ("dq dk dv dq_norm dk_norm", suite.NORM, *with_norms),
        ("dq_nope dq_rope dk_nope dk_rope dv", mla.MLA, LATENTS[0], mla.PROVIDERS["fused"]),
        ("dx dweight", rope.ROPE, ROTATED, rope.RopeProvider("x", "x", run=steep_rotation)),
    ):
        status, detail = verdict(*given)
        assert status == "failed" and {*re.findall(r"(?:^|; )(\w+): ", detail)} == {*names.split()}, detail


def test_angles_of_a_step_in_float8_and_copies():
    fused = decode.PROVIDERS["fused_float8"]
    wrong = replace(fused, make=lambda step: fused.make(step._replace(cos=step.cos.roll(1, 0))))
    assert verdict(decode.DECODE, STEP, wrong)[0] == "failed"
    copy = rope.RopeProvider("copy", "copy", "ceiling", run=lambda xs, tables, weights: [2 * x for x in xs])
    assert verdict(rope.ROPE, ROTATED, copy) == ("failed", "is no copy")


def test_long_cases_compare_fewer_heads(monkeypatch):
    case = replace(NORMED, heads_q=6, heads_kv=3, norms=0.0)
    ends = Gate(case, make_inputs(case)).do
    assert ends[0, :2].any() and ends[1, 4:].any() and not ends[0, 2:].any() and not ends[1, :4].any()
    monkeypatch.setattr(gate, "_LONG", case.len_k)
    last = Gate(case, make_inputs(case)).do
    assert last[1, 4:].any() and not last[0].any() and not last[1, :4].any()
    assert verdict(suite.NORM, of_kind("norm", case), NORM["fused"])[0] == "ok"
