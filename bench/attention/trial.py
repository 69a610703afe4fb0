"""A problem of attention at which providers are compared, without what the suites do with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.attention.cases import BenchCase
from bench.attention.providers import Provider, is_ours
from bench.attention.subject import Subject, check, no_backward
from bench.gate import Gate
from bench.suite import Entry, Row, Trial, case_fields
from fused_rope_attn import testing


class ProblemTrial(Trial):
    """One case with its inputs and its gate. ``grads``: whether gradients are judged; ``strict``: whether rivals are
    held to the tolerance as ours are."""

    def __init__(
        self, providers: Sequence[Provider], case: BenchCase, clock: Any, *, grads: bool, strict: bool = False
    ) -> None:
        super().__init__(providers)
        self.case, self._clock, self._grads, self._strict = case, clock, grads, strict
        self._inputs = testing.make_inputs(case.case, clock.device)
        self._gate = Gate(case.case, self._inputs)

    def unsupported(self, provider: Provider) -> str | None:
        return provider.unsupported(self.case.case)

    def unsupported_pass(self, provider: Provider, part: str) -> str | None:
        return no_backward(provider, part)

    def enter(self, provider: Provider) -> Entry:
        verdict = check(provider, self._gate, self._clock.synchronize, grads=self._grads, strict=self._strict)
        return Entry(provider, verdict, self.subject(provider).make, facts=verdict.fields())

    def subject(self, provider: Provider) -> Subject:
        """The provider with these inputs."""
        return Subject(provider, self._inputs, self.case.case.causal)

    def gated(self) -> None:
        self._gate.release()

    def fields(self, provider: Provider) -> Row:
        c = self.case.case
        return {
            "case": self.case.name,
            "family": self.case.family,
            "groups": self.case.groups,
            "shape": self.case.shape,
            **case_fields(c),
            "causal": c.causal,
            "provider": provider.name,
            "label": provider.label,
            "ours": is_ours(provider.name),
            "rotates": provider.rotates,
        }

    def plan(self, provider: Any) -> Row:
        """What ours runs here, in words; nothing for rivals."""
        if not is_ours(provider.name):
            return {}
        x = self._inputs
        try:
            return {"plan": provider.plan(x.q, x.k, x.v, (x.cos, x.sin), self.case.case.causal)}
        except Exception as error:  # an explanation is no reason to lose a measurement
            return {"plan": f"{type(error).__name__}: {error}"}
