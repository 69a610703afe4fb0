"""A call of a public function as data: how it is written down, run, and held against float64."""

from __future__ import annotations

import functools
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

import fused_rope_attn
from fused_rope_attn.attention import planning
from fused_rope_attn.experimental.corope import corope_attention
from fused_rope_attn.runtime.device import arch
from verification import testing
from verification.memory import lay, lay_table
from verification.testing import Finding
from verification.testing.cases import described

FUNCTIONS = {
    name: getattr(fused_rope_attn, name)
    for name in ("rope_attention", "rope_attention_varlen", "rope_attention_mla", "rope_attention_mla_varlen",
                 "rope_attention_with_kvcache", "write_kvcache",
                 "apply_rope", "apply_rope_qk")
} | {"corope_attention": corope_attention}  # fmt: skip
PARAMETERS = {name: tuple(inspect.signature(function).parameters) for name, function in FUNCTIONS.items()}
# Arguments that are fields of a call under the same name.
_OPTIONS = (
    "causal", "softmax_scale", "interleaved", "window", "softcap", "norm_eps", "return_lse", "deterministic", "inverse",
    "base", "return_max_logit", "token_tables",
)  # fmt: skip

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY_ELEMENTS = 1 << 28  # copies of more would not fit the GPU


@dataclass(frozen=True)
class Machine:
    """A device, its architecture as planning names it, and the choices of the drawing there.

    dtypes: names in ``DTYPES``; backends: of "reference", "triton" and "hopper"; families: of ``strategies.FAMILIES``,
    all without any.
    """

    device: str
    arch: str
    dtypes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    @classmethod
    def of(cls, device: str, *choices: Iterable[str]) -> Machine:
        return cls(device, arch(torch.device(device)), *map(tuple, choices))

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")


def raised(error: BaseException) -> Finding:
    """Record an unexpected exception under its type's name."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    text = (str(error).splitlines() or [""])[0][:300]
    return Finding(type(error).__name__, False, f"{type(error).__name__}: {text}{where}")


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


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal to the bit, NaN included."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def bits(x: Tensor) -> Tensor:
    """Return the elements of a tensor as integers."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def copies(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy all tensors among arguments, those in tuples included, by name; not those that are huge."""
    found = {}
    for name, value in arguments.items():
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if isinstance(x, Tensor) and x.device.type != "meta" and x.numel() < _MANY_ELEMENTS:
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else name] = x.detach().clone()
    return found


def untouched(arguments: Mapping[str, Any], before: Mapping[str, Tensor], but: Iterable[str] = ()) -> Finding:
    """State that no tensor has changed since ``before``, its ``copies``, apart from those of ``but``."""
    after = copies(arguments)
    touched = [name for name, x in before.items() if name not in but and not same_bits(x, after[name])]
    return Finding("inputs", not touched, f"{', '.join(touched)} changed")


@dataclass
class References:
    """float64 and eager results by name, and the second opinion: further draws of eager's rounding, made when a rule
    refuses a result (``testing.compare``).

    run: computes the results in a dtype, or for None in that of the inputs. judged: the dtype of a result, to which it
    is rounded. zero: ``testing.noise_of_zero`` of a result. may_be_nan: results must be NaN exactly at the elements at
    which float64 is. part: takes from a whole result what ``run`` computes of it.
    """

    run: Callable[[torch.dtype | None], Mapping[str, Tensor]]
    device: str
    judged: Callable[[str], torch.dtype]
    zero: Callable[[str], float] = lambda name: 1.0
    may_be_nan: bool = False
    part: Callable[[str, Tensor], Tensor] = lambda name, x: x

    def __post_init__(self) -> None:
        self.exact, self.eager = self.run(torch.float64), self.run(None)

    @functools.cached_property
    def _drawn(self) -> list[Mapping[str, Tensor]]:
        with testing.RandomRounding(torch.Generator(self.device).manual_seed(0)):
            return [self.run(None) for _ in range(testing.DRAWS)]

    def compare(self, name: str, x: Tensor) -> Finding:
        """Hold a result, or a part of one, against float64."""
        nan = self.exact[name].isnan() if self.may_be_nan else None

        def numbers(y: Tensor) -> Tensor:
            return y if nan is None else y.masked_fill(nan, 0)

        tensors = (numbers(y) for y in (x, self.exact[name], self.eager[name]))
        options = {"grad": name.startswith("d"), "dtype": self.judged(name), "zero": self.zero(name)}
        return testing.compare(name, *tensors, **options, draws=lambda: (numbers(y[name]) for y in self._drawn))

    def findings(self, name: str, x: Tensor) -> Iterator[Finding]:
        """Hold a whole result against float64. What is not compared must at least be written, and be numbers."""
        part = self.part(name, x)
        is_row = name in ("lse", "max_logit")
        dtype = torch.float32 if is_row else self.judged(name)
        is_right = (part.shape, x.dtype) == (self.exact[name].shape, dtype)
        yield Finding(f"form of {name}", is_right, f"{tuple(x.shape)}, {x.dtype}")
        if part.numel() < x.numel() and not is_row:
            yield Finding(f"rest of {name}", bool(torch.isfinite(x).all()), "not finite everywhere")
        if self.may_be_nan:
            is_same = torch.equal(part.isnan(), self.exact[name].isnan())
            yield Finding(f"NaN of {name}", is_same, "NaN in other places")
        yield self.compare(name, part)


