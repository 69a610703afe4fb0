"""``python -m bench models``: whole models of transformers, patched and with what else a user can switch on.

Real shapes, random bfloat16 weights. One model serves all providers, which are switched on and off between the rounds:
weights, inputs and clock are the same for all. Losses are printed like wins.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import readme, report
from bench.environment import ROOT, environment
from bench.timing import interleave, ratio

RESULTS = ROOT / "bench" / "results"
OURS = "fused"


@dataclass(frozen=True)
class Model:
    """A shape: the family of transformers' classes, what its config says, and how many layers memory costs it."""

    name: str
    family: str
    config: dict[str, Any]
    left_out: int = 0


_LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_attention_heads": 32,
}
MODELS = (
    Model(
        "Llama-3.2-1B",
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64} | _LLAMA3,
    ),
    Model(
        "Llama-3.1-8B",
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "head_dim": 128} | _LLAMA3,
        left_out=24,
    ),
    Model(
        "Qwen3-0.6B",
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        },
    ),
)


@dataclass(frozen=True)
class Work:
    """What is timed: ``train`` is forward, loss and backward; ``prefill`` fills a cache; ``decode`` adds one token
    after another to a dynamic cache of ``length`` tokens."""

    kind: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.length // 1024}K" if self.length >= 1024 else f"{self.kind}-{self.length}"

    @property
    def tokens(self) -> int:
        return self.batch if self.kind == "decode" else self.batch * self.length


WORK = (
    Work("train", 4, 2048),
    Work("train", 2, 4096),
    Work("prefill", 1, 4096),
    Work("prefill", 1, 16384),
    Work("decode", 8, 4096),
)


