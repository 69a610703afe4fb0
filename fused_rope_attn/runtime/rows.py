"""Tables of launch configurations: the first row whose fields match a call is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")


def find_row(rows: Sequence[Row], **key: object) -> Row:
    """Return the first row that matches the properties of a call. ``key`` has them by the names of the row's fields.

    A field that is None matches anything, and a tuple its members. ``head_dim`` and fields that begin with ``most_``
    match values that are not greater, and fields that begin with ``from_`` values that are not smaller, but never None.

    Raises:
        LookupError: no row matches.
    """
    for row in rows:
        if all(_matches(name, getattr(row, name), value) for name, value in key.items()):
            return row
    raise LookupError(f"no configuration for {key}")


def _matches(name: str, field: object, value: object) -> bool:
    if field is None:
        return True
    if name == "head_dim" or name.startswith("most_"):
        return value is not None and value <= field  # type: ignore[operator]
    if name.startswith("from_"):
        return value is not None and value >= field  # type: ignore[operator]
    return value in field if isinstance(field, tuple) else value == field
