"""Every refusal of the public functions, as typed errors raised before anything is written, launched or allocated.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong shape, range, device or combination. What a backend
cannot serve is planning's to refuse, not this file's. The happy path runs once per call on the host: it reads
attributes and compares them, and builds a message only once it has found the fault.
"""

import math
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "STRATEGIES",
    "check_attention",
    "check_kvcache",
    "check_packed",
    "check_position_ids",
    "check_rotation",
]

BACKENDS = ("auto", "reference", "triton", "hopper")
STRATEGIES = ("auto", "inline", "prepass")
# Of the rotation alone: which axis of a tensor is B, H, N and D; packed tokens have no batch.
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "thd": (None, 1, 0, 2)}

# float64 is for the reference (gradcheck, tolerances); planning refuses it for the kernels.
_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    causal: bool,
    *,
    softmax_scale: float | None,
    rotary_dim: int | None,
    interleaved: bool,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    kv_starts: Tensor | None,
    kv_lens: Tensor | None,
    return_lse: bool,
    deterministic: bool,
    backend: str,
    strategy: str,
    max_seqlen_k: int | None = None,
) -> int:
    """Check the arguments of `rope_attention` as its caller gave them, and return the rotary dim R.

    max_seqlen_k: of packed sequences, which `check_packed` has seen: the table rows that they need.

    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    # Types first: everything below reads attributes of tensors.
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and isinstance(cos, Tensor)
        and isinstance(sin, Tensor)
    ):
        _refuse_non_tensor(q=q, k=k, v=v, cos=cos, sin=sin)
    if not (
        isinstance(causal, bool)
        and isinstance(interleaved, bool)
        and isinstance(return_lse, bool)
        and isinstance(deterministic, bool)
    ):
        _refuse_non_bool(causal=causal, interleaved=interleaved, return_lse=return_lse, deterministic=deterministic)

    dtype, device = q.dtype, q.device
    if dtype not in _INPUT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, but is {_name(dtype)}")
    if k.dtype != dtype or v.dtype != dtype:
        _refuse_dtype(dtype, k=k, v=v)
    if k.device != device or v.device != device or cos.device != device or sin.device != device:
        _refuse_device(device, k=k, v=v, cos=cos, sin=sin)

    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        _refuse_rank("(B, HKV, NK, D)", q=q, k=k, v=v)
    batch, heads_q, len_q, head_dim = q_shape
    batch_k, heads_kv, len_k, head_dim_k = k_shape
    if batch_k != batch or head_dim_k != head_dim or v_shape != k_shape or heads_kv < 1 or heads_q % heads_kv:
        _refuse_shapes(q_shape, k_shape, v_shape)
    if heads_q < 1 or head_dim < 2 or head_dim % 2:
        _refuse_heads(q_shape)
    if len_q > len_k and not causal and kv_lens is None and max_seqlen_k is None:
        raise ValueError(
            f"q must have at most k's {len_k} positions where causal is False, but has {len_q}: queries are aligned "
            "with the end of the keys, and the first ones would have negative positions"
        )

    rows = len_k if max_seqlen_k is None else max_seqlen_k
    rotary_dim = _check_tables(cos, sin, dtype, batch, rows, head_dim, rotary_dim, "q", "k")

    _check_scales(softmax_scale, softcap)
    if window is not None:
        _check_window(window)
    if sinks is not None:
        _check_sinks(sinks, dtype, device, heads_q)
    if kv_starts is not None:
        _check_bounds("kv_starts", kv_starts, device, batch)
    if kv_lens is not None:
        _check_bounds("kv_lens", kv_lens, device, batch)
    if backend not in BACKENDS:
        _refuse_choice("backend", backend, BACKENDS)
    if strategy not in STRATEGIES:
        _refuse_choice("strategy", strategy, STRATEGIES)
    return rotary_dim


def check_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    cache_seqlens: Tensor,
    cache_is_rotated: bool,
    causal: bool,
    softmax_scale: float | None,
    rotary_dim: int | None,
    interleaved: bool,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
) -> int:
    """Check the arguments of `rope_attention_with_kvcache` as its caller gave them, and return the rotary dim R.

    What `cache_seqlens` holds stays on the device. Raises TypeError or ValueError.
    """
    append = k is not None or v is not None
    if append and (k is None or v is None):
        given, lacking = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{lacking} must be given where {given} is: both are appended, or neither")
    if not (
        isinstance(q, Tensor)
        and isinstance(k_cache, Tensor)
        and isinstance(v_cache, Tensor)
        and isinstance(cos, Tensor)
        and isinstance(sin, Tensor)
        and isinstance(cache_seqlens, Tensor)
        and (not append or (isinstance(k, Tensor) and isinstance(v, Tensor)))
    ):
        new = {"k": k, "v": v} if append else {}
        _refuse_non_tensor(
            q=q, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin, cache_seqlens=cache_seqlens, **new
        )  # fmt: skip
    if not (
        isinstance(cache_is_rotated, bool)
        and isinstance(causal, bool)
        and isinstance(interleaved, bool)
        and isinstance(return_lse, bool)
    ):
        _refuse_non_bool(
            cache_is_rotated=cache_is_rotated, causal=causal, interleaved=interleaved, return_lse=return_lse
        )
    dtype, device = q.dtype, q.device
    if dtype not in _INPUT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, but is {_name(dtype)}")
    if k_cache.dtype != dtype or v_cache.dtype != dtype:
        _refuse_dtype(dtype, k_cache=k_cache, v_cache=v_cache)
    if k_cache.device != device or v_cache.device != device or cos.device != device or sin.device != device:
        _refuse_device(device, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin)

    q_shape, cache_shape = q.shape, k_cache.shape
    if len(q_shape) != 4 or len(cache_shape) != 4 or v_cache.ndim != 4:
        _refuse_rank("(B, HKV, S_max, D)", q=q, k_cache=k_cache, v_cache=v_cache)
    batch, heads_q, len_q, head_dim = q_shape
    batch_k, heads_kv, capacity, head_dim_k = cache_shape
    if batch_k != batch or head_dim_k != head_dim or v_cache.shape != cache_shape or heads_kv < 1 or heads_q % heads_kv:
        _refuse_shapes(q_shape, cache_shape, v_cache.shape, "_cache")
    if heads_q < 1 or head_dim < 2 or head_dim % 2:
        _refuse_heads(q_shape)
    if append:
        _check_new_tokens(k, v, k_cache, v_cache, (batch, heads_kv, len_q, head_dim))
    _check_bounds("cache_seqlens", cache_seqlens, device, batch)
    rotary_dim = _check_tables(cos, sin, dtype, batch, capacity, head_dim, rotary_dim, "q", "k_cache")
    _check_scales(softmax_scale, softcap)
    if window is not None:
        _check_window(window)
    if sinks is not None:
        _check_sinks(sinks, dtype, device, heads_q)
    if torch.is_grad_enabled():
        inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "sinks": sinks}
        for name, x in inputs.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} must not require a gradient: the generation step has none; call it under torch.no_grad() "
                    f"or pass {name}.detach()"
                )
    return rotary_dim


def _check_new_tokens(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, shape: tuple[int, ...]) -> None:
    """`shape` (B, HKV, NQ, D) is what k and v must have to be appended."""
    if k.dtype != k_cache.dtype or v.dtype != k_cache.dtype:
        _refuse_dtype(k_cache.dtype, k=k, v=v)
    if k.device != k_cache.device or v.device != k_cache.device:
        _refuse_device(k_cache.device, k=k, v=v)
    if k.shape != shape or v.shape != shape:
        name, got = ("k", k.shape) if k.shape != shape else ("v", v.shape)
        raise ValueError(f"{name} must have shape (B, HKV, NQ, D) = {_shape(shape)}, but has {_shape(got)}")
    if shape[2] > k_cache.shape[2]:
        raise ValueError(f"k must have at most k_cache's S_max = {k_cache.shape[2]} positions, but has {shape[2]}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        strides = cache.stride()
        if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, cache.shape)):
            raise ValueError(
                f"{name} must not be expanded, since it is written: several elements share memory, strides {strides}"
            )


def check_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Check what `rope_attention_varlen` has and `rope_attention` has not; what cu_seqlens hold stays on the device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            _refuse_non_tensor(**{name: x})
        if x.ndim != 3:
            form = "(T_q, HQ, D)" if name == "q" else "(T_k, HKV, D)"
            raise ValueError(f"{name} must have shape {form}, but has {x.ndim} dimensions: {_shape(x.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            _refuse_non_tensor(**{name: x})
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, but is {_name(x.dtype)}")
        if x.device != q.device:
            _refuse_device(q.device, **{name: x})
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences + 1,), but has {_shape(x.shape)}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, but has stride {x.stride()[0]}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape {_shape(cu_seqlens_q.shape)}, but has "
            f"{_shape(cu_seqlens_k.shape)}"
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, but is {_kind(value)}")
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")


def check_position_ids(position_ids: Tensor, max_sequences: int | None) -> None:
    """Check the arguments of `cu_seqlens_from_position_ids`."""
    if not isinstance(position_ids, Tensor):
        _refuse_non_tensor(position_ids=position_ids)
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"position_ids must be int32 or int64, but is {_name(position_ids.dtype)}")
    if position_ids.ndim not in (1, 2):
        raise ValueError(f"position_ids must have shape (N,) or (B, N), but has {_shape(position_ids.shape)}")
    if max_sequences is not None:
        if not isinstance(max_sequences, (int, torch.SymInt)) or isinstance(max_sequences, bool):
            raise TypeError(f"max_sequences must be an int or None, but is {_kind(max_sequences)}")
        if max_sequences < 1:
            raise ValueError(f"max_sequences must be 1 or more, but is {max_sequences}")


def check_rotation(
    xs: dict[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None,
    interleaved: bool,
    inverse: bool,
    layout: str,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    outs: dict[str, Any] | None,
) -> int:
    """Check the arguments of `apply_rope` and `apply_rope_qk`, tensors by their names, and return the rotary dim R.

    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor) and all(isinstance(x, Tensor) for x in xs.values())):
        _refuse_non_tensor(**xs, cos=cos, sin=sin)
    if not (isinstance(interleaved, bool) and isinstance(inverse, bool)):
        _refuse_non_bool(interleaved=interleaved, inverse=inverse)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        _refuse_choice("layout", layout, tuple(LAYOUTS))
    axis_b, axis_h, axis_n, axis_d = LAYOUTS[layout]
    first, *others = xs
    x = xs[first]
    dtype, device, rank = x.dtype, x.device, 3 if axis_b is None else 4
    if dtype not in _INPUT_DTYPES:
        raise TypeError(f"{first} must be float16, bfloat16, float32 or float64, but is {_name(dtype)}")
    for name in others:
        if xs[name].dtype != dtype:
            raise TypeError(f"{name} must have {first}'s dtype {_name(dtype)}, but is {_name(xs[name].dtype)}")
    if cos.device != device or sin.device != device or any(xs[name].device != device for name in others):
        _refuse_device(device, first, **{name: xs[name] for name in others}, cos=cos, sin=sin)
    for name, y in xs.items():
        if y.ndim != rank:
            form = "(T, H, D)" if rank == 3 else f"({', '.join(layout.upper().replace('S', 'N'))})"
            raise ValueError(
                f"{name} must have shape {form} for layout {layout!r}, but has {y.ndim} dimensions: {_shape(y.shape)}"
            )
    batch, length, head_dim = 1 if axis_b is None else x.shape[axis_b], x.shape[axis_n], x.shape[axis_d]
    for name in others:
        shape = xs[name].shape
        if any(shape[axis] != x.shape[axis] for axis in range(rank) if axis != axis_h):
            raise ValueError(
                f"{name} must have {first}'s shape {_shape(x.shape)} apart from the heads, but has {_shape(shape)}"
            )
    if head_dim < 2:
        raise ValueError(f"{first} must have a head dim of at least 2, but has shape {_shape(x.shape)}")

    if position_ids is not None and cu_seqlens is not None:
        raise ValueError("position_ids must be None where cu_seqlens is given: both say where every token stands")
    sections = 1
    if position_ids is not None:
        sections = _check_position_ids(position_ids, device, batch, length, first)
    if cu_seqlens is not None:
        if layout != "thd":
            raise ValueError(f"cu_seqlens must be None unless layout is 'thd', but layout is {layout!r}")
        _check_cu_seqlens(cu_seqlens, device, first)
    elif layout == "thd" and position_ids is None:
        raise ValueError("cu_seqlens must be given for layout 'thd' (or position_ids), but is None")

    rows = length if position_ids is None and cu_seqlens is None else 0
    if sections == 1:
        rotary_dim = _check_tables(cos, sin, dtype, batch, rows, head_dim, rotary_dim, first, first)
    else:  # the tables serve one half of the rotary dims, which is rotated as if it were a head of its own
        if rotary_dim is not None:
            _check_rotary_dim(rotary_dim, head_dim)
            if rotary_dim % 4:
                raise ValueError(f"rotary_dim must be a multiple of 4 for two position ids, but is {rotary_dim}")
        half = None if rotary_dim is None else rotary_dim // 2
        rotary_dim = 2 * _check_tables(cos, sin, dtype, batch, rows, head_dim // 2, half, first, first)
    if outs is not None:
        _check_outs(xs, outs)
    return rotary_dim


def _check_position_ids(ids: Any, device: torch.device, batch: int, length: int, first: str) -> int:
    """1, or 2 where every token has two ids."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"position_ids must be a torch.Tensor or None, but is {_kind(ids)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"position_ids must be int32 or int64, but is {_name(ids.dtype)}")
    if ids.device != device:
        _refuse_device(device, first, position_ids=ids)
    shape = ids.shape
    one = len(shape) == 1 or (len(shape) == 2 and shape[0] in (1, batch))
    two = len(shape) == 3 and shape[0] in (1, batch) and shape[1] == 2
    if not (one or two) or shape[-1] != length:
        raise ValueError(
            "position_ids must have shape (N,), (B, N), or (B, 2, N) for two ids of every token, with B = 1 or "
            f"{batch} and N = {length}, but has {_shape(shape)}"
        )
    return 2 if two else 1


def _check_cu_seqlens(ends: Any, device: torch.device, first: str) -> None:
    if not isinstance(ends, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor or None, but is {_kind(ends)}")
    if ends.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, but is {_name(ends.dtype)}")
    if ends.device != device:
        _refuse_device(device, first, cu_seqlens=ends)
    if ends.ndim != 1 or ends.shape[0] < 1 or not ends.is_contiguous():
        raise ValueError(
            "cu_seqlens must be contiguous with shape (number of sequences + 1,), but has shape "
            f"{_shape(ends.shape)} and strides {tuple(ends.stride())}"
        )


def _check_outs(xs: dict[str, Tensor], outs: dict[str, Any]) -> None:
    for (name, x), (out_name, out) in zip(xs.items(), outs.items()):
        if not isinstance(out, Tensor):
            raise TypeError(f"{out_name} must be a torch.Tensor or None, but is {_kind(out)}")
        if out.dtype != x.dtype:
            raise TypeError(f"{out_name} must have {name}'s dtype {_name(x.dtype)}, but is {_name(out.dtype)}")
        if out.device != x.device:
            _refuse_device(x.device, name, **{out_name: out})
        if out.shape != x.shape:
            raise ValueError(f"{out_name} must have {name}'s shape {_shape(x.shape)}, but has {_shape(out.shape)}")
        if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
            raise ValueError(f"{out_name} must not be expanded: several elements share memory, strides {out.stride()}")
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            wanting = name if x.requires_grad else out_name
            raise ValueError(f"{out_name} must be None where {wanting} requires a gradient: there is none through out=")


def _check_rotary_dim(rotary_dim: Any, head_dim: int) -> None:
    if not isinstance(rotary_dim, (int, torch.SymInt)) or isinstance(rotary_dim, bool):
        raise TypeError(f"rotary_dim must be an int or None, but is {_kind(rotary_dim)}")
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be even and between 2 and D = {head_dim}, but is {rotary_dim}")


def _check_tables(
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    batch: int,
    length: int,
    head_dim: int,
    rotary_dim: int | None,
    first: str,
    last: str,
) -> int:
    """Check cos and sin against the inputs' dtype and sizes, and resolve the rotary dim from their width.

    `first` names the input whose dtype counts, `last` the one whose `length` positions need rows.
    """
    table_dtype, shape = cos.dtype, cos.shape
    if table_dtype not in (torch.float32, dtype):
        raise TypeError(f"cos must be float32 or have {first}'s dtype {_name(dtype)}, but is {_name(table_dtype)}")
    if sin.dtype != table_dtype:
        raise TypeError(f"sin must have cos's dtype {_name(table_dtype)}, but is {_name(sin.dtype)}")
    if cos.requires_grad or sin.requires_grad:
        name = "cos" if cos.requires_grad else "sin"
        raise ValueError(f"{name} must not require a gradient: tables have none; pass {name}.detach()")
    rank = len(shape)
    if rank not in (2, 3) or (rank == 3 and shape[0] not in (1, batch)):
        raise ValueError(
            f"cos must have shape (S, R/2) or (S, R), perhaps with a leading 1 or B = {batch}, but has {_shape(shape)}"
        )
    if sin.shape != shape:
        raise ValueError(f"sin must have cos's shape {_shape(shape)}, but has {_shape(sin.shape)}")
    if shape[-2] < length:
        raise ValueError(f"cos must have a row for each of {last}'s {length} positions, but has {shape[-2]} rows")

    width = shape[-1]
    if rotary_dim is None:
        if not 1 <= width <= head_dim:
            raise ValueError(f"cos must have between 1 and D = {head_dim} columns, but has {width}")
        rotary_dim = 2 * width if 2 * width <= head_dim else width
        if rotary_dim % 2:
            raise ValueError(
                f"cos with {width} columns is full-width for D = {head_dim}, and a full-width table must have an even "
                "number of columns"
            )
        return rotary_dim
    _check_rotary_dim(rotary_dim, head_dim)
    if width != rotary_dim and 2 * width != rotary_dim:
        raise ValueError(
            f"cos must have rotary_dim = {rotary_dim} or rotary_dim / 2 = {rotary_dim // 2} columns, but has {width}"
        )
    return rotary_dim


def _check_scales(softmax_scale: Any, softcap: Any) -> None:
    if softmax_scale is not None:
        if not _is_real(softmax_scale):
            raise TypeError(f"softmax_scale must be a float or None, but is {_kind(softmax_scale)}")
        if not math.isfinite(softmax_scale):
            raise ValueError(f"softmax_scale must be finite, but is {softmax_scale}")
    if softcap != 0.0 or not _is_real(softcap):
        if not _is_real(softcap):
            raise TypeError(f"softcap must be a float, but is {_kind(softcap)}")
        if not (math.isfinite(softcap) and softcap > 0.0):
            raise ValueError(f"softcap must be finite and positive, or 0.0 for none, but is {softcap}")


def _check_window(window: Any) -> None:
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window must be a tuple (left, right) or None, but is {_kind(window)}")
    if len(window) != 2:
        raise ValueError(f"window must have two elements (left, right), but has {len(window)}")
    for bound in window:
        if not isinstance(bound, (int, torch.SymInt)) or isinstance(bound, bool):
            raise TypeError(f"window must hold two ints, but holds {_kind(bound)}")
        if bound < -1:
            raise ValueError(f"window must hold sizes of 0 or more, or -1 for unbounded, but is {tuple(window)}")


def _check_sinks(sinks: Any, dtype: torch.dtype, device: torch.device, heads_q: int) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a torch.Tensor or None, but is {_kind(sinks)}")
    if sinks.dtype not in (torch.float32, dtype):
        raise TypeError(f"sinks must be float32 or have q's dtype {_name(dtype)}, but is {_name(sinks.dtype)}")
    if sinks.device != device:
        _refuse_device(device, sinks=sinks)
    if sinks.ndim != 1 or sinks.shape[0] != heads_q:
        raise ValueError(f"sinks must have shape (HQ,) = ({heads_q},), but has {_shape(sinks.shape)}")


def _check_bounds(name: str, bounds: Any, device: torch.device, batch: int) -> None:
    if not isinstance(bounds, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, but is {_kind(bounds)}")
    if bounds.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, but is {_name(bounds.dtype)}")
    if bounds.device != device:
        _refuse_device(device, **{name: bounds})
    if bounds.ndim != 1 or bounds.shape[0] != batch:
        raise ValueError(f"{name} must have shape (B,) = ({batch},), but has {_shape(bounds.shape)}")


def _refuse_non_tensor(**arguments: Any) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if not isinstance(value, Tensor))
    raise TypeError(f"{name} must be a torch.Tensor, but is {_kind(value)}")


def _refuse_non_bool(**arguments: Any) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if not isinstance(value, bool))
    raise TypeError(f"{name} must be a bool, but is {_kind(value)}")


def _refuse_device(device: torch.device, first: str = "q", /, **arguments: Tensor) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if value.device != device)
    raise ValueError(f"{name} must be on {first}'s device {device}, but is on {value.device}")


def _refuse_dtype(dtype: torch.dtype, **arguments: Tensor) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if value.dtype != dtype)
    raise TypeError(f"{name} must have q's dtype {_name(dtype)}, but is {_name(value.dtype)}")


def _refuse_rank(keys: str, **arguments: Tensor) -> NoReturn:
    """`keys`: the shape that whatever is not q must have."""
    name, value = next((name, value) for name, value in arguments.items() if value.ndim != 4)
    form = "(B, HQ, NQ, D)" if name == "q" else keys
    raise ValueError(f"{name} must have shape {form}, but has {value.ndim} dimensions: {_shape(value.shape)}")


def _refuse_heads(q_shape) -> NoReturn:
    raise ValueError(
        f"q must have at least one head and an even head dim of at least 2, but has shape {_shape(q_shape)}"
    )


def _refuse_shapes(q: torch.Size, k: torch.Size, v: torch.Size, kind: str = "") -> NoReturn:
    """`kind` goes behind k and v: "_cache" for caches."""
    if k[0] != q[0]:
        raise ValueError(f"k{kind} must have q's batch size {q[0]}, but has {k[0]}")
    if k[3] != q[3]:
        raise ValueError(f"k{kind} must have q's head dim {q[3]}, but has {k[3]}")
    if v != k:
        raise ValueError(f"v{kind} must have k{kind}'s shape {_shape(k)}, but has {_shape(v)}")
    raise ValueError(f"k{kind} has {k[1]} heads, but q's {q[1]} heads must be a multiple of it")


def _refuse_choice(name: str, value: Any, choices: tuple[str, ...]) -> NoReturn:
    expected = " or ".join(", ".join(repr(choice) for choice in choices).rsplit(", ", 1))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, {expected}, but is {_kind(value)}")
    raise ValueError(f"{name} must be {expected}, but is {value!r}")


def _is_real(value: Any) -> bool:
    """A real number of Python or NumPy, or a traced one. A bool is not meant as one, and a tensor would need a sync."""
    return isinstance(value, (float, int, torch.SymFloat, torch.SymInt, Real)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: torch.Size) -> str:
    return str(tuple(shape))