def refusal(
    subject: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    expected: type[BaseException],
    words: tuple[str, ...],
) -> Finding:
    """State that ``function(**arguments)`` raises exactly the expected error, and that the message names the fault: it
    begins with one of ``words``, or has it in quotes."""
    wanted = f"{expected.__name__} was expected"
    try:
        function(**arguments)
    except Exception as error:
        message = str(error)
        told = any(re.match(rf"{re.escape(word)}(\W|$)", message) or f"'{word}'" in message for word in words)
        detail = f"{wanted}, that names {' or '.join(words)}, but {type(error).__name__} came: {message}"
        return Finding(subject, type(error) is expected and told, detail[:600])
    return Finding(subject, False, f"{wanted}, but the call went through")


class Ran(NamedTuple):
    """A call that has run. before: copies of ``given``; made, out: of ``Call.make`` and ``Call.results``."""

    function: Callable[..., Any]
    given: dict[str, Any]
    before: dict[str, Tensor]
    made: Made
    out: dict[str, Tensor]
    references: References


class Made(NamedTuple):
    """given: the arguments of a call that are tensors, by name, with axes (B, H, N, D). upstream: the gradients of
    outputs."""

    given: dict[str, Any]
    upstream: dict[str, Tensor]


@dataclass(frozen=True)
class Call(testing.Case):
    """A call of one public function, as data; a subclass says how its tensors are made, and what is right.

    size: "small" (in the interpreter, too), "large", or "huge" (alone on a GPU). memory: a layout of ``memory.lay``
    for each tensor that ``make`` lays; None: what ``layout`` says. wanted: the arguments that require a gradient, where
    the call has them. variants: (backend, strategy) pairs that run it.
    """

    title: str = ""  # of a case in the table; "" names it after its fields
    size: str = "small"
    form: str = "bhsd"  # the layout of the call; packed sequences have "thd" whatever it says
    memory: tuple[str, ...] | None = None
    table_memory: str = "plain"
    leading_one: bool = False  # tables (1, S, W)
    infers_rotary_dim: bool = False  # the call leaves R to the width of the tables, unless this is ambiguous
    return_lse: bool = True
    wanted: tuple[str, ...] = ()
    variants: tuple[tuple[str, str], ...] = (("auto", "auto"),)
    function: ClassVar[str]  # the public one, of ``FUNCTIONS``
    backend: ClassVar[str] = ""  # of its rows in the table; "" for those of its variants
    writes: ClassVar[tuple[str, ...]] = ()  # the arguments that the function writes
    outputs: ClassVar[tuple[str, ...]] = ("o", "lse")

    @classmethod
    def of(cls, case: testing.Case, **changes: Any) -> Any:
        """Return the call of a case, or another call with the same fields, with these changes."""
        names = {field.name for field in fields(cls)} & {field.name for field in fields(case)}
        return cls(**({name: getattr(case, name) for name in names} | changes))

    @property
    def name(self) -> str:
        return self.title or described(self)

    @property
    def order(self) -> str:
        """Name the layout of q in the call."""
        return self.form if self.seqlens is None else "thd"

    def make(self, device: str) -> Made:
        """Return the data of the call."""
        raise NotImplementedError

    def reference(self, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the right results in a dtype; ``made`` stays as it is."""
        raise NotImplementedError

    def references(self, made: Made, device: str) -> References:
        return References(lambda dtype: self.reference(made, dtype or self.dtype), device, self.judged(made.given))

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Check the other promises of this function."""
        yield from ()

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        """Return what an explicit backend or strategy must raise, or None."""
        backend, strategy = variant
        if backend == "reference" or variant == ("auto", "auto"):
            return None
        problem = planning.Problem(self.dtype, self.head_dim, strategy=strategy, **self.planned())
        return planning.obstacle("hopper" if backend == "hopper" else "triton", problem, arch)

    def planned(self) -> dict[str, Any]:
        """Return what a plan depends on in addition to the dtype and the head dim."""
        return {}

    def entry(self, variant: tuple[str, str]) -> Callable[..., Any]:
        """Return the function that runs a variant: the public one, where it can choose or need not."""
        return getattr(fused_rope_attn, self.function)

    # The rest serves every function.

    def judged(self, given: Mapping[str, Any]) -> Callable[[str], torch.dtype]:
        """Return the dtypes of results by name: those of gradients are those of their arguments."""
        return lambda name: given[name[1:]].dtype if given.get(name[1:]) is not None else self.dtype

    def norms_of(self, device: str) -> dict[str, Tensor | None]:
        """Return the weights of the norms by name."""
        given = testing.norms_of(self, device)
        return {name: given.get(name) for name in ("q_norm", "k_norm")}

    def laid(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put tensors in memory as ``memory`` says, one after the other."""
        if self.memory is None:
            return tensors
        return {name: lay(x, layout) for (name, x), layout in zip(tensors.items(), self.memory)}

    def tables_of(self, inputs: testing.Inputs | testing.LatentInputs) -> dict[str, Any]:
        """Return cos and sin as the call passes them."""
        if inputs.cos is None:
            return {"cos": None, "sin": None}
        tables = {name: lay_table(getattr(inputs, name), self.table_memory) for name in ("cos", "sin")}
        return {name: x[None] if self.leading_one and x.ndim == 2 else x for name, x in tables.items()}

    def options(self, parameters: Iterable[str], **others: Any) -> dict[str, Any]:
        """Return those of the ``parameters`` that are no tensors, by name; ``others`` as they are."""
        is_ambiguous = self.full_width and 2 * self.rotary <= self.head_dim
        found = {name: getattr(self, name) for name in _OPTIONS if hasattr(self, name)}
        found["rotary_dim"] = None if self.infers_rotary_dim and not is_ambiguous else self.rotary_dim
        found |= {"norm_offset": self.norms or 0.0, "layout": self.order} | others
        return {name: value for name, value in found.items() if name in parameters}

    @property
    def _axes(self) -> tuple[str, str]:
        """The axes of (B, H, N, D), and those of the call; packed tokens have no batch."""
        return "1 h t d" if self.order == "thd" else "b h s d", " ".join(self.order)

    def as_passed(self, name: str, x: Any) -> Any:
        """Return a tensor (B, H, N, D), or the gradient of lse, as the function has it, and anything else as it is."""
        if name == "lse" and self.order == "thd":
            return x[0]
        if not isinstance(x, Tensor) or x.ndim != 4:
            return x
        return rearrange(x, " -> ".join(self._axes))

    def back(self, x: Tensor) -> Tensor:
        """Undo ``as_passed``; a vector becomes one row, and packed lse and max_logit, of two axes, get a batch."""
        if x.ndim == len(self.order):
            return rearrange(x, " -> ".join(reversed(self._axes)))
        return x[None] if x.ndim == 1 or self.order == "thd" else x

    def call(self, made: Made, variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return a function that runs a variant, and its arguments by name, as a user passes them."""
        given = {name: self.as_passed(name, x) for name, x in made.given.items()}
        options = self.options(PARAMETERS[self.function], backend=variant[0], strategy=variant[1])
        return self.entry(variant), given | options

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the public function, and its arguments by name."""
        public = getattr(fused_rope_attn, self.function, FUNCTIONS[self.function])
        return public, self.call(self.make(device), ("auto", "auto"))[1]

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Made) -> dict[str, Tensor]:
        """Call the function; return outputs and gradients (B, H, N, D), by the names of the references."""
        leaves = {name: given[name].detach() for name in self.wanted if given.get(name) is not None}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        returned = function(**(given | leaves))
        found = dict(zip(self.outputs, returned if isinstance(returned, tuple) else (returned,)))
        of = [name for name in made.upstream if found[name].requires_grad]
        if of and not leaves:
            raise AssertionError(f"{', '.join(of)} require a gradient, but no input does")
        upstream = [self.as_passed(name, made.upstream[name]).to(found[name].dtype) for name in of]
        gradients = torch.autograd.grad([found[name] for name in of], list(leaves.values()), upstream) if of else ()
        found |= {f"d{name}": x for name, x in zip(leaves, gradients)}
        return {name: self.back(x.detach()) for name, x in found.items() if x is not None}

    def run(self, machine: Machine) -> Iterator[Finding]:
        """Run every variant, and hold each of its results against float64. One that raises has failed."""
        made = self.make(machine.device)
        references = self.references(made, machine.device)
        for variant in self.variants:
            label = " ".join(word for word in variant if word != "auto") or "auto"
            try:
                for finding in self.findings(machine, variant, made, references):
                    yield replace(finding, backend=label)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                yield replace(raised(error), backend=label)

    def findings(
        self, machine: Machine, variant: tuple[str, str], made: Made, references: References
    ) -> Iterator[Finding]:
        function, given = self.call(made, variant)
        before, obstacle = copies(given), self.obstacle(machine.arch, variant)
        if obstacle is not None:
            yield refusal("refusal", function, given, obstacle[0], (obstacle[1].split(",")[0],))
            yield untouched(given, before)
            return
        with testing.poison_empty():
            out = self.results(function, given, made)
        for name, x in out.items():
            yield from references.findings(name, x)
        yield from self.further(Ran(function, given, before, made, out, references))
        yield untouched(given, before, but=self.writes)
