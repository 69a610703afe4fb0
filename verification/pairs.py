"""Pairs of calls with ``batch_invariant=True``: a row has the same bits of o and lse in both."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fused_rope_attn.attention import planning
from verification import testing
from verification.attention import AttentionCheck
from verification.calls import FUNCTIONS, PARAMETERS, Call, Machine, Made, References, bits, refusal
from verification.decode import CACHES, DecodeCheck, run_write
from verification.testing import Finding

STEP = "rope_attention_with_kvcache"
LONGEST = 1024  # the float64 reference of more keys takes longer than the calls


@dataclass(frozen=True)
class Way:
    """A way to the rows ``first`` to ``end - 1`` of a sequence, with its keys up to ``end - 1``.

    kind: "batch" (``rope_attention``), "pack" (``rope_attention_varlen``), "cache" or "pages" (a step). batch, place:
    the number of sequences in the call, and which of them this one is. before, after: in a batch rows of padding, in a
    cache rows that the step may not see, in a pack tokens of each earlier and each later sequence. appends: a step gets
    the keys of its rows as arguments; False: it finds them in the cache.
    """

    kind: str
    first: int
    end: int
    before: int = 0
    after: int = 0
    batch: int = 1
    place: int = 0
    appends: bool = True

    @property
    def count(self) -> int:
        return self.end - self.first


@contextlib.contextmanager
def products_in_float64() -> Iterator[None]:
    """Give a row of a product in Triton's interpreter the same bits whatever the other rows of its tile are, which BLAS
    does not do."""
    multiply = np.matmul

    def in_float64(a, b, dtype=None):
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)

    with mock.patch.object(np, "matmul", in_float64):
        yield


@dataclass(frozen=True)
class PairCheck(Call):
    """One sequence of ``len_k`` tokens, and two ways to some of its rows.

    peaks: some keys are far larger than the others, so that the maximum of a row moves late. rotated, page_size: of
    the caches.
    """

    ways: tuple[Way, ...] = ()
    peaks: bool = False
    rotated: bool = True
    page_size: int = 16
    function: ClassVar[str] = "batch_invariant"  # its name in reports: the calls are those of three functions

    def make(self, device: str) -> Made:
        inputs = testing.make_inputs(self, device)
        if self.peaks:
            inputs.k[:, :, ::7] *= 8
        return Made(inputs._asdict(), {})

    @property
    def common(self) -> tuple[int, int]:
        """The rows that both ways compute: the first, and the end."""
        return max(way.first for way in self.ways), min(way.end for way in self.ways)

    def references(self, made: Made, device: str) -> References | None:
        """Return what float64 and eager PyTorch give in the common rows, or None if the sequence is long."""
        inputs = testing.Inputs(**made.given)

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            results = testing.run_reference(inputs, self, dtype)
            return {name: results[name][:, :, slice(*self.common)] for name in self.outputs}

        zero = functools.partial(testing.noise_of_zero, case=self, inputs=inputs)
        return References(run, device, lambda name: self.dtype, zero) if self.len_k <= LONGEST else None

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        return (ValueError, "batch_invariant") if variant[0] == "reference" else super().obstacle(arch, variant)

    def planned(self) -> dict[str, Any]:
        return {"batch_invariant": True}

    def findings(
        self, machine: Machine, variant: tuple[str, str], made: Made, references: References | None
    ) -> Iterator[Finding]:
        """Compare the common rows of both ways, to the bit, and those of the first way with float64. A backend that
        cannot keep the promise must refuse."""
        obstacle, found = self.obstacle(machine.arch, variant), []
        with products_in_float64(), testing.poison_empty():
            for way in self.ways:
                function, given, own = self.call_of(way, made.given, variant[0], fills=obstacle is None)
                if obstacle is not None:
                    yield refusal("refusal", function, given, obstacle[0], (obstacle[1].split(",")[0],))
                    continue
                first, end = (row - way.first for row in self.common)
                found.append([own(x)[:, first:end] for x in function(**given)])
        for name, one, other in zip(self.outputs, *found) if found else ():
            differ = (bits(one) != bits(other)).view(*one.shape[:2], -1).any(-1)
            apart = (one.double() - other.double()).abs().max().item()
            detail = f"{int(differ.sum())} of {differ.numel()} rows have other bits"
            yield Finding(f"bits of {name}", not differ.any(), detail, apart, 0.0, 0.0, 0.0)
        for name, x in zip(self.outputs, found[0]) if found and references is not None else ():
            yield from references.findings(name, x[None])

    def call_of(
        self, way: Way, own: dict[str, Any], backend: str, fills: bool = True
    ) -> tuple[Callable[..., Any], dict[str, Any], Callable[[Tensor], Tensor]]:
        """Return the function of a way, its arguments by name, and a function that takes the rows (HQ, count, ...) of
        this sequence from a result. own: the tensors of the sequence. fills: write the keys into a cache that the way
        reads."""
        check = self.check_of(way)
        made = replace(check, window=None).make(own["q"].device)  # the rows that a window hides are written, too
        is_packed, is_step = way.kind == "pack", isinstance(check, DecodeCheck)
        place, start = (0, way.before * way.place) if is_packed else (way.place, way.before)
        first = check.len_q - way.count if way.kind == "batch" else start if is_packed else 0
        rows, new = slice(first, first + way.count), slice(way.first, way.end)
        keys = (rows, new) if is_step else (slice(start, start + way.end), slice(way.end))
        for name, (there, here) in {"q": (rows, new), "k": keys, "v": keys}.items():
            if made.given[name] is not None:
                made.given[name][place, :, there] = own[name][0, :, here]
        for name in ("cos", "sin"):
            table, before = made.given[name], 0 if is_packed else way.before
            if table is not None:
                table[..., before : before + way.end, :] = own[name][: way.end]
        if fills and is_step:
            self._fill(way, own, made.given)
        function, given = check.call(made, (backend, "auto"))
        return function, given | {"batch_invariant": True}, lambda x: check.back(x)[place, :, rows]

    def check_of(self, way: Way) -> Call:
        """Return the call of a way, in which all sequences are random numbers yet."""
        length, numbers = way.before + way.end, random.Random(self.seed)

        def bounds(own: int, most: int) -> tuple[int, ...]:
            return tuple(own if i == way.place else numbers.randint(0, most) for i in range(way.batch))

        fields: dict[str, Any] = {"memory": None, "return_lse": True, "batch": way.batch, "len_q": way.count}
        if way.kind == "pack":
            others = [(n, n) for n in [way.before] * way.place + [way.after] * (way.batch - 1 - way.place)]
            seqlens = (*others[: way.place], (way.count, way.end), *others[way.place :])
            fields |= dict(zip(("len_q", "len_k"), map(sum, zip(*seqlens))))
            return AttentionCheck.of(self, **(fields | {"batch": 1, "seqlens": seqlens}))
        if way.before:
            fields["kv_starts"] = bounds(way.before, length)
        if way.kind == "batch":
            fields |= {"len_q": way.count + (way.before if way.first == 0 else 0), "len_k": length + way.after}
            fields |= {"kv_lens": bounds(length, length + way.after)} if way.after else {}
            return AttentionCheck.of(self, **fields, hides_nan=True)
        page_size = self.page_size if way.kind == "pages" else None
        capacity = -(-(length + way.after) // (page_size or 1)) * (page_size or 1)
        lengths = bounds(way.before + (way.first if way.appends else way.end), capacity - way.count)
        fields |= {"len_k": capacity, "lengths": lengths, "page_size": page_size, "append": way.appends}
        return DecodeCheck.of(self, **fields)

    def _fill(self, way: Way, own: dict[str, Any], given: dict[str, Any]) -> None:
        """Write the keys and values before the step into its cache; sm_90 kernels have no such calls."""
        done = way.first if way.appends else way.end
        if not done:
            return
        here, table = slice(way.place, way.place + 1), given["block_table"]
        store = {name: given[name] for name in ("cos", "sin")} | {"cache_is_rotated": self.rotated}
        store |= {name: given[name] if table is not None else given[name][here] for name in CACHES}
        store["block_table"] = None if table is None else table[here]
        store["cache_seqlens"] = torch.full((1,), way.before, dtype=torch.int32, device=own["q"].device)
        rows = {name: own[name][:, :, :done] for name in ("k", "v")}
        if self.norms is None:
            rotary_dim = self.rotary or None
            run_write(**rows, **store, rotary_dim=rotary_dim, interleaved=self.interleaved, backend="triton")
            return
        # By a step, because a write takes keys that are normed already.
        norms = {name: given[name] for name in ("q_norm", "k_norm")}
        options = self.options(PARAMETERS[STEP], backend="triton")
        FUNCTIONS[STEP](own["q"][:, :, :done], kv_starts=store["cache_seqlens"], **rows, **store, **norms, **options)
