"""What all checks share: how one is written down, what is found of it, and how a result is held against float64."""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn import testing
from fused_rope_attn.runtime.device import arch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY_ELEMENTS = 1 << 28  # copies of more would not fit the GPU


@dataclass(frozen=True)
class Machine:
    """Where checks run: a device, its architecture as planning names it, and what is drawn there.

    dtypes: names in ``DTYPES``; backends: of "reference", "triton" and "hopper".
    """

    device: str
    arch: str
    dtypes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()

    @classmethod
    def of(cls, device: str, dtypes: Iterable[str] = (), backends: Iterable[str] = ()) -> Machine:
        return cls(device, arch(torch.device(device)), tuple(dtypes), tuple(backends))

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Finding:
    """One comparison of one backend's results. Statements, which hold or not, are no tensors and have no figures."""

    backend: str
    found: testing.Comparison
    is_tensor: bool = True

    @classmethod
    def that(cls, backend: str, subject: str, holds: bool, detail: str) -> Finding:
        """A statement; ``detail`` says what came instead if it does not hold."""
        found = testing.Comparison(subject, 0.0, 0.0, 0.0, 0.0, bool(holds), "" if holds else detail)
        return cls(backend, found, is_tensor=False)

    @classmethod
    def raised(cls, backend: str, error: BaseException) -> Finding:
        """An exception that should not have come, under its type's name."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
        text = (str(error).splitlines() or [""])[0][:300]
        return cls.that(backend, type(error).__name__, False, f"{type(error).__name__}: {text}{where}")

    @property
    def share(self) -> float:
        """The error as a share of what the tolerance allows; above 1 is too much."""
        limit = 3.0 if self.found.tensor.startswith("d") else 2.0
        return max(self.found.ratio / limit, self.found.row_ratio / 2.5)


def literal(value: Any) -> str:
    """Write a check, or what its fields hold, as an expression of Python without the fields that have defaults."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str):
        return json.dumps(value)  # a shell needs no quotes for these quotes
    if not is_dataclass(value):
        return repr(value)
    words = []
    for field in fields(value):
        held = getattr(value, field.name)
        if field.default is MISSING:
            words.append(literal(held))
        elif held != field.default:
            words.append(f"{field.name}={literal(held)}")
    return f"{type(value).__name__}({', '.join(words)})"


def parse(text: str, kinds: Iterable[type]) -> Any:
    """Read what ``literal`` wrote: calls of these classes and names of dtypes, and nothing else."""
    dtypes = {name: getattr(torch, name) for name in (*DTYPES, "float64")}
    return eval(text, {"__builtins__": {}, **dtypes, **{kind.__name__: kind for kind in kinds}})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label_of(*variant: str) -> str:
    """Name a backend and a strategy; "auto" alone stands for both."""
    return " ".join(word for word in variant if word != "auto") or "auto"


def guarded(backend: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings of one backend; one that raises has failed, and the next backend can run."""
    try:
        yield from findings
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        yield Finding.raised(backend, error)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal to the bit, NaN included."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    integer = _INTEGERS[x.element_size()]
    return torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))


def copies(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy all tensors among arguments, those in tuples included, by name; not those that are huge."""
    found = {}
    for name, value in arguments.items():
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if isinstance(x, Tensor) and x.device.type != "meta" and x.numel() < _MANY_ELEMENTS:
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else name] = x.detach().clone()
    return found


def untouched(
    backend: str, arguments: Mapping[str, Any], before: Mapping[str, Tensor], but: Iterable[str] = ()
) -> Finding:
    """State that no tensor has changed since ``before``, its ``copies``, apart from those of ``but``."""
    after = copies(arguments)
    touched = [name for name, x in before.items() if name not in but and not same_bits(x, after[name])]
    return Finding.that(backend, "inputs", not touched, f"{', '.join(touched)} changed")


def form(backend: str, name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Finding:
    """State that a result has this shape and dtype, and is detached."""
    is_right = (x.shape, x.dtype, x.requires_grad) == (shape, dtype, False)
    detail = f"{tuple(x.shape)}, {x.dtype}, requires_grad {x.requires_grad}"
    return Finding.that(backend, f"form of {name}", is_right, detail)


class References:
    """float64 and eager results by name, and the second opinion: further draws of eager's rounding, made when a rule
    refuses a result (``testing.compare``).

    run: computes the results in a dtype, or for None in that of the inputs.
    """

    def __init__(self, run: Callable[[torch.dtype | None], Mapping[str, Tensor]], device: str):
        self._run, self._device = run, device
        self.exact, self.eager = run(torch.float64), run(None)

    @functools.cached_property
    def _drawn(self) -> list[Mapping[str, Tensor]]:
        with testing.RandomRounding(torch.Generator(self._device).manual_seed(0)):
            return [self._run(None) for _ in range(testing.DRAWS)]

    def compare(
        self, name: str, x: Tensor, dtype: torch.dtype, zero: float = 1.0, hidden: Tensor | None = None
    ) -> testing.Comparison:
        """Hold a result against float64; ``hidden`` elements are left out."""

        def shown(y: Tensor) -> Tensor:
            return y if hidden is None else y.masked_fill(hidden, 0)

        return testing.compare(
            name, shown(x), shown(self.exact[name]), shown(self.eager[name]), grad=name.startswith("d"), dtype=dtype,
            draws=lambda: (shown(results[name]) for results in self._drawn), zero=zero,
        )  # fmt: skip


def refusal(
    backend: str,
    subject: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    errors: tuple[type[BaseException], ...],
    words: tuple[str, ...],
) -> Finding:
    """State that ``function(**arguments)`` raises one of exactly these errors, and that the message names the fault: it
    begins with one of ``words``, or has it in quotes."""
    expected = " or ".join(error.__name__ for error in errors)
    try:
        function(**arguments)
    except Exception as error:
        message = str(error)
        told = any(re.match(rf"{re.escape(word)}(\W|$)", message) or f"'{word}'" in message for word in words)
        detail = f"{expected} that names {' or '.join(words)} was expected, but {type(error).__name__} came: {message}"
        return Finding.that(backend, subject, type(error) in errors and told, detail[:600])
    return Finding.that(backend, subject, False, f"{expected} was expected, but the call went through")
