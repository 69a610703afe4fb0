"""Run checks against float64, here or in worker processes; every outcome, crashes included, is a row."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fused_rope_attn import testing
from fused_rope_attn.attention import planning
from verification.matrix import Check

Heads = tuple[slice, slice]  # of the batch, of the key-value heads
TENSORS = ("o", "lse", "dq", "dk", "dv")
# Heads of a large case are compared until this many scores have been computed in float64: a second or two.
_SCORES = 1 << 33


@dataclass(frozen=True)
class Row:
    """One tensor of one case from one backend. ``ratio`` is error / eager_error, and 2.0 (3.0 for gradients) is the
    limit; ``row_ratio`` the worst row's rms error over eager's, 2.5 is the limit. Errors are maxima over the tensor."""

    case: str
    dtype: str
    backend: str
    tensor: str
    error: float
    eager: float
    ratio: float
    row_ratio: float
    verdict: str  # "ok", "FAIL", or "SKIP" where the yardstick does not fit this GPU
    detail: str = ""

    @classmethod
    def of(cls, task: Task | CheckTask, backend: str, found: testing.Comparison) -> Row:
        """The row of one comparison."""
        figures = (found.error, found.eager_error, found.ratio, found.row_ratio)
        verdict = "ok" if found.ok else "FAIL"
        return cls(task.check.name, dtype_name(task.dtype), backend, found.tensor, *figures, verdict, found.detail)


@dataclass(frozen=True)
class Task:
    """A check in one dtype; its reference is computed once for all ``variants``, (backend, strategy) pairs."""

    check: Check
    dtype: torch.dtype
    variants: tuple[tuple[str, str], ...]
    device: str

    @property
    def name(self) -> str:
        return f"{self.check.name} {dtype_name(self.dtype)}"


class OwnCheck(Protocol):
    """A check that knows itself how to run: of what has neither backends nor strategies of attention."""

    name: str
    scale: str
    backend: str  # what its rows say there

    def compared(self, dtype: torch.dtype, device: str) -> Iterator[testing.Comparison]:
        """Run it, and hold one tensor after the other against float64."""
        ...


@dataclass(frozen=True)
class CheckTask:
    """An ``OwnCheck`` in one dtype."""

    check: OwnCheck
    dtype: torch.dtype
    device: str

    @property
    def name(self) -> str:
        return f"{self.check.name} {dtype_name(self.dtype)}"

    def run(self) -> list[Row]:
        """All rows of the task. Nothing is raised."""
        check = self.check
        try:
            return [Row.of(self, check.backend, found) for found in check.compared(self.dtype, self.device)]
        except torch.OutOfMemoryError:
            return [failure(self, check.backend, "does not fit this GPU's memory", "SKIP")]
        except Exception as error:
            return [failure(self, check.backend, error)]


def hopper_serves(check: Check, dtype: torch.dtype) -> bool:
    """Whether the sm_90 backend serves a check on the machine that it is made for."""
    case = check.case
    needs = planning.Needs(
        "sm_90", dtype, case.head_dim, packed=case.seqlens is not None, no_keys=case.len_k == 0
    )  # fmt: skip
    return planning.obstacle("hopper", needs) is None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_task(task: Task | CheckTask) -> list[Row]:
    """All rows of one task. Nothing is raised: a backend that cannot run its case has failed it."""
    if isinstance(task, CheckTask):
        return task.run()
    case = replace(task.check.case, dtype=task.dtype)
    rows: list[Row] = []
    try:
        inputs = _inputs(task.check, case, task.device)
        references = [(where, *_references(inputs, case, where)) for where in _compared_heads(task.check, case)]
    except torch.OutOfMemoryError:
        return [failure(task, "reference", "inputs and float64 reference do not fit this GPU's memory", "SKIP")]
    except Exception as error:
        return [failure(task, "reference", error)]
    for variant in task.variants:
        backend, strategy = variant
        label = backend if strategy == "auto" else f"{backend} {strategy}"
        try:
            found = list(_compare_variant(task, inputs, case, references, variant))
            rows += [Row.of(task, label, comparison) for comparison in found]
        except Exception as error:
            rows.append(failure(task, label, error))
    del inputs, references
    if task.device.startswith("cuda") and task.check.scale != "small":
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _compare_variant(
    task: Task,
    inputs: testing.Inputs,
    case: testing.Case,
    references: list[tuple[Heads, testing.Results, testing.Results]],
    variant: tuple[str, str],
) -> Iterator[testing.Comparison]:
    """Run one (backend, strategy) and hold every tensor against the references of the compared heads."""
    backend, strategy = variant

    def run() -> testing.Results:
        # Reruns are bitwise equal where that is promised.
        return testing.run_op(inputs, case, backend=backend, strategy=strategy, deterministic=task.check.rerun)

    with testing.poison_empty():
        out = run()
    for tensor in TENSORS:
        whole = getattr(out, tensor)
        comparisons = [
            testing.compare(
                tensor,
                _heads_of(whole, where, case, of_keys=tensor in ("dk", "dv")),
                getattr(ref64, tensor),
                getattr(eager, tensor),
                grad=tensor.startswith("d"),
                dtype=task.dtype,
            )
            for where, ref64, eager in references
        ]
        found = _worst(comparisons)
        # Heads that are not compared must at least be written, and numbers: what nothing wrote is poisoned.
        if tensor != "lse" and not bool(torch.isfinite(whole).all()):
            found = replace(found, ok=False, detail=f"not finite everywhere; {found.detail}")
        yield found
    for tensor in ("dsinks", "dq_norm", "dk_norm"):  # each of all heads, of which large cases compare some
        if getattr(out, tensor) is not None and task.check.scale == "small":
            rows = (getattr(x, tensor)[None] for x in (out, *references[0][1:]))
            yield testing.compare(tensor, *rows, grad=True, dtype=task.dtype)
    if task.check.rerun:
        again = run()
        changed = sum(int((getattr(out, t) != getattr(again, t)).sum()) for t in TENSORS)
        detail = f"{changed} elements differ" if changed else "bitwise equal"
        yield testing.Comparison("rerun", float(changed), 0.0, 0.0, 0.0, not changed, detail)


def _worst(comparisons: list[testing.Comparison]) -> testing.Comparison:
    """One comparison for those of a tensor's parts: the largest errors, and the worst row with its detail."""
    failed = [found for found in comparisons if not found.ok]
    worst = max(failed or comparisons, key=lambda found: found.row_ratio)
    error, eager_error = (max(getattr(found, name) for found in comparisons) for name in ("error", "eager_error"))
    return replace(worst, error=error, eager_error=eager_error, ok=not failed)


