"""Every refusal of the public functions, as typed errors raised before anything is written, launched or allocated.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong shape, range, device or combination. `planning` refuses
calls that a backend cannot serve. The happy path runs once per call on the host, so it only reads and compares
attributes, and builds a message only after it has found a fault.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, strided

from fused_rope_attn.attention.problem import Tensors, check_options
from fused_rope_attn.runtime.axes import in_layout
from fused_rope_attn.runtime.checks import (
    INPUT_DTYPES,
    are_ordinary,
    check_bool,
    check_ends,
    check_int,
    check_kinds,
    check_queries_and_keys,
    check_tables,
    check_tensor,
    is_plain,
    named,
    refuse_device,
    shown,
    warn_once,
)


def check_attention(tensors: Tensors, options: Any, layout: str = "bhsd", max_seqlen_k: int | None = None) -> int:
    """Check a call of attention as its caller gave it, and return the rotary dim R.

    tensors, options: ``Tensors`` with q, k and v as (B, H, N, D), and ``Options``.
    layout: the order of the axes in the caller's tensors, for messages.
    max_seqlen_k: table rows that packed sequences need. `check_packed` has checked it.

    Raise TypeError or ValueError with the argument, the expectation and the given value.
    """
    q, k, v, cos, sin = tensors[:5]
    # Types first: everything below reads attributes of tensors.
    if not (
        type(q) is type(k) is type(v) is type(cos) is type(sin) is Tensor
        and q.layout is k.layout is v.layout is strided
        and not q.is_nested
    ):
        check_kinds(q=q, k=k, v=v, cos=cos, sin=sin)
    check_queries_and_keys(q, k, v, cos, sin, layout=layout)
    check_options(tensors, options)

    batch, _, len_q, head_dim = q.shape
    len_k = k.shape[2]
    if len_q > len_k and tensors.kv_lens is None and max_seqlen_k is None:
        _check_more_queries(q, k, options.causal, layout)
    rows = len_k if max_seqlen_k is None else max_seqlen_k
    return check_tables(cos, sin, q.dtype, batch, rows, head_dim, options.rotary_dim, "q", "k")


def check_latent(tensors: Tensors, options: Any, layout: str = "bhsd", max_seqlen_k: int | None = None) -> int:
    """Check a call of multi-head latent attention as `check_attention` does, with all tensors as (B, H, N, columns).

    `check_latent_forms` has checked their types and numbers of dimensions.
    """
    q, k, v, cos, sin = tensors[:5]
    check_kinds(cos=cos, sin=sin)
    if q.dtype not in INPUT_DTYPES:
        raise TypeError(f"q_rope must be float16, bfloat16 or float32, but is {named(q.dtype)}")
    given = dict(zip(LATENT_FORMS, (q, tensors.q_nope, k, tensors.k_nope, v)))
    known: dict[str, tuple[int, str]] = {"1": (1, "")}
    for name, x in given.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q_rope's dtype {named(q.dtype)}, but is {named(x.dtype)}")
        for symbol, size in zip(LATENT_FORMS[name], x.shape):
            expected, owner = known.setdefault(symbol, (size, name))
            if size != expected:
                form, held = _latent_form(name, layout), shown(in_layout(x.shape, layout))
                why = "one head, which all query heads share" if symbol == "1" else f"{symbol} = {expected} of {owner}"
                raise ValueError(f"{name} must have shape {form} with {why}, but has {held}")
    for name, x in (given | {"cos": cos, "sin": sin}).items():
        if x.device != q.device:
            refuse_device(q.device, "q_rope", **{name: x})
    heads, len_q, rotary_dim = q.shape[1:]
    if heads < 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            "q_rope must have at least one head and an even number of columns of at least 2, but has shape "
            f"{shown(in_layout(q.shape, layout))}"
        )
    for name in ("q_nope", "v"):
        if given[name].shape[3] < 1:
            raise ValueError(f"{name} must have at least one column, but has 0")
    check_options(tensors, options)
    len_k = k.shape[2]
    if len_q > len_k and tensors.kv_lens is None and max_seqlen_k is None:
        _check_more_queries(q, k, options.causal, layout, ("q_rope", "k_rope"))
    rows = len_k if max_seqlen_k is None else max_seqlen_k
    return check_tables(cos, sin, q.dtype, q.shape[0], rows, rotary_dim, rotary_dim, "q_rope", "k_rope")


# The sizes of the five tensors of multi-head latent attention, as (B, H, N, columns).
LATENT_FORMS: dict[str, tuple[str, str, str, str]] = {
    "q_rope": ("B", "H", "NQ", "R"),
    "q_nope": ("B", "H", "NQ", "DN"),
    "k_rope": ("B", "1", "NK", "R"),
    "k_nope": ("B", "H", "NK", "DN"),
    "v": ("B", "H", "NK", "DV"),
}


def _latent_form(name: str, layout: str) -> str:
    axes = in_layout(LATENT_FORMS[name], layout)
    if layout == "thd":
        axes = ({"NQ": "T_q", "NK": "T_k"}[axes[0]], *axes[1:])
    return f"({', '.join(axes)})"


def check_latent_forms(layout: str, **tensors: Any) -> None:
    """Check that the five tensors of multi-head latent attention are tensors with the layout's number of axes."""
    check_kinds(**tensors)
    for name, x in tensors.items():
        if x.ndim != (3 if layout == "thd" else 4):
            form = _latent_form(name, layout)
            raise ValueError(f"{name} must have shape {form}, but has {x.ndim} dimensions: {shown(x.shape)}")


