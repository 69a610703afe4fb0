"""What the suite of masks times: the lines of its three figures, window, packed and overhead."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from baselines.masked import MASKED, MaskedAttention
from baselines.rotations import LIGER
from fused_rope_attn.testing import Case

FIGURES = ("window", "packed", "overhead")


@dataclass(frozen=True)
class Line:
    """One thing that is timed. ``form``: how the tensors of ``case`` are handed over, see ``problem.Problem``;
    ``rival``: None for ours."""

    figure: str
    name: str
    label: str
    case: Case
    form: str = "dense"
    rival: MaskedAttention | None = None

    def missing(self) -> str | None:
        """What it lacks on this machine, or None."""
        return None if self.rival is None else LIGER.missing() or self.rival.missing()


def mixed_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """``count`` lengths, uniform between the two, both of which occur."""
    generator = random.Random(seed)
    middle = [generator.randint(shortest, longest) for _ in range(count - 2)]
    lengths = [shortest, longest, *middle]
    generator.shuffle(lengths)
    return tuple(lengths)


def window_lines(case: Case, left: int) -> list[Line]:
    """Ours with and without the window, then everybody who serves one."""
    windowed = replace(case, window=(left, 0))
    return [
        Line("window", "causal", "ours, full causal", case),
        Line("window", "window", "ours, window", windowed),
        *(Line("window", r.name, f"{LIGER.label} + {r.label}", windowed, rival=r) for r in MASKED if r.window),
    ]


def packed_lines(case: Case, lengths: tuple[int, ...]) -> list[Line]:
    """Ours packed and padded, on the right as trainers do and on the left, then everybody who takes packed ones."""
    total = sum(lengths)
    packed = replace(case, batch=1, len_q=total, len_k=total, seqlens=tuple((n, n) for n in lengths))
    return [
        Line("packed", "packed", "ours, packed", packed, "packed"),
        Line("packed", "padded", "ours, padded right, causal", packed, "right"),
        Line("packed", "kv_starts", "ours, padded left, kv_starts", packed, "left"),
        *(Line("packed", r.name, f"{LIGER.label} + {r.label}", packed, "packed", r) for r in MASKED if r.packed),
    ]


def overhead_lines(case: Case) -> list[Line]:
    """Masks that hide nothing, so that only their own cost shows."""
    everything = (case.len_k,) * case.batch
    changed = {
        "window": {"window": (case.len_k, 0)},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": True},
        "kv_lens": {"kv_lens": everything},
        "kv_starts": {"kv_starts": (0,) * case.batch},
    }
    plain = Line("overhead", "causal", "ours, causal", case)
    return [plain, *(Line("overhead", n, f"ours, {n}", replace(case, **c)) for n, c in changed.items())]


def lines(figures: tuple[str, ...] = FIGURES) -> list[Line]:
    """The lines of the figures, at the sizes that the results are stated for; bfloat16."""
    llama = Case(2, 32, 8, 4096, 4096, 128, dtype=torch.bfloat16)
    found = {
        "window": window_lines(replace(llama, batch=1, len_q=32768, len_k=32768), 1024),
        "packed": packed_lines(llama, mixed_lengths(64, 16, 4096)),
        "overhead": overhead_lines(llama),
    }
    return [line for figure in figures for line in found[figure]]


def shape(case: Case) -> str:
    """The case's name; of many packed sequences their number and extremes."""
    if case.seqlens is None:
        return case.name
    lengths = [n for n, _ in case.seqlens]
    return f"{replace(case, seqlens=None).name} packed={len(lengths)}x{min(lengths)}..{max(lengths)}"
