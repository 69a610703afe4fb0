"""``python -m bench models``: whole models of transformers, patched and with what else a user can switch on.

Real shapes, random bfloat16 weights. One model serves all providers, which are switched on and off between the rounds:
weights, inputs and clock are the same for all. Losses are printed like wins.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baselines.rotations import LIGER
from bench import command, report
from bench.gate import Verdict
from bench.names import length_name, words
from bench.suite import Entry, Row, Suite, Times, Trial, matching, never_missing, pick, provider_table
from bench.tables import markdown, provenance
from bench.timing import ratio

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
        return f"{self.kind}-{length_name(self.length)}"

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


@dataclass(frozen=True)
class Provider:
    """A way to run a model's attention: ``on(model)`` is in force while a round of it runs."""

    name: str
    label: str
    on: Callable[[nn.Module], Any]
    missing: Callable[[], str | None] = never_missing


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("sdpa", "sdpa", lambda model: _attention(model, "sdpa")),
        Provider("flash_2", "flash_attention_2", lambda model: _attention(model, "flash_attention_2"), _flash_missing),
        Provider("liger", "Liger's rotation + sdpa", _liger, LIGER.missing),
        Provider(OURS, "patch_model", _fused),
    )
}


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


@dataclass(frozen=True)
class Case:
    """One work on one model."""

    model: Model
    work: Work

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.work.name}"

    @property
    def shape(self) -> str:
        return f"B{self.work.batch} N{self.work.length}"


class ModelTrial(Trial):
    """One work on one model, which serves all providers: they are switched on and off between the rounds."""

    def __init__(self, providers: list[Provider], case: Case, model: nn.Module, clock: Any) -> None:
        super().__init__(providers)
        self._case, self._model, self._clock = case, model, clock
        self._first: Tensor | None = None

    def passes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        return (self._case.work.name,)

    def enter(self, provider: Provider) -> Entry:
        """No gate: the models' own tests hold them to float64. What differs from the first provider is in the rows."""
        step = Step(self._model, self._case.work, self._clock.device)
        try:
            with provider.on(self._model):
                step.fill()
                step()  # what a first call allocates for good is not this call's memory
                facts: Row = {"peak_mib": self._clock.peak_mib(step)}
        except Exception:
            self._model.zero_grad(set_to_none=True)
            raise
        self._first = step.result if self._first is None else self._first
        facts |= _agreement(self._first, step.result)
        return Entry(provider, Verdict(), lambda part: step, facts, lambda: provider.on(self._model))

    def fields(self, provider: Provider) -> Row:
        return {
            "bench": "models",
            "case": self._case.model.name,
            "layers_left_out": self._case.model.left_out,
            "pass": self._case.work.name,
            "shape": self._case.shape,
            "mode": "eager",
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name == OURS,
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Tokens per second, and their time over ours."""
        rounds = {name: measurement.round_medians for name, measurement in measured.items()}
        return {
            name: {
                "tokens_s": self._case.work.tokens / measurement.quantiles()[0] * 1e3,
                "ours_faster": ratio(rounds[name], rounds[OURS]) if OURS in rounds else None,
            }
            for name, measurement in measured.items()
        }


def _agreement(first: Tensor, result: Tensor) -> dict[str, float]:
    """How far a result is from the first provider's, in the rms of that; and the result itself where it is the loss."""
    distance = (result.double() - first.double()).square().mean().sqrt() / first.double().square().mean().sqrt()
    facts = {"off_first": distance.item()}
    return facts | {"loss": result.item()} if result.ndim == 0 else facts


@dataclass
class Models(Suite):
    """One model at a time is in memory, for all works that follow one another on it."""

    providers: list[Provider]
    _made: tuple[Model, nn.Module] | None = None

    command = "models"
    description = "Time whole models of transformers, patched and not."
    all_passes = ()
    modes = ("eager",)
    mode = "eager"
    rounds = 3
    round_ms = 300.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--models", default="", metavar="TEXT", help="only models whose name contains one of these")
        add("--work", default="", metavar="TEXT", help="of train, prefill, decode (with -4K and so on)")
        add("--providers", default="", help=f"of {', '.join(PROVIDERS)} (default: all)")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Models, list[Case]]:
        models, works = matching(MODELS, args.models), matching(WORK, args.work)
        return cls(pick(PROVIDERS, words(args.providers))), [Case(model, work) for model in models for work in works]

    def listing(self, cases: list[Case]) -> str:
        lines = []
        for model in dict.fromkeys(case.model.name for case in cases):
            shape = next(case.model for case in cases if case.model.name == model)
            left_out = f" ({shape.left_out} layers left out)" if shape.left_out else ""
            lines.append(f"{model} {shape.config}{left_out}")
        works = dict.fromkeys(f"{case.work.name} (batch {case.work.batch})" for case in cases)
        return "\n".join([*lines, f"work: {', '.join(works)}", "", provider_table(self.providers)])

    def open(self, case: Case, clock: Any) -> ModelTrial:
        if self._made is None or self._made[0] is not case.model:
            self._made = None  # before the next one is made: there is memory for one
            clock.release()
            self._made = case.model, make(case.model, clock.device)
        return ModelTrial(self.providers, case, self._made[1], clock)

    def summary(self, rows: list[Row]) -> str:
        return summary(rows)


def summary(rows: list[Row]) -> str:
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


def results(rows: list[Row]) -> str:
    """The generated table of the documents: tokens per second at each work. ValueError without rows."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
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
        f"{markdown(_HEADER, lines)}\n\n"
        "Tokens per second in eager mode, random bfloat16 weights, one after the other in one process; ×: their time "
        "over ours, below 1 a loss; MiB: peak memory beyond the weights. train: forward, loss and backward; prefill: "
        "into an empty dynamic cache; decode: one token onto one. With few tokens the host is the limit, and most of "
        f"its time is the model's own. {provenance(ours, 'transformers', 'liger-kernel')}"
    )


def main(argv: list[str]) -> int:
    return command.main(Models, argv)
