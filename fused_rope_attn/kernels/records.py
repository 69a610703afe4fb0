# mypy: ignore-errors
"""Records: named values that travel through device code together, so that helpers take a few of them by name.

An entry kernel takes flat parameters, which is what a launch can give, bundles them at its top, and hands records to
its helpers::

    @record
    class Keys:
        ptr: tl.tensor
        strides: tl.tuple
        first_key: tl.tensor | None
        D: tl.constexpr

    keys = Keys(ptr=k_ptr, strides=k_strides, first_key=None, D=D)

A field holds a tensor, a tuple, another record or a compile-time value, and each call settles which: a field that a
call leaves None is a compile-time None, ``if keys.first_key is not None`` costs nothing, and ``tl.arange(0, keys.D)``
works. ``replace(keys, D=64)`` is a copy with another D. Annotations are for the reader. A record compiles to the same
code as the separate values, also in a loop, with every supported Triton, in Gluon, and in the interpreter. (A
NamedTuple would make run-time values of compile-time fields.)
"""

import triton
from triton.language import core

from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.runtime.triton_compat import aggregate


def record(cls: type) -> type:
    """Return the class ``cls`` of annotated fields, as device code can build it: by field names, or in their order.

    A field may have a default, as in a dataclass.
    """
    names = tuple(cls.__annotations__)
    defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}
    # The interpreter runs device code as Python, which knows no compile-time values: None is None there.
    interpreted = is_interpreted()

    def __init__(self, *values, **named):
        def wrapped(value):
            if interpreted:
                return value
            if isinstance(value, (tuple, core.tuple)):
                return core.tuple([wrapped(part) for part in value])
            return value if isinstance(value, core.base_value) else core.constexpr(value)

        given = dict(zip(names, values)) | named
        fields = defaults | given
        if len(values) + len(named) != len(given) or set(fields) != set(names):
            raise TypeError(f"a record of {', '.join(names)} cannot be made of {len(values)} values and {set(named)}")
        for name, value in fields.items():
            setattr(self, name, wrapped(value))

    cls.__init__ = triton.constexpr_function(__init__)  # type: ignore[misc]
    # Triton checks the type of each field by its annotation, and a field's type is the call's to choose.
    cls.__annotations__ = dict.fromkeys(names, object)
    made = aggregate(cls)
    made.record_fields = names  # the class that triton 3.6 makes lacks the annotations
    return made


def _replace(record, _semantic=None, **changes):
    """Return a copy of a record with other values in some of its fields, as ``dataclasses.replace`` does."""
    fields = {name: getattr(record, name) for name in type(record).record_fields}
    return type(record)(**(fields | changes))


replace = _replace if is_interpreted() else core.builtin(_replace)
