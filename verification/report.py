"""Tables and files of a verification."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fused_rope_attn import env
from verification.calls import dtype_name
from verification.table import format_table
from verification.testing import Finding
from verification.workers import Outcome

COLUMNS = ("case", "dtype", "backend", "tensor", "error", "eager", "ratio", "rows", "verdict")
_LONGEST_NAME = 72  # in the table; the file has all
LEGEND = (
    "error, eager: largest distance from float64, of this backend and of eager PyTorch in the same dtype.\n"
    "ratio: error / eager, at most 2 for o and 3 for gradients. rows: the worst row's rms error over eager's, at most\n"
    "2.5. Both allow an eps: half a unit in the last place, and in float32 1e-5 of the tensor's rms."
)


def rows_of(outcome: Outcome, case: str = "", every: bool = False) -> list[dict[str, Any]]:
    """Return a row of each tensor, and of statements that do not hold, or ``every`` one. case: instead of its name.

    The verdict is "ok", "FAIL", or "SKIP" if the case does not fit this GPU.
    """
    check, rows = outcome.check, []
    skipped = [Finding("-", False, outcome.skipped, backend="-")] if outcome.skipped else []
    for finding in (*outcome.findings, *skipped):
        if every or finding.is_tensor or not finding.ok:
            row = {"case": case or check.name, "dtype": dtype_name(check.dtype)} | asdict(finding)
            row["verdict"] = "ok" if row.pop("ok") else "SKIP" if finding in skipped else "FAIL"
            rows.append(row | {"backend": check.backend or finding.backend})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    return format_table(
        COLUMNS, [row | {"case": row["case"][:_LONGEST_NAME], "rows": row["row_ratio"]} for row in rows]
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each dtype and backend, then one for each tensor that failed or was skipped."""
    lines = []
    for backend, dtype in dict.fromkeys((row["backend"], row["dtype"]) for row in rows):
        members = [row for row in rows if (row["backend"], row["dtype"]) == (backend, dtype)]
        passed = sum(row["verdict"] == "ok" for row in members)
        worst = max(members, key=lambda row: (row["row_ratio"] == row["row_ratio"], row["row_ratio"]))  # nan is none
        where = f"{worst['tensor']} of {worst['case'][:_LONGEST_NAME]}"
        lines.append((backend, dtype, f"{passed} of {len(members)}", worst["row_ratio"], where))
    columns = ("backend", "dtype", "within tolerance", "worst row", "where")
    text = format_table(columns, [dict(zip(columns, line)) for line in lines])
    for row in (row for row in rows if row["verdict"] != "ok"):
        text += "\n{verdict} {case} | {dtype} | {backend} | {tensor}: {detail}".format_map(row)
    return text


def environment(device: str) -> dict[str, Any]:
    """Return the origin of the rows: versions, GPU and driver, commit, date."""
    facts = env.environment() | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": env.run_quietly("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "hypothesis": env.package_version("hypothesis"),  # the calls of a seed depend on it
        "device": device,
    }
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {})


def where(environment: Mapping[str, Any]) -> str:
    """Say in a few words on what a run ran."""
    machine = environment.get("gpu", "Triton's interpreter" if environment["interpreter"] else "CPU")
    return f"{machine}, torch {environment['torch']}, triton {environment['triton']}"


def write_json(
    path: Path, environment: Mapping[str, Any], seconds: float, rows: Sequence[Mapping[str, Any]], **facts: Any
) -> None:
    """``{"environment", "seconds", "failures", "rows"}`` and ``facts``; a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = sum(row["verdict"] == "FAIL" for row in rows)
    content = {"environment": environment, "seconds": round(seconds, 1), "failures": failures}
    text = json.dumps(content | {"rows": rows} | facts)
    finite = json.loads(text, parse_constant=lambda constant: None)
    path.write_text(json.dumps(finite, indent=1) + "\n")
    print(f"rows written to {path}")
