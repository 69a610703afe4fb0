"""What tests of context parallelism run on every rank, and how they join and judge what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fused_rope_attn import testing
from fused_rope_attn.distributed import (
    cp_positions,
    cp_shard,
    cp_shift_labels,
    cp_unshard,
    plan_varlen_cp,
    rope_attention_cp,
    rope_attention_varlen_cp,
)
from fused_rope_attn.testing import Case, Inputs, Results
from tests.support.ranks import group_of

# Gradients that have no rows.
OF_WEIGHTS = ("dsinks", "dq_norm", "dk_norm")


def attend(case: Case, ranks: tuple[int, ...], device: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's o, lse and gradients of a case of equally many queries and keys.

    options: those of ``rope_attention_cp``, and "local_tables", whether this rank passes its rows of the tables alone,
    and "extra_tokens", how many tokens lie behind the last packed document.
    """
    group = group_of(ranks)
    options = dict(options)
    inputs = testing.make_inputs(case, device)
    sharding = options.get("sharding", "zigzag")
    local_tables = options.pop("local_tables", False)
    q, k, v, do = (cp_shard(x, 2, group=group, sharding=sharding) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cos, sin = inputs.cos, inputs.sin
    if local_tables:
        cos, sin = (cp_shard(x, x.ndim - 2, group=group, sharding=sharding) for x in (cos, sin))
    masks = testing.masks_of(case, device)
    norms = testing.norms_of(case, device)
    weights = {"dsinks": masks["sinks"], "dq_norm": norms.get("q_norm"), "dk_norm": norms.get("k_norm")}
    weights = {name: x.requires_grad_() for name, x in weights.items() if x is not None}
    given = {
        "softmax_scale": case.softmax_scale, "rotary_dim": case.rotary_dim, "interleaved": case.interleaved,
        "window": masks["window"], "softcap": masks["softcap"], "sinks": masks["sinks"], "return_lse": True,
        **norms, **options,
    }  # fmt: skip
    if case.seqlens is None:
        o, lse = rope_attention_cp(q, k, v, cos, sin, case.causal, group=group, **given)
    else:
        given.pop("sharding", None)
        limits = [0]
        for length, _ in case.seqlens:
            limits.append(limits[-1] + length)
        plan = plan_varlen_cp(limits, group=group, sharding=sharding, total_tokens=case.len_q, device=device)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        o, lse = rope_attention_varlen_cp(*packed, cos, sin, plan, case.causal, **given)
        o, lse = o.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    gradients = torch.autograd.grad(o, [q, k, v, *weights.values()], do)
    names = ("o", "lse", "dq", "dk", "dv", *weights)
    return {name: x.detach().cpu() for name, x in zip(names, (o, lse, *gradients))}


def joined(parts: list[dict[str, torch.Tensor]], sharding: str = "zigzag") -> dict[str, torch.Tensor]:
    """All ranks' rows in the order of the sequence, and the sum of their parts of the sinks' gradient."""
    size = len(parts)
    found = {}
    for name in parts[0]:
        if name in OF_WEIGHTS:
            found[name] = torch.stack([part[name].double() for part in parts]).sum(0)
            continue
        shards = [part[name] for part in parts]
        if sharding == "zigzag":
            halves = [x.chunk(2, dim=2) for x in shards]
            order = [halves[r][0] for r in range(size)] + [halves[r][1] for r in reversed(range(size))]
        else:
            order = shards
        found[name] = torch.cat(order, dim=2)
    return found


def expected(case: Case, total: int | None, device: str = "cpu") -> tuple[Results, Results, Inputs]:
    """(float64, eager, inputs) of the whole sequence; with ``total`` of its first rows, and zeros behind them."""
    inputs = testing.make_inputs(case, device)
    if total is None or total == case.len_q:
        return (*(testing.run_reference(inputs, case, dtype) for dtype in (torch.float64, None)), inputs)
    short = replace(case, len_q=total, len_k=total)
    q, k, v, cos, sin, do = inputs
    cut = Inputs(q[:, :, :total], k[:, :, :total], v[:, :, :total], cos, sin, do[:, :, :total])
    found = []
    for dtype in (torch.float64, None):
        results = testing.run_reference(cut, short, dtype)
        behind = case.len_q - total
        padded = [torch.nn.functional.pad(x, (0, 0, 0, behind)) for x in (results.o, *results[2:5])]
        lse = torch.nn.functional.pad(results.lse, (0, behind), value=float("-inf"))
        whole = Results(padded[0], lse, *padded[1:])
        whole.dsinks, whole.dq_norm, whole.dk_norm = results.dsinks, results.dq_norm, results.dk_norm
        found.append(whole)
    return found[0], found[1], inputs


def judge(case: Case, found: dict[str, torch.Tensor], total: int | None = None, device: str = "cpu") -> None:
    """Hold all tensors to the contract's tolerance, every row."""
    ref64, eager, inputs = expected(case, total, device)
    for name, out in found.items():
        if name in OF_WEIGHTS:
            reference = getattr(ref64, name).double().cpu()
            limit = 1e-4 if case.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out, reference, rtol=limit, atol=limit * float(reference.abs().max()))
            continue
        compared = testing.compare(
            name, out, getattr(ref64, name).cpu(), getattr(eager, name).cpu(), grad=name.startswith("d"),
            dtype=case.dtype, zero=testing.noise_of_zero(name, case, inputs),
        )  # fmt: skip
        assert compared.ok, f"{case.name}: {name}: {compared.detail}"


def refused_plan(ranks: tuple[int, ...], cu_seqlens: list[int], options: dict[str, Any]) -> str:
    """The message with which ``plan_varlen_cp`` refuses."""
    try:
        plan_varlen_cp(cu_seqlens, group=group_of(ranks), **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def refused(ranks: tuple[int, ...], wrong: dict[str, Any]) -> tuple[str, str]:
    """Name and message of the error of a call in which rank 1, or with "all" every rank, passes something wrong."""
    group, wrong = group_of(ranks), dict(wrong)
    if not wrong.pop("all", False) and group.rank() != 1:
        wrong = {}
    length, heads_kv, rows = wrong.pop("length", 12), wrong.pop("heads_kv", 2), wrong.pop("rows", 36)
    length_k, grad = wrong.pop("length_k", length), wrong.pop("grad", True)
    q = torch.zeros(1, 4, length, 16, requires_grad=grad)
    k, v = torch.zeros(1, heads_kv, length_k, 16), torch.zeros(1, heads_kv, length_k, 16)
    try:
        rope_attention_cp(q, k, v, torch.ones(rows, 8), torch.zeros(rows, 8), **{"group": group, **wrong})
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was refused"


def cut_and_join(
    ranks: tuple[int, ...], whole: torch.Tensor, weights: list[torch.Tensor], sharding: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(this rank's shard, all of them joined, the gradient of the sum of weights times the joined) of a tensor."""
    group = group_of(ranks)
    x = whole.clone().requires_grad_()
    shard = cp_shard(x, 1, group=group, sharding=sharding)
    joined = cp_unshard(shard, -2, group=group, sharding=sharding)
    (joined * weights[group.rank()]).sum().backward()
    return shard.detach(), joined.detach(), x.grad


def positions_of(ranks: tuple[int, ...], total: int, sharding: str) -> torch.Tensor:
    return cp_positions(total, group=group_of(ranks), sharding=sharding)


def labels_of(ranks: tuple[int, ...], labels: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    return cp_shift_labels(labels, group=group_of(ranks), cu_seqlens=cu_seqlens)
