"""What all families of random calls share: the machine, the results of a call, and drawing from weighted choices."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fused_rope_attn import testing

T = TypeVar("T")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Machine:
    """Where calls run: a device, its architecture as planning names it, and what is drawn there.

    dtypes: names in ``DTYPES``; backends: of "reference", "triton" and "hopper".
    """

    device: str
    arch: str
    dtypes: tuple[str, ...]
    backends: tuple[str, ...]

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``share`` is the error as a share of what the tolerance allows, above 1 too much;
    0 for what is right or wrong."""

    backend: str
    tensor: str
    share: float
    ok: bool
    detail: str = ""

    @classmethod
    def of(cls, backend: str, found: testing.Comparison) -> Finding:
        limit = 3.0 if found.tensor.startswith("d") else 2.0
        return cls(backend, found.tensor, max(found.ratio / limit, found.row_ratio / 2.5), found.ok, found.detail)

    @classmethod
    def that(cls, backend: str, subject: str, holds: bool, detail: str) -> Finding:
        """A statement that holds, or does not: then ``detail`` says what came instead."""
        return cls(backend, subject, 0.0, holds, "" if holds else detail)


class Call(Protocol):
    """A legal call of one public function."""

    @property
    def function(self) -> str:
        """The public function's name."""
        ...

    @property
    def text(self) -> str:
        """Sizes and what differs from the defaults, for a person who reads a failure."""
        ...

    def run(self, machine: Machine) -> Iterator[Finding]:
        """Run it on every drawn backend, and hold each result against float64."""
        ...

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The public function, and its arguments by name, as a user on this machine would pass them."""
        ...


class Family(Protocol):
    """Draws calls of one public function: an argument that is added to the function is added there."""

    def draw_setting(self, rng: random.Random, machine: Machine) -> Any:
        """What the compiled kernels depend on."""
        ...

    def draw_call(self, rng: random.Random, setting: Any, machine: Machine) -> Call:
        """A call within a setting."""
        ...


def pick(rng: random.Random, weights: Mapping[T, float]) -> T:
    """One of the keys, by weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    integer = INTEGER_OF_SIZE[x.element_size()]
    return torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))


def copies(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of all tensors among arguments, those in tuples included, by name."""
    found = {}
    for name, value in arguments.items():
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if isinstance(x, Tensor) and x.device.type != "meta":
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else name] = x.detach().clone()
    return found


def changed(arguments: Mapping[str, Any], before: Mapping[str, Tensor], but: Iterable[str] = ()) -> list[str]:
    """Names of the tensors that are no longer what they were, those of ``but`` left out."""
    after = copies(arguments)
    return [name for name, x in before.items() if name not in but and not same_bits(x, after[name])]


class Draws:
    """Further draws of eager's results, for ``testing.compare``, computed when they are first asked for.

    Args:
        run: gives eager's results by name.
        device: of its tensors.
    """

    def __init__(self, run: Callable[[], Mapping[str, Tensor]], device: str):
        self._run, self._device = run, device

    @functools.cached_property
    def _results(self) -> list[Mapping[str, Tensor]]:
        generator = torch.Generator(self._device).manual_seed(0)
        with testing.RandomRounding(generator):
            return [self._run() for _ in range(testing.DRAWS)]

    def of(self, name: str) -> Callable[[], Iterable[Tensor]]:
        return lambda: (results[name] for results in self._results)


def refusal(
    backend: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    errors: tuple[type[BaseException], ...],
    words: tuple[str, ...],
) -> Finding:
    """That ``function(**arguments)`` raises one of ``errors``, of exactly these types, and the message names the fault:
    it begins with one of ``words``, or has it in quotes."""
    expected = " or ".join(error.__name__ for error in errors)
    try:
        function(**arguments)
    except Exception as error:
        message = str(error)
        told = any(re.match(rf"{re.escape(word)}(\W|$)", message) or f"'{word}'" in message for word in words)
        detail = f"{expected} that names {' or '.join(words)} was expected, but {type(error).__name__} came: {message}"
        return Finding.that(backend, "refusal", type(error) in errors and told, detail)
    return Finding(backend, "refusal", 0.0, False, f"{expected} was expected, but the call went through")
