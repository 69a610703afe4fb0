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


def _check_more_queries(q: Tensor, k: Tensor, causal: bool, layout: str) -> None:
    """Refuse more queries than keys if the call is not causal; if it is, warn once that the first ones see no key.

    With fewer key heads than query heads, tensors in the wrong layout look like this.
    """
    other = "bshd" if layout == "bhsd" else "bhsd"
    len_q, len_k = q.shape[2], k.shape[2]
    if not causal:
        raise ValueError(
            f"q must have at most k's {len_k} positions where causal is False, but has {len_q}: queries are aligned "
            "with the end of the keys, and the first ones would have negative positions; did you mean "
            f"layout={other!r}?"
        )
    if not torch.compiler.is_compiling():
        shapes = [shown(in_layout(x.shape, layout)) for x in (q, k)]
        warn_once(
            "more queries than keys",
            f"q {shapes[0]} has {len_q} positions and k {shapes[1]} has {len_k} in layout {layout!r}: queries are "
            f"aligned with the end of the keys, so that the first {len_q - len_k} rows see no key and give zeros; did "
            f"you mean layout={other!r}?",
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
    check_ends("cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
    ends = check_ends("cu_seqlens_k", cu_seqlens_k, k.shape[0], "k")
    longest = 0 if ends is None else max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
    if longest > max_seqlen_k:
        raise ValueError(f"max_seqlen_k must be at least the longest sequence of k, {longest}, but is {max_seqlen_k}")


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