def _check_more_queries(q: Tensor, k: Tensor, causal: bool, layout: str, names: tuple[str, str] = ("q", "k")) -> None:
    """Refuse more queries than keys if the call is not causal; if it is, warn once that the first ones see no key.

    With fewer key heads than query heads, tensors in the wrong layout look like this. names: of q and k, for messages.
    """
    of_q, of_k = names
    other = "bshd" if layout == "bhsd" else "bhsd"
    len_q, len_k = q.shape[2], k.shape[2]
    if not causal:
        raise ValueError(
            f"{of_q} must have at most {of_k}'s {len_k} positions where causal is False, but has {len_q}: queries are "
            "aligned with the end of the keys, and the first ones would have negative positions; did you mean "
            f"layout={other!r}?"
        )
    if not torch.compiler.is_compiling():
        shapes = [shown(in_layout(x.shape, layout)) for x in (q, k)]
        warn_once(
            "more queries than keys",
            f"{of_q} {shapes[0]} has {len_q} positions and {of_k} {shapes[1]} has {len_k} in layout {layout!r}: "
            f"queries are aligned with the end of the keys, so that the first {len_q - len_k} rows see no key and give "
            f"zeros; did you mean layout={other!r}?",
        )


def check_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Check the arguments that only `rope_attention_varlen` has. Values of cu_seqlens on a GPU are not read."""
    if not are_ordinary(q, k, v):
        check_kinds(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            form = "(T_q, HQ, D)" if name == "q" else "(T_k, HKV, D)"
            raise ValueError(f"{name} must have shape {form}, but has {x.ndim} dimensions: {shown(x.shape)}")
    check_sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def check_sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    names: tuple[str, str] = ("q", "k"),
) -> None:
    """Check the bounds of packed sequences of tokens, q and k (T, H, D). names: of q and k, for messages."""
    of_q, of_k = names
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x, (torch.int32,), q.device, "shape (sequences + 1,)", (None,))
        if x.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences + 1,), but has {shown(x.shape)}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, but has stride {x.stride()[0]}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape {shown(cu_seqlens_q.shape)}, but has "
            f"{shown(cu_seqlens_k.shape)}"
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if check_int(name, value) < 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")
    check_ends("cu_seqlens_q", cu_seqlens_q, q.shape[0], of_q)
    ends = check_ends("cu_seqlens_k", cu_seqlens_k, k.shape[0], of_k)
    longest = 0 if ends is None else max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
    if longest > max_seqlen_k:
        raise ValueError(
            f"max_seqlen_k must be at least the longest sequence of {of_k}, {longest}, but is {max_seqlen_k}"
        )


def check_token_tables(token_tables: bool, tensors: Tensors) -> None:
    """Check token_tables of `rope_attention_varlen` with its checked tensors."""
    check_bool("token_tables", token_tables)
    if not token_tables:
        return
    q, k, cos, cu_seqlens_q, cu_seqlens_k = (tensors[i] for i in (0, 1, 3, 8, 9))
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k must have q's {q.shape[2]} tokens with token_tables=True, but has {k.shape[2]}")
    if cos.shape[-2] != k.shape[2]:
        raise ValueError(
            f"cos must have a row for each of {k.shape[2]} tokens with token_tables=True, but has {cos.shape[-2]} rows"
        )
    on_cpu = cu_seqlens_q.device.type == "cpu" and is_plain(cu_seqlens_q, cu_seqlens_k)
    if on_cpu and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError("cu_seqlens_k must equal cu_seqlens_q with token_tables=True, but they differ")


def check_position_ids(position_ids: Tensor, max_sequences: int | None) -> None:
    """Check the arguments of `cu_seqlens_from_position_ids`."""
    check_kinds(position_ids=position_ids)
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"position_ids must be int32 or int64, but is {named(position_ids.dtype)}")
    if position_ids.device.type == "meta" and max_sequences is None:
        raise NotImplementedError(
            "max_sequences must be given for position_ids on the device meta, which have no data to count sequences in"
        )
    if position_ids.ndim not in (1, 2):
        raise ValueError(f"position_ids must have shape (N,) or (B, N), but has {shown(position_ids.shape)}")
    if max_sequences is not None:
        if check_int("max_sequences", max_sequences, "an int or None") < 1:
            raise ValueError(f"max_sequences must be 1 or more, but is {max_sequences}")