@contextmanager
def _attention(model: nn.Module, implementation: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _liger(model: nn.Module) -> Iterator[None]:
    """Liger's rotation in the place of transformers', as its own patches set it: for the module, hence undone."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    modeling = sys.modules[type(model).__module__]
    before = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = liger_rotary_pos_emb
    try:
        with _attention(model, "sdpa"):
            yield
    finally:
        modeling.apply_rotary_pos_emb = before


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    from fused_rope_attn.integrations.transformers import patch_model, unpatch_model

    patch_model(model)
    try:
        yield
    finally:
        unpatch_model(model)


def _flash_missing() -> str | None:
    from transformers.utils import is_flash_attn_2_available

    return None if is_flash_attn_2_available() else "flash-attn is not installed"


def _liger_missing() -> str | None:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return "liger-kernel is not installed"
    return None


@dataclass(frozen=True)
class Provider:
    """A way to run a model's attention: ``on(model)`` is in force while a round of it runs."""

    name: str
    label: str
    on: Callable[[nn.Module], Any]
    missing: Callable[[], str | None] = lambda: None


PROVIDERS = (
    Provider("sdpa", "sdpa", lambda model: _attention(model, "sdpa")),
    Provider("flash_2", "flash_attention_2", lambda model: _attention(model, "flash_attention_2"), _flash_missing),
    Provider("liger", "Liger's rotation + sdpa", _liger, _liger_missing),
    Provider(OURS, "patch_model", _fused),
)


def make(shape: Model, device: torch.device) -> nn.Module:
    """The model with random weights, bfloat16 on a GPU."""
    import transformers

    config = getattr(transformers, f"{shape.family}Config")(**shape.config, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return getattr(transformers, f"{shape.family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)


# Tokens that are added to a cache before they are taken back: nobody who generates takes each of them back.
DECODED = 64


class Step:
    """One work on one model: calling it runs it once; ``result`` is the loss, or the logits of the last token, of the
    first one that is added to a cache."""

    def __init__(self, model: nn.Module, work: Work, device: torch.device):
        self.model, self.work = model, work
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(vocabulary, (work.batch, work.length), generator=generator).to(device)
        self.result: Tensor | None = None
        self.past, self.added = None, 0
        model.train(work.kind == "train")

    def __call__(self) -> None:
        if self.work.kind == "train":
            loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            self.model.zero_grad(set_to_none=True)
            self.result = loss.detach()
            return
        with torch.no_grad():
            if self.work.kind == "prefill":
                self.result = self.model(self.ids, use_cache=True, logits_to_keep=1).logits
            else:
                logits = self.model(self.ids[:, -1:], past_key_values=self.past).logits
                self.result = logits if self.added == 0 else self.result
                self.added += 1
                if self.added == DECODED:
                    self.past.crop(-DECODED)
                    self.added = 0

    def fill(self) -> None:
        """The cache that decoding adds to, from this very provider's prefill."""
        if self.work.kind == "decode":
            with torch.no_grad():
                self.past = self.model(self.ids, use_cache=True, logits_to_keep=1).past_key_values
                self.added = 0


@dataclass
class Run:
    """``clock`` as in ``runner.Clock``; ``deadline`` a time.monotonic()."""

    providers: list[Provider]
    clock: Any
    environment: dict[str, Any]
    rounds: int = 3
    round_ms: float = 300.0
    deadline: float = float("inf")
    progress: Callable[[str], None] = lambda message: None
    not_run: list[str] = field(default_factory=list)

    def rows(self, models: list[Model], works: list[Work]) -> Iterator[list[report.Row]]:
        """Rows of one work after the other; at the deadline it notes what is left."""
        for shape in models:
            model = None
            for work in works:
                if self._late():
                    self.not_run.append(f"{shape.name} {work.name}")
                    continue
                self.progress(f"{shape.name} {work.name}")
                model = make(shape, self.clock.device) if model is None else model
                yield self._work(shape, model, work)
            del model
            self.clock.release()

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _work(self, shape: Model, model: nn.Module, work: Work) -> list[report.Row]:
        rows, steps, calls, facts = [], {}, {}, {}
        for provider in self.providers:
            reason = provider.missing()
            if reason:
                rows.append(self._row(shape, work, provider, {"status": "missing", "detail": reason}))
                continue
            step = Step(model, work, self.clock.device)
            try:
                with provider.on(model):
                    step.fill()
                    calls[provider.name] = self.clock.calls_for(step, self.round_ms)
                    facts[provider.name] = {"peak_mib": self.clock.peak_mib(step)}
                steps[provider.name] = (provider, step)
                facts[provider.name] |= {"status": "ok", "detail": ""} | self._agreement(steps, provider.name)
            except Exception as error:
                sentence = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                rows.append(self._row(shape, work, provider, {"status": "error", "detail": sentence}))
                steps.pop(provider.name, None)
                model.zero_grad(set_to_none=True)

        def sample(pair: tuple[Provider, Step], count: int) -> list[float]:
            provider, step = pair
            with provider.on(model):
                return self.clock.sample(step, count)

        measured, failed = interleave(steps, sample, calls, self.rounds, self._late)
        for name, error in failed.items():
            rows.append(self._row(shape, work, steps[name][0], {"status": "error", "detail": str(error)[:200]}))
        medians = {name: measurement.round_medians for name, measurement in measured.items()}
        for name, measurement in measured.items():
            median, p20, p80 = measurement.quantiles()
            row = self._row(shape, work, steps[name][0], facts[name])
            row |= {"ms": median, "p20": p20, "p80": p80, "rounds": medians[name], "calls": len(measurement.samples)}
            row |= {"tokens_s": work.tokens / median * 1e3}
            row["ours_faster"] = ratio(medians[name], medians[OURS]) if OURS in medians else None
            rows.append(row)
        return rows

    @staticmethod
    def _agreement(steps: dict[str, tuple[Provider, Step]], name: str) -> dict[str, float]:
        """The loss; and how far the result is from the first provider's, in its rms."""
        first, result = next(iter(steps.values()))[1].result, steps[name][1].result
        distance = (result.double() - first.double()).square().mean().sqrt() / first.double().square().mean().sqrt()
        facts = {"off_first": distance.item()}
        return facts | {"loss": result.item()} if result.ndim == 0 else facts

    def _row(self, shape: Model, work: Work, provider: Provider, facts: dict[str, Any]) -> report.Row:
        # The keys by which report.read_lines knows a measurement are those of the other benchmarks.
        row = {"bench": "models", "case": shape.name, "layers_left_out": shape.left_out, "pass": work.name}
        row |= {"shape": f"B{work.batch} N{work.length}", "mode": "eager"}
        row |= {"provider": provider.name, "label": provider.label}
        return row | facts | self.environment


def summary(rows: list[report.Row]) -> str:
    """A table of all rows: tokens/s, peak memory, and ours against each; a ratio below 1 is a loss."""
    lines = []
    for row in rows:
        if "ms" not in row:
            lines.append([row["case"], row["pass"], row["label"], row["status"], "", "", "", row["detail"][:40]])
            continue
        faster = row["ours_faster"]
        lines.append(
            [
                row["case"], row["pass"], row["label"], f"{row['tokens_s']:.0f}", report.milliseconds(row["ms"]),
                f"{row['peak_mib']:.0f}", "" if faster is None else report.speedup(faster),
                f"{row['loss']:.4f}" if "loss" in row else f"off {row['off_first']:.1e}",
            ]
        )  # fmt: skip
    header = ["model", "work", "provider", "tokens/s", "ms", "peak MiB", "ours", "loss"]
    lost = [r for r in rows if r.get("ours_faster") is not None and r["ours_faster"] < 1 and r["provider"] != OURS]
    slower = [f"slower than {row['label']}: {row['case']} {row['pass']} {row['ours_faster']:.2f}" for row in lost]
    return "\n".join([report.table(header, lines, left=3), *slower])


_HEADER = ["model", "work", "sdpa", "Liger's rotation + sdpa", "`patch_model`", "over sdpa", "over Liger", "MiB"]


def block(rows: list[report.Row]) -> str:
    """README's table: tokens per second at each work. ValueError without rows."""
    groups: dict[tuple[str, str], dict[str, report.Row]] = {}
    for row in rows:
        if row.get("bench") == "models" and "ms" in row:
            groups.setdefault((row["case"], f"{row['pass']}, {row['shape']}"), {})[row["provider"]] = row
    groups = {key: group for key, group in groups.items() if OURS in group}
    if not groups:
        raise ValueError("no rows of bench models with our own times")
    lines = []
    for (model, work), group in groups.items():
        mine, rivals = group[OURS], [group.get("sdpa"), group.get("liger")]
        speeds = [f"{row['tokens_s']:.0f}" if row else "-" for row in (*rivals, mine)]
        gains = [f"{ratio(row['rounds'], mine['rounds']):.2f}×" if row else "-" for row in rivals]
        left_out = f" ({mine['layers_left_out']} layers left out)" if mine["layers_left_out"] else ""
        lines.append([model + left_out, work, *speeds, *gains, f"{mine['peak_mib']:.0f}"])
    ours = [group[OURS] for group in groups.values()]
    return (
        f"{readme.markdown(_HEADER, lines)}\n\n"
        "Tokens per second in eager mode, random bfloat16 weights, one after the other in one process; ×: their time "
        "over ours, below 1 a loss; MiB: peak memory beyond the weights. train: forward, loss and backward; prefill: "
        "into an empty dynamic cache; decode: one token onto one. With few tokens the host is the limit, and most of "
        f"its time is the model's own. {readme.provenance(ours, 'transformers', 'liger-kernel')}"
    )


def main(argv: list[str]) -> int:
    if argv[:1] == ["readme"]:
        return readme.block_main(argv[1:], "models", block, ROOT / "README.md")
    args = _parser().parse_args(argv)
    models = _chosen(MODELS, args.models)
    works = _chosen(WORK, args.work)
    providers = [p for p in PROVIDERS if not args.providers or p.name in args.providers.split(",")]
    if not models or not works or not providers:
        print("bench models: --models, --work or --providers leaves nothing; --dry-run lists all", file=sys.stderr)
        return 2
    if args.dry_run:
        for shape in models:
            print(shape.name, shape.config, "" if not shape.left_out else f"({shape.left_out} layers left out)")
        print("work:", ", ".join(f"{work.name} (batch {work.batch})" for work in works))
        for provider in providers:
            print(f"{provider.name}: {provider.label}, {provider.missing() or 'here'}")
        return 0
    if not torch.cuda.is_available():
        print("bench models: no GPU here; --dry-run lists what would run.", file=sys.stderr)
        return 2
    from bench.timing import GpuClock

    facts = environment()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    out = args.out or RESULTS / f"{str(facts['gpu']).split()[-1].lower()}-{stamp}-models.jsonl"
    deadline = time.monotonic() + args.time_budget if args.time_budget else float("inf")
    clock = GpuClock(torch.device("cuda", torch.cuda.current_device()))
    run = Run(providers, clock, facts, args.rounds, args.round_ms, deadline, lambda text: print(text, file=sys.stderr))
    rows: list[report.Row] = []
    for some in run.rows(models, works):
        rows += some
        report.write_lines(out, some)
    print(summary(rows))
    if run.not_run:
        print(f"not run, the time budget was spent: {', '.join(run.not_run)}")
    return int(any(row["provider"] == OURS and row["status"] != "ok" for row in rows))


def _chosen(items: tuple, words: str) -> list:
    return [item for item in items if not words or any(word in item.name for word in words.split(","))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench models",
        description="Whole models, patched and not.",
        epilog="further: python -m bench models readme FILE... [--check]",
    )
    parser.add_argument("--models", default="", metavar="TEXT", help="only models whose name contains one of these")
    parser.add_argument("--work", default="", metavar="TEXT", help="of train, prefill, decode (with -4K and so on)")
    parser.add_argument("--providers", default="", help=f"of {', '.join(p.name for p in PROVIDERS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=300.0, help="GPU time for each provider in each round")
    parser.add_argument("--out", type=Path, help="JSON lines, appended (default: bench/results/GPU-DATE-models.jsonl)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="list what would run; no GPU needed")
    return parser
