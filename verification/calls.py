"""The base of all checks: running one, writing it down, and comparing its results with float64."""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn import testing
from fused_rope_attn.runtime.device import arch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY_ELEMENTS = 1 << 28  # copies of more would not fit the GPU


@dataclass(frozen=True)
class Machine:
    """A device, its architecture as planning names it, and the choices of the drawing there.

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
        """Record an unexpected exception under its type's name."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
        text = (str(error).splitlines() or [""])[0][:300]
        return cls.that(backend, type(error).__name__, False, f"{type(error).__name__}: {text}{where}")

    @property
    def share(self) -> float:
        """The error divided by the tolerance; above 1 is too much."""
        limit = 3.0 if self.found.tensor.startswith("d") else 2.0
        return max(self.found.ratio / limit, self.found.row_ratio / 2.5)


def literal(value: Any) -> str:
    """Write a check as an expression of Python, without the fields that have their defaults."""
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
    """Read the output of ``literal``: calls of these classes and names of dtypes, and nothing else."""
    dtypes = {name: getattr(torch, name) for name in (*DTYPES, "float64")}
    return eval(text, {"__builtins__": {}, **dtypes, **{kind.__name__: kind for kind in kinds}})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label_of(*variant: str) -> str:
    """Name a backend and a strategy; "auto" alone means both."""
    return " ".join(word for word in variant if word != "auto") or "auto"


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


class References:
    """float64 and eager results by name, and the second opinion: further draws of eager's rounding, made when a rule
    refuses a result (``testing.compare``).

    run: computes the results in a dtype, or for None in that of the inputs. judged: the dtype to which a result is
    rounded. zero: ``testing.noise_of_zero`` of a result. may_be_nan: results must be NaN exactly at the elements at
    which float64 is.
    """

    def __init__(
        self,
        run: Callable[[torch.dtype | None], Mapping[str, Tensor]],
        device: str,
        judged: Callable[[str], torch.dtype],
        zero: Callable[[str], float] = lambda name: 1.0,
        may_be_nan: bool = False,
    ):
        self._run, self._device, self._judged, self._zero, self._may_be_nan = run, device, judged, zero, may_be_nan
        self.exact, self.eager = run(torch.float64), run(None)

    @functools.cached_property
    def _drawn(self) -> list[Mapping[str, Tensor]]:
        with testing.RandomRounding(torch.Generator(self._device).manual_seed(0)):
            return [self._run(None) for _ in range(testing.DRAWS)]

    def shape(self, name: str) -> torch.Size:
        return self.eager[name].shape

    def compare(self, name: str, x: Tensor) -> testing.Comparison:
        """Hold a result against float64."""
        nan = self.exact[name].isnan() if self._may_be_nan else None

        def numbers(y: Tensor) -> Tensor:
            return y if nan is None else y.masked_fill(nan, 0)

        tensors = (numbers(y) for y in (x, self.exact[name], self.eager[name]))
        options = {"grad": name.startswith("d"), "dtype": self._judged(name), "zero": self._zero(name)}
        return testing.compare(name, *tensors, **options, draws=lambda: (numbers(y[name]) for y in self._drawn))

    def findings(self, label: str, name: str, x: Tensor) -> Iterator[Finding]:
        if self._may_be_nan:
            is_same = torch.equal(x.isnan(), self.exact[name].isnan())
            yield Finding.that(label, f"NaN of {name}", is_same, "NaN in other places")
        yield Finding(label, self.compare(name, x))


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


class Ran(NamedTuple):
    """A call that has run. before: copies of ``given``; made, out: of ``Check.make`` and ``Check.results``."""

    label: str
    function: Callable[..., Any]
    given: dict[str, Any]
    before: dict[str, Tensor]
    made: Any
    out: dict[str, Tensor]
    references: Any


class Check:
    """A call of one public function, as data. Subclasses are frozen dataclasses with these fields:

    name; dtype; size: "small" (in the interpreter, too), "large", or "huge" (alone on a GPU); variants: (backend,
    strategy) pairs that run it.
    """

    backend: ClassVar[str] = ""  # of its rows in the table; "" for those of its variants
    writes: ClassVar[tuple[str, ...]] = ()  # the arguments that the function writes
    variants: tuple[tuple[str, str], ...]

    def make(self, device: str) -> Any:
        """Return the data of the call, for the methods below."""
        raise NotImplementedError

    def call(self, made: Any, variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return a function that runs a variant, and its arguments by name, with memory of their own if written."""
        raise NotImplementedError

    def references(self, made: Any, device: str) -> References:
        raise NotImplementedError

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Any) -> dict[str, Tensor]:
        """Call the function; return outputs and gradients, by the names of the references."""
        raise NotImplementedError

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Check the other promises of this function."""
        yield from ()

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the public function, and its arguments by name as a user passes them."""
        return self.call(self.make(device), ("auto", "auto"))

    def obstacle(self, arch: str, variant: tuple[str, str]) -> tuple[type[Exception], str] | None:
        """Return what an explicit backend or strategy must raise, or None."""
        return None

    def run(self, machine: Machine) -> Iterator[Finding]:
        """Run every variant, and hold each of its results against float64. One that raises has failed."""
        made = self.make(machine.device)
        references = self.references(made, machine.device)
        for variant in self.variants:
            label = label_of(*variant)
            function, given = self.call(made, variant)
            obstacle = self.obstacle(machine.arch, variant)
            if obstacle is not None:
                before, words = copies(given), (obstacle[1].split(",")[0],)
                yield refusal(label, "refusal", function, given, obstacle[:1], words)
                yield untouched(label, given, before)
                continue
            try:
                yield from self._held(label, function, given, made, references)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                yield Finding.raised(label, error)

    def _held(
        self, label: str, function: Callable[..., Any], given: dict[str, Any], made: Any, references: References
    ) -> Iterator[Finding]:
        before = copies(given)
        with testing.poison_empty():
            out = self.results(function, given, made)
        for name, x in out.items():
            of = given.get(name[1:]) if name.startswith("d") else None
            dtype = torch.float32 if name == "lse" else self.dtype if of is None else of.dtype
            is_right = (x.shape, x.dtype, x.requires_grad) == (references.shape(name), dtype, False)
            detail = f"{tuple(x.shape)}, {x.dtype}, requires_grad {x.requires_grad}"
            yield Finding.that(label, f"form of {name}", is_right, detail)
            yield from references.findings(label, name, x)
        yield from self.further(Ran(label, function, given, before, made, out, references))
        yield untouched(label, given, before, but=self.writes)
