"""Pairs of calls with ``batch_invariant=True``: a row has the same bits of o and lse in both."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_rope_attn.attention import planning
from verification import testing
from verification.calls import FUNCTIONS, PARAMETERS, Call, Finding, Made, References, bits, refusal
from verification.decode import run_write
from verification.memory import in_pages

ENTRIES = {"batch": "rope_attention", "pack": "rope_attention_varlen"}
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
        """Return the sequence: q (1, HQ, N, D), k and v (1, HKV, N, D), its tables and its weights."""
        inputs = self._inputs(device)
        weights = self.norms_of(device) | {"sinks": testing.masks_of(self, device)["sinks"]}
        return Made({name: getattr(inputs, name) for name in ("q", "k", "v", "cos", "sin")} | weights, {})

    def _inputs(self, device: str) -> testing.Inputs:
        inputs = testing.make_inputs(self, device)
        if self.peaks:
            inputs.k[:, :, ::7] *= 8
        return inputs

    def rows_of_references(self, device: str, rows: slice) -> References:
        """Return what float64 and eager PyTorch give in some rows."""
        inputs = self._inputs(device)

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            results = testing.run_reference(inputs, self, dtype)
            return {name: getattr(results, name)[:, :, rows] for name in self.outputs}

        zero = functools.partial(testing.noise_of_zero, case=self, inputs=inputs)
        return References(run, device, lambda name: self.dtype, zero)

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        return (ValueError, "batch_invariant") if variant[0] == "reference" else super().obstacle(arch, variant)

    def planned(self) -> dict[str, Any]:
        return {"batch_invariant": True}

    def run(self, machine: Any) -> Iterator[Finding]:
        """Compare the rows that both ways compute, to the bit, and those of the first way with float64 unless the
        sequence is long. A backend that cannot keep the promise must refuse."""
        products = contextlib.nullcontext()
        if machine.arch == "interpreter":
            from verification.interpreter import products_in_float64

            products = products_in_float64()
        with products, testing.poison_empty():
            for variant in self.variants:
                obstacle = self.obstacle(machine.arch, variant)
                try:
                    if obstacle is None:
                        yield from self._compared(machine.device, variant[0])
                        continue
                    for way in self.ways:
                        function, given, _ = self.call_of(way, machine.device, variant[0], fills=False)
                        yield refusal(variant[0], "refusal", function, given, obstacle[0], (obstacle[1].split(",")[0],))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    yield Finding.raised(variant[0], error)

    def _compared(self, device: str, backend: str) -> Iterator[Finding]:
        first, end = max(way.first for way in self.ways), min(way.end for way in self.ways)
        found = []
        for way in self.ways:
            function, given, own = self.call_of(way, device, backend)
            found.append([x[:, first - way.first : end - way.first] for x in own(*function(**given))])
        for name, one, other in zip(self.outputs, *found):
            differ = (bits(one) != bits(other)).view(*one.shape[:2], -1).any(-1)
            apart = (one.double() - other.double()).abs().max().item()
            detail = f"{int(differ.sum())} of {differ.numel()} rows have other bits" if differ.any() else ""
            yield Finding(backend, testing.Comparison(f"bits of {name}", apart, 0.0, 0.0, 0.0, not detail, detail))
        if self.len_k <= LONGEST:
            references = self.rows_of_references(device, slice(first, end))
            for name, x in zip(self.outputs, found[0]):
                yield from references.findings(backend, name, x[None])

    def call_of(
        self, way: Way, device: str, backend: str, fills: bool = True
    ) -> tuple[Callable[..., Any], dict[str, Any], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Return the function of a way, its arguments by name, and what takes the rows (HQ, count, ...) of this
        sequence from its o and lse. fills: write the keys into a cache that the way reads."""
        made = self.make(device).given
        generator = torch.Generator(device).manual_seed(self.seed + 1)
        name = ENTRIES.get(way.kind, STEP)
        options = self.options(PARAMETERS[name], backend=backend, batch_invariant=True, return_lse=True)
        given = {name: x for name, x in made.items() if name not in ("q", "k", "v", "cos", "sin")} | options
        make = {"batch": self._batch, "pack": self._pack}.get(way.kind, self._step)
        more, own = make(way, made, generator)
        if fills and name == STEP:
            self._fill(way, made, more)
        return FUNCTIONS[name], given | more, own

    def _batch(self, way: Way, made: dict[str, Any], generator: torch.Generator) -> tuple[dict[str, Any], Any]:
        length = way.before + way.end
        padded = way.before if way.first == 0 else 0
        given = {"q": _around(made["q"][:, :, way.first : way.end], way, padded, 0, generator)}
        for name in ("k", "v"):
            given[name] = _around(made[name][:, :, : way.end], way, way.before, way.after, generator)
        given |= self._later_tables(made, way.before, way.after)
        if way.before:
            given["kv_starts"] = _lengths(way, way.before, length, generator)
        if way.after:
            given["kv_lens"] = _lengths(way, length, length + way.after, generator)
        rows = slice(padded, padded + way.count)
        return given, lambda o, lse: (o[way.place, :, rows], lse[way.place, :, rows])

    def _pack(self, way: Way, made: dict[str, Any], generator: torch.Generator) -> tuple[dict[str, Any], Any]:
        def stream(name: str, first: int) -> tuple[Tensor, Tensor, int]:
            """Return the packed tokens, where the sequences end, and the longest."""
            x = made[name][0, :, first : way.end].transpose(0, 1)
            lengths = [way.before] * way.place + [len(x)] + [way.after] * (way.batch - 1 - way.place)
            ends = torch.tensor([0, *lengths]).cumsum(0).int().to(x.device)
            tokens = _normal((sum(lengths), *x.shape[1:]), x, generator)
            begin = way.place * way.before
            tokens[begin : begin + len(x)] = x
            return tokens, ends, max(lengths)

        (q, ends_q, longest_q), (k, ends_k, longest_k) = stream("q", way.first), stream("k", 0)
        given = {"q": q, "k": k, "v": stream("v", 0)[0], "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
        given |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        rows = slice(way.place * way.before, way.place * way.before + way.count)
        tables = self._later_tables(made, 0, max(way.before, way.after))
        return given | tables, lambda o, lse: (o[rows].transpose(0, 1), lse[:, rows])

    def _step(self, way: Way, made: dict[str, Any], generator: torch.Generator) -> tuple[dict[str, Any], Any]:
        page = self.page_size if way.kind == "pages" else 1
        rows = -(-(way.before + way.end + way.after) // page) * page
        caches = [_around(made[name][:, :, :0], way, rows, 0, generator) for name in ("k", "v")]
        table = None
        if way.kind == "pages":
            needed = torch.ones(way.batch, rows // page, dtype=torch.bool, device=caches[0].device)
            caches, table = in_pages(caches, page, needed, generator)
        names = ("q", "k", "v") if way.appends else ("q",)
        given = {name: _around(made[name][:, :, way.first : way.end], way, 0, 0, generator) for name in names}
        given |= self._later_tables(made, way.before, rows - way.before - way.end)
        length = way.before + (way.first if way.appends else way.end)
        given |= {"k_cache": caches[0], "v_cache": caches[1], "block_table": table, "cache_is_rotated": self.rotated}
        given["cache_seqlens"] = _lengths(way, length, rows - way.count, generator)
        if way.before:
            given["kv_starts"] = _lengths(way, way.before, rows, generator)
        return given, lambda o, lse: (o[way.place], lse[way.place])

    def _fill(self, way: Way, made: dict[str, Any], given: dict[str, Any]) -> None:
        """Write the keys and values before the step into its cache; sm_90 kernels have no such calls."""
        done = way.first if way.appends else way.end
        if not done:
            return
        here, table = slice(way.place, way.place + 1), given["block_table"]
        store = {name: given[name] for name in ("cos", "sin", "cache_is_rotated")}
        store |= {name: given[name] if table is not None else given[name][here] for name in ("k_cache", "v_cache")}
        store["block_table"] = None if table is None else table[here]
        store["cache_seqlens"] = torch.full((1,), way.before, dtype=torch.int32, device=made["q"].device)
        rows = {name: made[name][:, :, :done] for name in ("k", "v")}
        if self.norms is None:
            run_write(**rows, **store, rotary_dim=self.rotary, interleaved=self.interleaved, backend="triton")
            return
        # By a step, because a write takes keys that are normed already.
        norms = {name: made[name] for name in ("q_norm", "k_norm")}
        FUNCTIONS[STEP](
            made["q"][:, :, :done], **rows, **store, **norms, **self.options(PARAMETERS[STEP], backend="triton")
        )

    def _later_tables(self, made: dict[str, Any], before: int, after: int) -> dict[str, Tensor]:
        """Return the tables with other rows before and after those of the sequence."""
        found = {}
        for name in ("cos", "sin"):
            x = made[name]
            found[name] = torch.cat((x.new_full((before, x.shape[1]), 0.5), x, x.new_zeros(after, x.shape[1])))
        return found


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


def _around(x: Tensor, way: Way, before: int, after: int, generator: torch.Generator) -> Tensor:
    """Put x (1, H, N, D) into a batch of random numbers, with NaN in the rows before and after it."""
    _, heads, count, columns = x.shape
    found = _normal((way.batch, heads, before + count + after, columns), x, generator)
    found[way.place] = math.nan
    found[way.place, :, before : before + count] = x[0]
    return found


def _lengths(way: Way, own: int, most: int, generator: torch.Generator) -> Tensor:
    """Return (batch,) int32: ``own`` for this sequence, and random ones up to ``most`` for the others."""
    found = torch.randint(0, most + 1, (way.batch,), generator=generator, device=generator.device, dtype=torch.int32)
    found[way.place] = own
    return found
