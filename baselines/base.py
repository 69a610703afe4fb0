"""Baselines: a rotation (or none) followed by an attention, with one signature.

Shapes: q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, all views of ``(B, N, H, D)`` tensors, as a model's projections
give them; o is ``(B, HQ, N, D)``. softmax_scale is ``D ** -0.5``. Tables arrive as ``(N, D/2)`` float32, and
``prepare`` brings them into the form of a rotation before any clock runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16``, without the module."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def load(module: str, attribute: str) -> Any:
    """Return an attribute of a module, which is imported at the first call."""
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def import_error(module: str, attribute: str) -> str | None:
    """Return why ``from module import attribute`` fails here, or None. A broken build counts as a failure."""
    try:
        load(module, attribute)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


class Package(NamedTuple):
    """A function or class of a package that is installed as ``pip``."""

    pip: str
    module: str
    attribute: str

    def load(self) -> Any:
        """Return the function or class."""
        return load(self.module, self.attribute)

    def missing(self) -> str | None:
        """Return None where the import works, else the package to install and the error."""
        error = import_error(self.module, self.attribute)
        return None if error is None else f"pip install {self.pip} ({error})"


def nothing_missing() -> None:
    """Return None: a rival that needs no package beyond PyTorch is never missing."""


@dataclass(frozen=True)
class Rotation:
    """``rotate(q, k, tables) -> q_rot, k_rot``, differentiable.

    in_place: the result overwrites q and k. half_tables: tables are rounded to q's dtype, as in a real model; every
    other rotation gets float32.
    """

    label: str
    rotate: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    in_place: bool = False
    half_tables: bool = False
    missing: Callable[[], str | None] = nothing_missing

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (1, N, D) tables from (N, D/2) float32: every angle twice, as in Hugging Face's models."""
        table_dtype = dtype if self.half_tables else torch.float32
        return tuple(torch.cat((x, x), dim=-1).to(table_dtype).unsqueeze(0).contiguous() for x in (cos, sin))


@dataclass(frozen=True)
class Attention:
    """``attend(q, k, v, causal) -> o``, differentiable if ``backward``. ``label`` may be a function of the machine."""

    label: str | Callable[[], str]
    attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    max_head_dim: int = 256
    head_dim_multiple: int = 8
    backward: bool = True
    missing: Callable[[], str | None] = nothing_missing


class Norms(NamedTuple):
    """The norms of the heads of q and of k."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float
    offset: float


NormsAndRotation = Callable[[Tensor, Tensor, Norms, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Baseline:
    """One rival. ``name`` is its key in the registry, the command line and the result rows.

    norm_and_rotate: ``(q, k, norms, tables) -> q_rot, k_rot`` of a rival with norms. norm: its label. norm_missing: the
    package that it lacks on this machine, or None.
    """

    name: str
    rotation: Rotation | None
    attention: Attention
    norm: str = ""
    norm_and_rotate: NormsAndRotation | None = None
    norm_missing: Callable[[], str | None] = nothing_missing

    @property
    def label(self) -> str:
        """Return the label in tables."""
        attention = self.attention.label if isinstance(self.attention.label, str) else self.attention.label()
        if self.rotation is None:
            return f"bare {attention}"
        return " + ".join(filter(None, (self.norm, self.rotation.label, attention)))

    @property
    def rotates(self) -> bool:
        return self.rotation is not None

    @property
    def backward(self) -> bool:
        """Return whether ``run`` has gradients."""
        return self.attention.backward

    @property
    def in_place(self) -> bool:
        """Return whether ``run`` overwrites q and k with their rotation; with norms it overwrites the normed ones."""
        return self.rotation is not None and self.rotation.in_place and self.norm_and_rotate is None

    @property
    def half_tables(self) -> bool:
        """Return whether ``prepare`` rounds the tables to q's dtype."""
        return self.rotation is not None and self.rotation.half_tables

    def missing(self) -> str | None:
        """Return every package that the rival lacks, by pip name, with the import error; None if it can run."""
        parts = [self.attention] if self.rotation is None else [self.rotation, self.attention]
        reasons = [self.norm_missing(), *(part.missing() for part in parts)]
        return "; ".join(dict.fromkeys(filter(None, reasons))) or None

    def unsupported(self, case: Any) -> str | None:
        """Return why the rival does not serve a ``testing.Case``, or None."""
        attention = self.attention
        if case.dtype not in attention.dtypes:
            return (
                f"takes {' and '.join(dtype_name(dtype) for dtype in attention.dtypes)}, not {dtype_name(case.dtype)}"
            )
        if case.head_dim > attention.max_head_dim or case.head_dim % attention.head_dim_multiple:
            limit, multiple = attention.max_head_dim, attention.head_dim_multiple
            return f"takes head dims up to {limit} that are multiples of {multiple}, not {case.head_dim}"
        if case.len_q != case.len_k:
            return "rotates queries and keys with the same rows of the tables: needs as many queries as keys"
        if case.interleaved or case.rotary_dim not in (None, case.head_dim) or case.table_batch or case.extra_rows:
            return "rotates whole heads in the half layout with one table row for each position"
        return None

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        """Bring (N, D/2) float32 tables into the rival's form; this is not timed."""
        return None if self.rotation is None else self.rotation.prepare(cos, sin, dtype)

    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool, norms: Norms | None = None) -> Tensor:
        """Norm and rotate q and k, and attend. ``prepare`` makes ``tables``."""
        if self.norm_and_rotate is not None:
            assert norms is not None
            q, k = self.norm_and_rotate(q, k, norms, tables)
        elif self.rotation is not None:
            q, k = self.rotation.rotate(q, k, tables)
        return self.attention.attend(q, k, v, causal)
