"""Context parallelism against float64: what every rank runs, how its rows are joined and compared, and the checks."""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp
from fused_rope_attn.distributed.layout import owners_of
from verification import testing
from verification.attention import AttentionCheck
from verification.calls import Machine, Made
from verification.ranks import GROUPS, Ranks, group_of
from verification.strategies import Draw, chance, draw, pick
from verification.testing import LAYOUTS, TABLES, Case, Finding

# Gradients that have no rows.
OF_WEIGHTS = ("dsinks", "dq_norm", "dk_norm")
DRAWN = 126  # calls of a run


def attend(case: Case, ranks: tuple[int, ...], device: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's o, lse and gradients of a case of equally many queries and keys.

    options: options of ``rope_attention_cp``; with "local_tables" this rank passes only its rows of the tables, and
    "wanted" names the arguments that require a gradient. Rows from "total_len" on hold NaN.
    """
    sharding, group = options.get("sharding", "zigzag"), group_of(ranks)
    check = AttentionCheck.of(case, wanted=options.get("wanted", AttentionCheck.wanted))
    shard = functools.partial(cp_shard, group=group, sharding=sharding)
    made = check.make(device)
    tensors, upstream = {name: made.given[name] for name in "qkv"}, dict(made.upstream)
    if "total_len" in options:
        padding = torch.arange(case.len_q, device=device)[:, None] >= options["total_len"]
        tensors = {name: x.masked_fill(padding, math.nan) for name, x in tensors.items()}
        upstream["o"] = upstream["o"].masked_fill(padding, math.nan)
    local = made.given | {name: shard(x, 2) for name, x in tensors.items()}
    if options.get("local_tables"):
        local |= {name: shard(local[name], local[name].ndim - 2) for name in ("cos", "sin")}
    made = Made(local, {name: shard(x, 2) for name, x in upstream.items()})
    _, given = check.call(made, ("auto", "auto"))
    function, own = rope_attention_cp, {"group": group, "sharding": sharding}
    if case.seqlens is not None:
        limits = [0, *itertools.accumulate(length for length, _ in case.seqlens)]
        plan = plan_varlen_cp(limits, **own, total_tokens=case.len_q, device=device)
        function, own = rope_attention_varlen_cp, {"plan": plan}
    known = inspect.signature(function).parameters
    given = {name: x for name, x in given.items() if name in known}
    given |= {name: x for name, x in options.items() if name not in ("sharding", "local_tables", "wanted")} | own
    return {name: x.cpu() for name, x in check.results(function, given, made).items()}


def joined(parts: list[dict[str, torch.Tensor]], sharding: str = "zigzag") -> dict[str, torch.Tensor]:
    """All ranks' rows in the order of the sequence, and the sum of their parts of the weights' gradients."""
    owners, found = owners_of(len(parts), sharding), {}
    for name in parts[0]:
        if name in OF_WEIGHTS:
            found[name] = torch.stack([part[name].double() for part in parts]).sum(0)
        else:
            chunks = [part[name].chunk(len(owners) // len(parts), dim=2) for part in parts]
            found[name] = torch.cat([chunks[rank][index] for rank, index in owners], dim=2)
    return found


def compared(
    case: Case, found: dict[str, torch.Tensor], total: int | None = None, device: str = "cpu"
) -> list[Finding]:
    """Hold each tensor of all rows against float64, by the contract's tolerance; the gradient of a weight is one row.

    total: the rows after the first ``total`` are padding, and must be zero.
    """
    tokens = case.len_q if total is None else total
    inputs = testing.make_inputs(case, device)
    some = {name: getattr(inputs, name)[:, :, :tokens] for name in ("q", "k", "v", "do")}
    dlse = None if inputs.dlse is None else inputs.dlse[:, :, :tokens]
    short = AttentionCheck.of(replace(case, len_q=tokens, len_k=tokens))
    references = short.references(short.made(inputs._replace(**some).with_dlse(dlse)), device)
    results = []
    for name, x in found.items():
        rows, padding = (x, x[:0]) if name in OF_WEIGHTS else (x[:, :, :tokens], x[:, :, tokens:])
        result = references.compare(name, rows.to(device))
        is_left = bool((padding == (float("-inf") if name == "lse" else 0.0)).all())
        results.append(result if is_left else replace(result, ok=False, detail="padding was written"))
    return results


@dataclass(frozen=True)
class CpCheck:
    """One call of some of the ranks. given: the options that ``attend`` takes."""

    case: Case
    members: tuple[int, ...]
    given: dict[str, Any]
    size: ClassVar[str] = "small"
    backend: ClassVar[str] = "cp"
    function: ClassVar[str] = "rope_attention_cp"
    dtype = property(attrgetter("case.dtype"))

    @property
    def name(self) -> str:
        words = (f"{key}={value}" for key, value in self.given.items())
        return f"{self.case.name} {' '.join(words)} ranks {self.members}"

    def run(self, machine: Machine) -> Iterator[Finding]:
        device = machine.device.split(":")[0]
        parts = pool_of(device).results(attend, self.case, self.members, device, self.given, ranks=self.members)
        shards = joined(parts, self.given.get("sharding", "zigzag"))
        yield from compared(self.case, shards, self.given.get("total_len"), device)


@st.composite
def cp_calls(draw: Draw, size: int = 4, scale: int = 1) -> CpCheck:
    """Draw a call that some of ``size`` ranks share: one sequence, or documents that chunks cut anywhere. scale: of
    lengths and heads, for GPUs."""
    members = draw(st.sampled_from([group for group in GROUPS if 1 < len(group) and max(group) < size]))
    count = len(members)
    ranks = draw(st.permutations([*range(count)] * draw(st.integers(1, 4))))
    given = {"sharding": pick(draw, {"zigzag": 4, "contiguous": 3, f"dealt:{','.join(map(str, ranks))}": 4})}
    rows = len(owners_of(count, given["sharding"])) * draw(st.integers(1, 12)) * scale
    heads_kv = pick(draw, {1: 1, 2: 1, count: 2, 8: 1})
    fields = {"batch": pick(draw, {1: 2, 2: 1}), "sinks": chance(draw, 0.3), "lse_gradient": chance(draw, 0.3)}
    fields |= {name: pick(draw, weights) for name, weights in (
        ("softcap", {0.0: 4, 5.0: 1}), ("norms", {None: 4, 0.0: 1, 1.0: 1}), ("rotary_dim", {None: 4, 8: 1}),
        ("interleaved", {False: 3, True: 1}), ("extra_rows", {0: 3, 5: 1}), ("tables", dict.fromkeys(TABLES, 1)),
        ("layout", dict.fromkeys(LAYOUTS, 1)), ("causal", {True: 3, False: 2}), ("table_batch", {False: 4, True: 1}),
        ("dtype", {torch.float32: 3, torch.float16: 1}))}  # fmt: skip
    side = {-1: 2, 0: 1, st.integers(1, rows): 4, st.integers(1, 9): 2}
    right = 0 if fields["causal"] else pick(draw, side)
    fields["window"] = (pick(draw, side), right) if chance(draw, 0.5) else None
    if fields["tables"] == "none":
        fields |= {"rotary_dim": None, "interleaved": False}
    if chance(draw, 0.4):
        ends = sorted(draw(st.lists(st.integers(0, rows), min_size=1, max_size=7)) + [rows] * chance(draw, 0.5))
        lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
        fields |= {"seqlens": tuple((n, n) for n in lengths), "batch": 1, "table_batch": False}
    else:
        if chance(draw, 0.4):
            given["total_len"] = pick(draw, {0: 1, st.integers(1, rows): 8})
        if fields["tables"] != "none" and chance(draw, 0.3):
            given["local_tables"], fields["extra_rows"] = True, 0
    given |= {"method": pick(draw, {"auto": 1, "all_gather": 3} | ({} if heads_kv % count else {"all_to_all": 4}))}
    given |= {"deterministic": chance(draw, 0.2)}
    if chance(draw, 0.1):
        given["wanted"] = pick(draw, dict.fromkeys((("q",), ("k",), ("v",), ("q", "v")), 1))
    heads_q = heads_kv * draw(st.integers(1, 3))
    head_dim = 16 if scale == 1 else 64
    case = Case(heads_q=heads_q, heads_kv=heads_kv, len_q=rows, len_k=rows, head_dim=head_dim, **fields)
    return CpCheck(case, members, given)


@functools.cache
def pool_of(device: str) -> Ranks:
    """Return this process's ranks, which compile the kernels of all its calls."""
    return Ranks(count_ranks(device), "nccl" if device == "cuda" else "gloo")


def count_ranks(device: str) -> int:
    return min(4, torch.cuda.device_count()) if device.startswith("cuda") else 4


def make_checks(options: argparse.Namespace) -> list[CpCheck]:
    """Return drawn calls, the same in each run, in every dtype."""
    calls = cp_calls(count_ranks(options.device), 16 if options.device.startswith("cuda") else 1)
    drawn = [draw(calls, "cp", index) for index in range(DRAWN)]
    found = [
        replace(one, case=replace(one.case, dtype=getattr(torch, name))) for name in options.dtype for one in drawn
    ]
    return [check for check in found if options.filter.lower() in check.name.lower()]
