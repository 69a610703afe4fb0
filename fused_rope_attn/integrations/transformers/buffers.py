"""Growing buffers for a DynamicLayer: a step writes its own tokens instead of copying all others.

``DynamicLayer.update`` concatenates, so each step copies the whole cache. Here a layer's keys and values are the first
rows of larger buffers, and most steps only make two new views.

No row is written after a tensor that shows it was handed out. A layer owns the rows after its tokens as long as its
keys and values are the tensors that it was given last, and each row is written once. A layer that was cropped,
reordered, copied or filled by other code holds other tensors, so its tokens move to new buffers. Tensors that a program
kept, of the layer or of its copies, therefore never change, just as with concatenation.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Buffers grow by an eighth: short caches stay small, and long ones are copied so rarely that all copies cost less than
# a hundredth of reading them.
_FEWEST, _MOST, _FRACTION = 16, 256, 8
# Layer to (weak references to its keys and values, their addresses and shape, the shape and strides of its buffers).
# References are not enough, because `keys.data = other` gives the same tensor other memory. The buffers live only as
# long as their views, so that reset and offloaded caches free their memory.
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def buffers_of(layer: DynamicLayer, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the buffers (keys, values) of a filled layer, (B, HKV, rows, D), with ``tokens`` free rows or more."""
    keys, values = layer.keys, layer.values
    known = _known.get(layer)
    if known is not None:
        keys_given, values_given, addresses, held, shape, strides = known
        fits = keys_given() is keys and values_given() is values and held[2] + tokens <= shape[2]
        fits = fits and keys.shape == held and keys.stride() == strides and keys.data_ptr() == addresses[0]
        fits = fits and values.shape == held and values.stride() == strides and values.data_ptr() == addresses[1]
        # Tensors of inference mode are read-only outside it.
        if fits and (torch.is_inference_mode_enabled() or not keys.is_inference()):
            return keys.as_strided(shape, strides), values.as_strided(shape, strides)
    length = keys.shape[2]
    buffers = new_buffer(keys, length + tokens), new_buffer(values, length + tokens)
    for buffer, held in zip(buffers, (keys, values)):
        first_rows(buffer, length).copy_(held)
    return buffers


def new_buffer(x: Tensor, rows: int) -> Tensor:
    """Return a contiguous, uninitialised (B, HKV, more than ``rows``, D) like x (B, HKV, any, D)."""
    batch, heads, _, head_dim = x.shape
    step = min(_MOST, max(_FEWEST, 1 << (rows // _FRACTION).bit_length()))
    return torch.empty((batch, heads, (rows // step + 1) * step, head_dim), dtype=x.dtype, device=x.device)


def first_rows(buffer: Tensor, length: int) -> Tensor:
    """Return the view (B, HKV, length, D) of a buffer. This is ``narrow``, but costs the host less."""
    batch, heads, _, head_dim = buffer.shape
    return buffer.as_strided((batch, heads, length, head_dim), buffer.stride())


def store(layer: DynamicLayer, keys: Tensor, values: Tensor, buffer: Tensor) -> None:
    """Give a layer new keys and values. Both are the first rows of buffers with the layout of ``buffer``."""
    layer.keys, layer.values = keys, values
    addresses = keys.data_ptr(), values.data_ptr()
    _known[layer] = (weakref.ref(keys), weakref.ref(values), addresses, keys.shape, buffer.shape, buffer.stride())


def begin(layer: DynamicLayer, keys: Tensor, values: Tensor, buffer: Tensor) -> None:
    """``store`` into an empty layer, and set the attributes that ``lazy_initialization`` sets (dtype up to 5.23)."""
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    store(layer, keys, values, buffer)
