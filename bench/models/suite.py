"""``python -m bench models``: whole models of transformers, patched and with other attentions that a user can choose.

The shapes are real, the weights random bfloat16. One model serves all providers, which are switched on and off between
the rounds, so that weights, inputs and clock are the same for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bench.gate import Verdict
from bench.models.providers import PROVIDERS, ModelProvider
from bench.models.serving import Served
from bench.models.shapes import MODELS, WORK, Model, Work, make
from bench.report import Row
from bench.suite import Entry, Suite, Times, Trial

# Tokens that are added to a cache before they are taken back. Real generation never truncates after every token.
DECODED = 64


class Step:
    """One work on one model; calling it runs it once.

    optimizer: takes a step after each backward. result: the loss, or the logits of the last token; of decoding, of the
    first token that is added to the cache.
    """

    def __init__(self, model: nn.Module, work: Work, device: torch.device, optimizer: Optimizer | None = None):
        self.model, self.work, self.optimizer = model, work, optimizer
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(vocabulary, (work.batch, work.length), generator=generator).to(device)
        self.result: Tensor | None = None
        self.past, self.added = None, 0
        # transformers 5.24 renames the argument and the output, and keeps the older name by a slower wrapper.
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        model.train(work.trains)

    def __call__(self) -> None:
        if self.work.trains:
            loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.model.zero_grad(set_to_none=True)
            self.result = loss.detach()
            return
        with torch.no_grad():
            if self.work.kind == "prefill":
                self.result = self.model(self.ids, use_cache=True, logits_to_keep=1).logits
            else:
                logits = self.model(self.ids[:, -1:], **{self.cache_name: self.past}).logits
                self.result = logits if self.added == 0 else self.result
                self.added += 1
                if self.added == DECODED:
                    self.past.crop(-DECODED)
                    self.added = 0

    def begin(self) -> None:
        """Fill the cache that decoding adds to, and call once, because the first call may allocate memory it keeps."""
        if self.work.kind == "decode":
            with torch.no_grad():
                filled = self.model(self.ids, use_cache=True, logits_to_keep=1)
                self.past = getattr(filled, self.cache_name)
        self()

    active = staticmethod(nullcontext)

    @staticmethod
    def distance(result: Tensor, first: Tensor) -> float:
        """Return the rms difference of two results over the rms of the first."""
        return ((result.double() - first.double()).square().mean() / first.double().square().mean()).sqrt().item()


@dataclass(frozen=True)
class ModelCase:
    """One work on one model. Rows hold the model as the case, the work as the pass."""

    model: Model
    work: Work

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.work.kind,)

    @property
    def shape(self) -> str:
        """Return ``train-2K B4 N2048``."""
        return f"{self.work.name} B{self.work.batch} N{self.work.length}"


class ModelTrial(Trial):
    """One work on one model.

    There is no gate: the models' own tests hold them to float64. Rows hold how far a result is from the first
    provider's; of served requests the share of differing tokens, which is large after one token that rounding has
    changed.
    """

    case: ModelCase
    default_modes = ("eager",)
    _made: tuple[Model, nn.Module, Optimizer] | None = None  # one model at a time is in memory

    def open(self) -> None:
        case, clock = self.case, self.clock
        self._first: Tensor | None = None
        self.default_passes = (case.work.name,)
        made = ModelTrial._made
        if made is None or made[0] is not case.model:
            made = ModelTrial._made = None  # before the next one is made
            clock.release()
            model = make(case.model, clock.device)
            # With a learning rate of 0 a step does all its work, and leaves the weights as they are for the next one.
            made = ModelTrial._made = case.model, model, AdamW(model.parameters(), lr=0.0, fused=True)
        _, self._model, self._optimizer = made

    def enter(self, provider: ModelProvider) -> Entry:
        work = self.case.work
        optimizer = self._optimizer if work.kind == "step" else None
        step: Any = (
            Served(self._model, work) if work.kind == "serve" else Step(self._model, work, self.clock.device, optimizer)
        )

        @contextmanager
        def active() -> Iterator[None]:
            with provider.on(self._model), step.active():
                yield

        self._model.zero_grad(set_to_none=True)  # of a provider that has failed
        # A manager sizes its pages by the free memory, and PyTorch's allocator keeps what earlier providers have freed.
        self.clock.release()
        with provider.on(self._model):
            step.begin(**provider.manager)
        with active():
            peak = self.clock.peak_mib(step)
        self._first = step.result if self._first is None else self._first
        facts = {"peak_mib": peak, "off_first": step.distance(step.result, self._first)}
        return Entry(provider, Verdict(), lambda part: step, facts, active)

    def fields(self) -> Row:
        return {"batch": self.case.work.batch, "length": self.case.work.length}

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        tokens = self.case.work.tokens
        return {name: {"tokens_s": tokens / found.quantiles(0.5)[0] * 1e3} for name, found in measured.items()}


CASES = tuple(ModelCase(model, work) for model in MODELS for work in WORK if work.kind in model.kinds)
MODELS_SUITE = Suite(
    name="models",
    description="Time whole models of transformers, patched and not.",
    cases=CASES,
    trial=ModelTrial,
    table=lambda case: {n: p for n, p in PROVIDERS.items() if case.work.kind in p.kinds and n not in case.model.out},
    passes=("step",),
    modes=("eager",),
    rounds=3,
    round_ms=300.0,
)
