"""Two files of rows matched, with the arithmetic of what is noise.

Two files are two processes, often on two days. Rounds of one file say how a median varies within a process, but not how
it varies from one to the next, with other addresses, another temperature and another card. What says that are the rows
of providers that are not ours: their code is the same in both files, so that whatever they moved by is noise. Both
parts count; a ratio has moved where it is further from 1 than both together explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.compare.files import File, Key, Measured
from bench.timing import quantile

# A ratio further from 1 than so many times its noise has moved. Medians of few rounds have long tails.
CERTAIN = 3.0
# Fewer rivals than this say nothing about the noise between two processes.
_ENOUGH = 4
# The standard error of a median over that of a mean, and the standard deviation over two measures of spread: the median
# of the distances from the centre, and half of the distance from p20 to p80; all of the normal distribution.
_OF_MEDIAN, _OF_MAD, _OF_P80 = 1.2533, 1.4826, 1 / 0.8416
# What is neither time nor energy does not follow a card's clock: no yardstick divides it, and it has no noise.
_CLOCKED = ("ms", "mj")


@dataclass(frozen=True)
class Move:
    """One figure in both files. ``ratio`` is B over A, above 1 it got worse; ``noise`` is one standard deviation of its
    logarithm."""

    key: Key
    ours: bool
    a: float
    b: float
    ratio: float
    noise: float

    @property
    def times_noise(self) -> float:
        """The distance from 1 in standard deviations; infinite where there is no noise."""
        distance = abs(math.log(self.ratio))
        return distance / self.noise if self.noise else math.inf if distance else 0.0

    def verdict(self, threshold: float) -> str:
        """ "worse" or "better" where it moved by more than ``threshold`` (0.02 is 2 %) and more than noise, else ""."""
        if abs(math.log(self.ratio)) <= math.log1p(threshold) or self.times_noise <= CERTAIN:
            return ""
        return "worse" if self.ratio > 1 else "better"


@dataclass(frozen=True)
class Comparison:
    """``moves``: the worst first. ``only_a``, ``only_b``: what the other file does not have; ``lost``, ``won``: what it
    has as a failure, with the reason. ``without_yardstick``: what has no yardstick beside it in both files. ``blind``:
    the passes and modes at which too few rivals say what is noise from one process to the next."""

    moves: list[Move]
    only_a: list[Key]
    only_b: list[Key]
    lost: dict[Key, str]
    won: dict[Key, str]
    without_yardstick: list[Key]
    blind: list[tuple[str, str]]


def compare(a: File, b: File, figures: Iterable[str], yardstick: str | None = None) -> Comparison:
    """Match two files. ``yardstick``: a provider whose figures both are divided by, round by round.

    ValueError where the yardstick is one of ours or has no figure that both files share, or where nothing matches.
    """
    figures = set(figures)
    both = [key for key in a.measured if key in b.measured and key.figure in figures]
    if not both:
        raise ValueError(f"{a.path} and {b.path} have no measurement in common")
    if yardstick is not None:
        _check(yardstick, a, b, both)
    pairs, without = [], []
    for key in both:
        if yardstick is None or key.figure not in _CLOCKED:
            pairs.append((key, a.measured[key], b.measured[key]))
        elif (by := key._replace(provider=yardstick)) not in a.measured or by not in b.measured:
            without.append(key)
        elif by != key:
            pairs.append((key, _over(a.measured[key], a.measured[by]), _over(b.measured[key], b.measured[by])))
    between = _between(pairs)
    moves = []
    for key, one, other in pairs:
        ratio, within = other.value / one.value, math.hypot(within_noise(one), within_noise(other))
        noise = math.hypot(within, between.get(_alike(key), 0.0))
        moves.append(Move(key, one.ours, a.measured[key].value, b.measured[key].value, ratio, noise))
    moves.sort(key=lambda move: -move.ratio)
    only_a, lost = _beyond(a, b)
    only_b, won = _beyond(b, a)
    clocked = [key for key, *_ in pairs if key.figure in _CLOCKED]
    blind = dict.fromkeys((key.part, key.mode) for key in clocked if _alike(key) not in between)
    return Comparison(moves, only_a, only_b, lost, won, without, list(blind))


def _beyond(file: File, other: File) -> tuple[list[Key], dict[Key, str]]:
    """What only ``file`` has timed: (what ``other`` says nothing of, what it has as a failure and why)."""
    alone = [key for key in file.measured if key.figure == "ms" and key not in other.measured]
    failures = {key: why for key in alone if (why := _why(other, key))}
    return [key for key in alone if key not in failures], failures


def within_noise(found: Measured) -> float:
    """The standard error of the logarithm of a median, from the rounds of one process; from the quantiles of its
    samples where there is one round, 0 where there is neither.

    Samples of one round share its clock, so that their number makes nothing more certain.
    """
    if len(found.rounds) > 1:
        logs = [math.log(value) for value in found.rounds]
        return _OF_MEDIAN * statistics.stdev(logs) / math.sqrt(len(logs))
    if found.spread is not None:
        low, high = found.spread
        return 0.5 * _OF_P80 * math.log(high / low)
    return 0.0


def _between(pairs: list[tuple[Key, Measured, Measured]]) -> dict[tuple[str, str, str], float]:
    """(pass, mode, figure) -> the standard deviation of the ratios of what is not ours, around 1."""
    distances: dict[tuple[str, str, str], list[float]] = {}
    for key, one, other in pairs:
        if not one.ours and key.figure in _CLOCKED:
            distances.setdefault(_alike(key), []).append(abs(math.log(other.value / one.value)))
    return {of: _OF_MAD * quantile(found, 0.5) for of, found in distances.items() if len(found) >= _ENOUGH}


def _alike(key: Key) -> tuple[str, str, str]:
    """What is as noisy as ``key``: the same pass, mode and figure."""
    return key.part, key.mode, key.figure


def _over(found: Measured, yardstick: Measured) -> Measured:
    """One measurement over another of the same process, round by round: a drift that both share cancels."""
    if len(found.rounds) == len(yardstick.rounds) and found.rounds:
        rounds = tuple(x / y for x, y in zip(found.rounds, yardstick.rounds))
        return Measured(quantile(list(rounds), 0.5), rounds, _spread_over(found, yardstick), found.ours)
    return Measured(found.value / yardstick.value, (), _spread_over(found, yardstick), found.ours)


def _spread_over(found: Measured, yardstick: Measured) -> tuple[float, float] | None:
    if found.spread is None or yardstick.spread is None:
        return found.spread
    return found.spread[0] / yardstick.spread[1], found.spread[1] / yardstick.spread[0]


def _check(yardstick: str, a: File, b: File, both: list[Key]) -> None:
    shared = sorted({key.provider for key in both} - a.ours - b.ours)
    if yardstick not in shared:
        what = "is ours" if yardstick in a.ours | b.ours else "is not timed in both files"
        known = ", ".join(shared) or "none"
        raise ValueError(
            f"--yardstick must be a provider of both files that is not ours, but {yardstick} {what}; there are: {known}"
        )


def _why(file: File, key: Key) -> str | None:
    """Why a file has no figure where the other one has: a failure there, or one of all passes or all modes."""
    of = key._replace(figure="ms")
    places = (of._replace(part=part, mode=mode) for part in (key.part, "") for mode in (key.mode, ""))
    return next((file.failed[place] for place in places if place in file.failed), None)
