"""What a baseline is: a rotation (or none) followed by an attention, behind one signature.

Shapes: q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, all views of ``(B, N, H, D)`` tensors, as a model's projections
give them; o comes back as ``(B, HQ, N, D)``. softmax_scale is ``D ** -0.5``. Tables arrive as ``(N, D/2)`` float32 and
are brought into the form that a rotation wants by ``prepare``, before any clock runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)


@functools.cache
def import_error(module: str, attribute: str) -> str | None:
    """Why ``from module import attribute`` fails here, or None. Any failure counts: a broken build is not a rival."""
    try:
        getattr(importlib.import_module(module), attribute)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def missing_package(pip: str, module: str, attribute: str) -> str | None:
    """None where the import works, else the sentence that a report prints: what to install, and what went wrong."""
    error = import_error(module, attribute)
    return None if error is None else f"pip install {pip} ({error})"


@dataclass(frozen=True)
class Rotation:
    """``rotate(q, k, tables) -> q_rot, k_rot``, differentiable.

    ``in_place`` says that q and k themselves hold the result afterwards. ``half_tables`` says that the tables are
    rounded to q's dtype, which is what the rotation is given in a real model; every other rotation gets float32.
    """

    label: str
    pip: tuple[str, ...]
    missing: Callable[[], str | None]
    rotate: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    in_place: bool = False
    half_tables: bool = False

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(N, D/2) float32 -> (1, N, D): every angle twice, the width that Hugging Face's models hold."""
        table_dtype = dtype if self.half_tables else torch.float32
        return tuple(torch.cat((x, x), dim=-1).to(table_dtype).unsqueeze(0).contiguous() for x in (cos, sin))


@dataclass(frozen=True)
class Attention:
    """``attend(q, k, v, causal) -> o``, differentiable where ``backward`` says so. ``label`` is a function where it
    depends on the machine."""

    label: str | Callable[[], str]
    pip: tuple[str, ...]
    missing: Callable[[], str | None]
    attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    max_head_dim: int = 256
    head_dim_multiple: int = 8
    backward: bool = True


@dataclass(frozen=True)
class Baseline:
    """One rival. ``name`` is its key in the registry, the command line and the result rows."""

    name: str
    rotation: Rotation | None
    attention: Attention

    @property
    def label(self) -> str:
        """What a table prints."""
        attention = self.attention.label if isinstance(self.attention.label, str) else self.attention.label()
        return f"bare {attention}" if self.rotation is None else f"{self.rotation.label} + {attention}"

    @property
    def rotates(self) -> bool:
        return self.rotation is not None

    @property
    def backward(self) -> bool:
        """False where there is a forward pass only: ``run`` then wants no gradients."""
        return self.attention.backward

    @property
    def in_place(self) -> bool:
        """True when ``run`` overwrites q and k with their rotation."""
        return self.rotation is not None and self.rotation.in_place

    @property
    def half_tables(self) -> bool:
        """True when the tables are rounded to q's dtype by ``prepare``."""
        return self.rotation is not None and self.rotation.half_tables

    @property
    def pip(self) -> tuple[str, ...]:
        """Packages, by their pip names, that the rival is made of (beyond torch and triton)."""
        names = (*(self.rotation.pip if self.rotation else ()), *self.attention.pip)
        return tuple(dict.fromkeys(names))

    def missing(self) -> str | None:
        """None where the rival can run, else every package that it lacks, by pip name, with the import error."""
        parts = [self.attention] if self.rotation is None else [self.rotation, self.attention]
        reasons = [reason for reason in (part.missing() for part in parts) if reason]
        return "; ".join(reasons) or None

    def unsupported(self, case: Any) -> str | None:
        """None where the rival serves a ``testing.Case``, else why not."""
        attention = self.attention
        if case.dtype not in attention.dtypes:
            return f"takes {' and '.join(_name(dtype) for dtype in attention.dtypes)}, not {_name(case.dtype)}"
        if case.head_dim > attention.max_head_dim or case.head_dim % attention.head_dim_multiple:
            limit, multiple = attention.max_head_dim, attention.head_dim_multiple
            return f"takes head dims up to {limit} that are multiples of {multiple}, not {case.head_dim}"
        if case.len_q != case.len_k:
            return "rotates queries and keys with the same rows of the tables: needs as many queries as keys"
        if case.interleaved or case.rotary_dim not in (None, case.head_dim) or case.table_batch or case.extra_rows:
            return "rotates whole heads in the half layout with one table row for each position"
        return None

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        """Bring (N, D/2) float32 tables into the rival's own form; not part of what is timed."""
        return None if self.rotation is None else self.rotation.prepare(cos, sin, dtype)

    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool) -> Tensor:
        """Rotate q and k and attend. ``tables`` comes from ``prepare``."""
        if self.rotation is not None:
            q, k = self.rotation.rotate(q, k, tables)
        return self.attention.attend(q, k, v, causal)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
