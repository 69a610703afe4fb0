"""Tables of launch configurations: the first row whose fields match a call is taken."""

from collections.abc import Sequence
from typing import Any


def find_row(rows: Sequence[Any], **key: Any) -> Any:
    """Return the first row that matches the properties of a call. ``key`` has them by the names of the row's fields.

    A field that is None matches anything, and a tuple its members. ``head_dim`` and fields that begin with ``most_``
    match values that are not greater, and fields that begin with ``from_`` values that are not smaller, but never None.

    Raises:
        LookupError: no row matches.
    """

    def matches(name: str, field: Any, value: Any) -> bool:
        if field is None:
            return True
        if name == "head_dim" or name.startswith("most_"):
            return value is not None and value <= field
        if name.startswith("from_"):
            return value is not None and value >= field
        return value in field if isinstance(field, tuple) else value == field

    for row in rows:
        if all(matches(name, getattr(row, name), value) for name, value in key.items()):
            return row
    raise LookupError(f"no configuration for {key}")
