"""``python -m bench models``: whole models of transformers, patched and with what else a user can switch on.

Real shapes, random bfloat16 weights. One model serves all providers, which are switched on and off between the rounds:
weights, inputs and clock are the same for all. Losses are printed like wins.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench import command
from bench.gate import Verdict
from bench.names import words
from bench.suite import Entry, Row, Suite, Times, Trial, matching, pick, provider_table
from bench.suites.models import report
from bench.suites.models.providers import OURS, OURS_BESIDE_LIGER, PROVIDERS, Provider
from bench.suites.models.serving import Served
from bench.suites.models.shapes import MODELS, WORK, Model, Work, make
from bench.timing import ratio

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

    def unsupported(self, provider: Provider) -> str | None:
        if self._case.work.kind not in provider.kinds:
            return f"takes no part in {self._case.work.kind}"
        return "the model has no norms of heads" if provider.norms and not self._case.model.norms else None

    def enter(self, provider: Provider) -> Entry:
        """No gate: the models' own tests hold them to float64. What differs from the first provider is in the rows; of
        served requests the share of their tokens, most of which follow a token that rounding has changed."""
        if self._case.work.kind == "serve":
            return self._enter_serving(provider)
        step = Step(self._model, self._case.work, self._clock.device)
        try:
            with self._in_force(provider):
                step.fill()
                step()  # what a first call allocates for good is not this call's memory
                facts: Row = {"peak_mib": self._clock.peak_mib(step)}
        except Exception:
            self._model.zero_grad(set_to_none=True)
            raise
        self._first = step.result if self._first is None else self._first
        facts |= _agreement(self._first, step.result)
        return Entry(provider, Verdict(), lambda part: step, facts, lambda: self._in_force(provider))

    @contextmanager
    def _in_force(self, provider: Provider) -> Iterator[None]:
        """The provider is on, and so is activation checkpointing where the work asks for it."""
        with provider.on(self._model):
            if not self._case.work.checkpoints:
                yield
                return
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            try:
                yield
            finally:
                self._model.gradient_checkpointing_disable()

    def _enter_serving(self, provider: Provider) -> Entry:
        served = Served(self._model, self._case.work)

        @contextmanager
        def active() -> Iterator[None]:
            with provider.on(self._model), served.active():
                yield

        with provider.on(self._model):
            served.begin(**provider.manager)
        with active():
            facts: Row = {"peak_mib": self._clock.peak_mib(served)}
        self._first = served.result if self._first is None else self._first
        facts["off_first"] = (self._first != served.result).double().mean().item()
        return Entry(provider, Verdict(), lambda part: served, facts, active)

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
            "ours": provider.name in (OURS, OURS_BESIDE_LIGER),
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Tokens per second, and their time over ours."""
        rounds = {name: measurement.round_medians for name, measurement in measured.items()}
        against = {provider.name: provider.against for provider in self.providers}
        return {
            name: {
                "tokens_s": self._case.work.tokens / measurement.quantiles()[0] * 1e3,
                "ours_faster": ratio(rounds[name], rounds[against[name]]) if against[name] in rounds else None,
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
        add(
            "--work",
            default="",
            metavar="TEXT",
            help="of train, prefill, decode, serve (with -4K and so on; train-4K-checkpoint)",
        )
        add("--providers", default="", help=f"of {', '.join(PROVIDERS)} (default: all)")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Models, list[Case]]:
        models, works = matching(MODELS, args.models), matching(WORK, args.work)
        cases = [Case(model, work) for model in models for work in works if work.kind in model.kinds]
        if not cases:
            raise ValueError(f"{models[0].name} is not for {args.work}, but for {', '.join(models[0].kinds)}")
        return cls(pick(PROVIDERS, words(args.providers))), cases

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
        return report.summary(rows)


def main(argv: list[str]) -> int:
    return command.main(Models, argv)
