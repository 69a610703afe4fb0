"""Every refusal of the public functions, as typed errors raised before anything is written, launched or allocated.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong shape, range, device or combination. `planning` refuses
calls that a backend cannot serve. The happy path runs once per call on the host, so it only reads and compares
attributes, and builds a message only after it has found a fault.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.attention.problem import Tensors, check_options
from fused_rope_attn.runtime import checks
from fused_rope_attn.runtime.layouts import AXES
from fused_rope_attn.runtime.registration import is_plain

ATTENTION = checks.Forms(q="B HQ NQ D", k="B HKV NK D", v="B HKV NK D")
LATENT = checks.Forms(q_rope="B H NQ R", q_nope="B H NQ DN", k_rope="B 1 NK R", k_nope="B H NK DN", v="B H NK DV")
_ENDS, _IDS = checks.Form("sequences+1", torch.int32), checks.Form("N | B N", torch.int32, torch.int64)


def check_attention(
    tensors: Tensors,
    options: Any,
    layout: str = "bhsd",
    longest: tuple[Any, Any] | None = None,
    rows: int | None = None,
    latent: bool = False,
    token_tables: Any = False,
) -> int:
    """Check a call of attention as its caller gave it, and return the rotary dim R, 0 without tables.

    tensors, options: ``Tensors`` in the caller's layout, and ``Options``. longest: max_seqlen_q and max_seqlen_k of
    packed sequences. rows: that the tables need, if not NK or max_seqlen_k. latent: it is multi-head latent attention,
    where q_rope and k_rope are q and k. token_tables: of ``rope_attention_varlen``.

    Raise TypeError or ValueError with the argument, the expectation and the given value.
    """
    q, k, v, cos, sin = tensors[:5]
    names, rotary_dim = ("q", "k"), options.rotary_dim
    if not latent:
        batch, heads_q, len_q, head_dim, heads_kv, len_k = ATTENTION.check(layout, (q, k, v))
        checks.check_heads(heads_q, heads_kv, head_dim)
    else:
        given = (q, tensors.q_nope, k, tensors.k_nope, v)
        batch, heads_q, len_q, head_dim, nope_dim, len_k, value_dim = LATENT.check(layout, given)
        checks.check_columns("q_rope", heads_q, head_dim)
        for name, columns in (("q_nope", nope_dim), ("v", value_dim)):
            if columns < 1:
                raise ValueError(f"{name} must have at least one column, but has 0")
        names, rotary_dim = ("q_rope", "k_rope"), head_dim
    if rows is None:
        rows = len_k if longest is None else check_sequences(tensors, longest, names)
        if longest is None and len_q > len_k and tensors.kv_lens is None and (options.causal or cos is not None):
            _check_more_queries(q, k, options.causal, layout, names)
    check_options(tensors, options, (batch, heads_q, len_k, head_dim))
    if not latent and checks.lacks_tables(cos, sin, rotary_dim, options.interleaved):
        if token_tables is not False:
            raise ValueError(f"token_tables must be False where cos and sin are None, but is {token_tables!r}")
        return 0
    rotary_dim = checks.check_tables(cos, sin, q, batch, rows, head_dim, rotary_dim, *names)
    if token_tables is not False:
        _check_token_tables(token_tables, tensors)
    return rotary_dim


def _check_more_queries(q: Tensor, k: Tensor, causal: bool, layout: str, names: tuple[str, str]) -> None:
    """Refuse more queries than keys if the call is not causal; if it is, warn once that the first ones see no key.

    With fewer key heads than query heads, tensors in the wrong layout look like this. names: of q and k, for messages.
    """
    (of_q, of_k), axis = names, AXES[layout].index(2)
    len_q, len_k, other = q.shape[axis], k.shape[axis], "bshd" if layout == "bhsd" else "bhsd"
    why, hint = "queries are aligned with the end of the keys", f"did you mean layout={other!r}?"
    if not causal:
        raise ValueError(
            f"{of_q} must have at most {of_k}'s {len_k} positions where causal is False, but has {len_q}: {why}, and "
            f"the first ones would have negative positions; {hint}"
        )
    if not torch.compiler.is_compiling():
        checks.warn_once(
            "more queries than keys",
            f"{of_q} {checks.shown(q.shape)} has {len_q} positions and {of_k} {checks.shown(k.shape)} has {len_k} in "
            f"layout {layout!r}: {why}, so that the first {len_q - len_k} rows see no key and give zeros; {hint}",
        )


def check_sequences(tensors: Tensors, longest: tuple[Any, Any], names: tuple[str, str]) -> Any:
    """Check the bounds of packed sequences of tokens (T, H, D), and return the rows that tables need.

    Values of cu_seqlens on a GPU are not read. names: of q and k, for messages.
    """
    (of_q, of_k), (q, k, *_) = names, tensors
    ends = (("cu_seqlens_q", tensors.cu_seqlens_q), ("cu_seqlens_k", tensors.cu_seqlens_k))
    for name, x in ends:
        _ENDS.check(name, x, of_q, q, {})
        if x.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences+1,), but has {checks.shown(x.shape)}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, but has stride {x.stride()[0]}")
    (_, ends_q), (_, ends_k) = ends
    if ends_k.shape != ends_q.shape:
        shapes = f"{checks.shown(ends_q.shape)}, but has {checks.shown(ends_k.shape)}"
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape {shapes}")
    for name, value in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        if checks.check_int(name, value) < 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")
    checks.check_ends("cu_seqlens_q", ends_q, q.shape[0], of_q)
    found = checks.check_ends("cu_seqlens_k", ends_k, k.shape[0], of_k)
    most = 0 if found is None else max((end - begin for begin, end in itertools.pairwise(found)), default=0)
    if most > longest[1]:
        raise ValueError(f"max_seqlen_k must be at least the longest sequence of {of_k}, {most}, but is {longest[1]}")
    return longest[1]


def _check_token_tables(token_tables: bool, tensors: Tensors) -> None:
    """Check tables with a row for each of a call's tokens, (T, H, D)."""
    checks.check_bool("token_tables", token_tables)
    rows_q, rows_k, rows = tensors.q.shape[0], tensors.k.shape[0], tensors.cos.shape[-2]
    cu_seqlens_q, cu_seqlens_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if rows_q != rows_k:
        raise ValueError(f"k must have q's {rows_q} tokens with token_tables=True, but has {rows_k}")
    if rows != rows_k:
        raise ValueError(f"cos must have a row for each of {rows_k} tokens with token_tables=True, but has {rows} rows")
    on_cpu = cu_seqlens_q.device.type == "cpu" and is_plain(cu_seqlens_q, cu_seqlens_k)
    if on_cpu and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError("cu_seqlens_k must equal cu_seqlens_q with token_tables=True, but they differ")


def check_position_ids(position_ids: Tensor, max_sequences: int | None) -> None:
    """Check the arguments of `cu_seqlens_from_position_ids`."""
    _IDS.check("position_ids", position_ids, "position_ids", position_ids, {})
    if position_ids.device.type == "meta" and max_sequences is None:
        raise NotImplementedError(
            "max_sequences must be given for position_ids on the device meta, which have no data to count sequences in"
        )
    if max_sequences is not None:
        if checks.check_int("max_sequences", max_sequences, "an int or None") < 1:
            raise ValueError(f"max_sequences must be 1 or more, but is {max_sequences}")
