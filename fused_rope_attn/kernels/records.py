# mypy: ignore-errors
"""Records: named values that travel together, from the host into a kernel and on to its helpers.

The host passes a record whole, and the kernel turns it back at its top::

    @record
    class Keys:
        ptr: tl.tensor
        strides: tl.tuple
        first_key: tl.tensor | None
        D: tl.constexpr

    launch(stream, keys=Keys.host(k, k.stride(), None, D=128))  # on the host

    keys = unpack(keys)  # first line of the kernel

A field holds a tensor, a tuple, another record or a compile-time value, and each call settles which: a field that a
call leaves None is a compile-time None, ``if keys.first_key is not None`` costs nothing, and ``tl.arange(0, keys.D)``
works. ``replace(keys, D=64)`` is a copy with another D. A ``tl.constexpr`` annotation makes the host's value a
compile-time one; the others are for the reader. A record compiles to the same code as the separate values, also in a
loop, with every supported Triton, in Gluon, and in the interpreter.

Triton specialises the numbers in a record: it compiles again for 1 and for multiples of 16. Numbers for which it must
not, and tensor descriptors, are parameters of their own, because ``do_not_specialize`` does not reach into a record.
"""

from collections import namedtuple

import triton
from triton.language import core

from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.runtime.triton_compat import aggregate

# Triton tells a kernel the names of a NamedTuple's fields, and nothing else of its type.
_BY_FIELDS = {}


def record(cls: type) -> type:
    """Return the class ``cls`` of annotated fields, as device code can build it: by field names, or in their order.

    A field may have a default, as in a dataclass. ``cls.host(...)`` takes the same, and returns the NamedTuple by which
    the host passes the record.
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

    # A NamedTuple of its own, with no code: Triton makes others of its type, from the types of its values.
    make = namedtuple(cls.__name__, names, defaults=None)._make
    # An annotation is a string in a module that postpones annotations, as copies for Python 3.9 do.
    compile_time = frozenset(
        i for i, name in enumerate(names) if cls.__annotations__[name] in (core.constexpr, "tl.constexpr")
    )

    def host(*values, **named):
        """Return the NamedTuple of a record, with the values of compile-time fields wrapped."""
        if named or len(values) < len(names):
            fields = {**defaults, **dict(zip(names, values)), **named}
            if len(fields) != len(names) or len(values) > len(names) or not fields.keys() <= set(names):
                raise TypeError(f"{cls.__name__} takes {', '.join(names)}, but not {len(values)} and {set(named)}")
            values = [fields[name] for name in names]
        return make([core.constexpr(x) if i in compile_time and x is not None else x for i, x in enumerate(values)])

    cls.__init__ = triton.constexpr_function(__init__)  # type: ignore[misc]
    # Triton checks the type of each field by its annotation, and a field's type is the call's to choose.
    cls.__annotations__ = dict.fromkeys(names, object)
    made = aggregate(cls)
    made.record_fields = names  # the class that triton 3.6 makes lacks the annotations
    made.host = host
    other = _BY_FIELDS.setdefault(names, made)
    if other is not made and other.__qualname__ != made.__qualname__:
        raise TypeError(f"{made.__qualname__} has the fields of {other.__qualname__}: kernels tell records by fields")
    return made


def _unpack(x, _semantic=None):
    """Return a kernel's argument with the records that the host passed turned back; ``x`` may be a tuple of them."""
    if isinstance(x, core.tuple):
        fields, values = tuple(getattr(x.type, "fields", None) or ()), [_unpack(value) for value in x.values]
        return _BY_FIELDS[fields](*values) if fields in _BY_FIELDS else core.tuple(values)
    if isinstance(x, tuple):  # in the interpreter
        fields, values = getattr(x, "_fields", ()), [_unpack(value) for value in x]
        return _BY_FIELDS[fields](*values) if fields in _BY_FIELDS else tuple(values)
    return x.value if is_interpreted() and isinstance(x, core.constexpr) else x


unpack = _unpack if is_interpreted() else core.builtin(_unpack)


def _replace(record, _semantic=None, **changes):
    """Return a copy of a record with other values in some of its fields, as ``dataclasses.replace`` does."""
    fields = {name: getattr(record, name) for name in type(record).record_fields}
    return type(record)(**(fields | changes))


replace = _replace if is_interpreted() else core.builtin(_replace)