def _inputs(check: Check, case: testing.Case, device: str) -> testing.Inputs:
    inputs = testing.make_inputs(case, device)
    if not check.packed_heads:
        return inputs
    q, k, v = inputs.q, inputs.k, inputs.v
    packed = q.new_empty(case.batch, case.len_k, check.packed_heads, case.head_dim)
    views, first = [], 0
    for x in (q, k, v):
        # The last heads of each third, so that the largest offsets are used.
        last = first + check.packed_heads // 3
        views.append(packed[:, :, last - x.shape[1] : last].transpose(1, 2).copy_(x))
        first = last
    return inputs._replace(q=views[0], k=views[1], v=views[2])


def _compared_heads(check: Check, case: testing.Case) -> list[Heads]:
    """What to compare: a small case whole, of a larger one some heads that include the first and the last."""
    if check.scale == "small":
        return [(slice(0, case.batch), slice(0, case.heads_kv))]
    scores = case.heads_q // case.heads_kv * case.len_q * case.len_k
    every = case.batch * case.heads_kv
    count = max(1, min(every, 8, _SCORES // scores))
    chosen = [every - 1] if count == 1 else [i * (every - 1) // (count - 1) for i in range(count)]
    pairs = [divmod(i, case.heads_kv) for i in chosen]
    return [(slice(b, b + 1), slice(h, h + 1)) for b, h in pairs]


def _heads_of(x: torch.Tensor, heads: Heads, case: testing.Case, of_keys: bool) -> torch.Tensor:
    """The part of x, (B, HQ, ...) or with ``of_keys`` (B, HKV, ...), that belongs to these key-value heads."""
    batch, keys = heads
    group = 1 if of_keys else case.heads_q // case.heads_kv
    return x[batch, keys.start * group : keys.stop * group]


def _references(inputs: testing.Inputs, case: testing.Case, heads: Heads) -> tuple[testing.Results, testing.Results]:
    """(float64, eager in the input dtype) of some heads."""
    batch, keys = heads
    part = testing.Inputs(
        q=_heads_of(inputs.q, heads, case, False),
        k=_heads_of(inputs.k, heads, case, True),
        v=_heads_of(inputs.v, heads, case, True),
        cos=inputs.cos[batch] if case.table_batch else inputs.cos,
        sin=inputs.sin[batch] if case.table_batch else inputs.sin,
        do=_heads_of(inputs.do, heads, case, False),
    )
    bounds = {name: x[batch] for name in ("kv_starts", "kv_lens") if (x := getattr(case, name)) is not None}
    case = replace(case, batch=part.q.shape[0], heads_q=part.q.shape[1], heads_kv=part.k.shape[1], **bounds)
    return testing.run_reference(part, case, torch.float64), testing.run_reference(part, case)


def failure(task: Task | CheckTask, backend: str, error: BaseException | str, verdict: str = "FAIL") -> Row:
    """The row of a task that has no figures."""
    if isinstance(error, BaseException):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
        error = f"{type(error).__name__}: {error}".splitlines()[0][:300] + where
    nan = float("nan")
    return Row(task.check.name, dtype_name(task.dtype), backend, "-", nan, nan, nan, nan, verdict, error)


def run_tasks(
    tasks: list[Task | CheckTask], processes: int, on_done: Callable[[Task | CheckTask, list[Row]], None]
) -> None:
    """Run every task and hand its rows to ``on_done`` as they come; ``processes`` 0: one after another, in this one.

    Kernels are compiled at their first call, for seconds each, so that processes pay on a GPU too. Large cases go two
    at a time and huge ones alone, for the memory of the card.
    """
    if processes == 0:
        for task in tasks:
            on_done(task, run_task(task))
        return
    for scale, limit in (("small", processes), ("large", 2), ("huge", 1)):
        queue = [task for task in tasks if task.check.scale == scale]
        if not queue:
            continue
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            min(processes, limit), mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            pending = {pool.submit(run_task, task): task for task in queue}
            for future in as_completed(pending):
                on_done(pending[future], _rows_of(future, pending[future]))


def _rows_of(future: Future[list[Row]], task: Task | CheckTask) -> list[Row]:
    error = future.exception()  # only where the process itself died: run_task does not raise
    return future.result() if error is None else [failure(task, "process", error)]
