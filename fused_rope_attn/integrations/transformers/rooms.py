"""Room behind a DynamicLayer's tokens for those to come: a step writes its own tokens instead of copying all others.

``DynamicLayer.update`` concatenates, so that each step copies the whole cache. Here a layer's keys and values are the
first rows of tensors with some more, and most steps need but two new views of them.

Nothing that others can see is ever written. The rows behind a layer's tokens belong to that layer, for as long as its
keys and values are the very tensors that were put there last; each row is written once. A layer that was cropped,
reordered, copied or filled by others holds other tensors, and its tokens move to a new room: whatever somebody keeps,
of the layer or of its copies, stays as it is, as with concatenation.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Rows are added in steps of a fraction of those that there are: short caches stay small, and long ones are copied so
# rarely that it costs less than a hundredth of reading them.
_FEWEST, _MOST, _FRACTION = 16, 256, 8
# Layer to (weak references to the keys and values that it was given, their addresses and shape, and the shape and
# strides of their rooms). References do not suffice, because `keys.data = other` gives the same tensor other memory.
# The rooms themselves live as long as their views do: reset and offloaded caches give their memory back.
_rooms: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def room_for(layer: DynamicLayer, tokens: int) -> tuple[Tensor, Tensor]:
    """(keys, values) of a filled layer, (B, HKV, rows, D) each with room for ``tokens`` behind those that there are."""
    keys, values = layer.keys, layer.values
    room = _rooms.get(layer)
    if room is not None:
        keys_given, values_given, addresses, held, shape, strides = room
        fits = keys_given() is keys and values_given() is values and held[2] + tokens <= shape[2]
        fits = fits and keys.shape == held and keys.stride() == strides and keys.data_ptr() == addresses[0]
        fits = fits and values.shape == held and values.stride() == strides and values.data_ptr() == addresses[1]
        # Tensors of inference mode are read-only outside it.
        if fits and (torch.is_inference_mode_enabled() or not keys.is_inference()):
            return keys.as_strided(shape, strides), values.as_strided(shape, strides)
    length = keys.shape[2]
    rooms = new_room(keys, length + tokens), new_room(values, length + tokens)
    for room, held in zip(rooms, (keys, values)):
        first_rows(room, length).copy_(held)
    return rooms


def new_room(x: Tensor, rows: int) -> Tensor:
    """Contiguous (B, HKV, more than ``rows``, D), uninitialised, like x (B, HKV, any, D)."""
    batch, heads, _, head_dim = x.shape
    step = min(_MOST, max(_FEWEST, 1 << (rows // _FRACTION).bit_length()))
    return torch.empty((batch, heads, (rows // step + 1) * step, head_dim), dtype=x.dtype, device=x.device)


def first_rows(room: Tensor, length: int) -> Tensor:
    """(B, HKV, length, D) of a room. For the host cheaper than ``narrow``, whose view it is."""
    batch, heads, _, head_dim = room.shape
    return room.as_strided((batch, heads, length, head_dim), room.stride())


def settle(layer: DynamicLayer, keys: Tensor, values: Tensor, room: Tensor) -> None:
    """Make keys and values, which are the first rows of rooms like ``room``, what the layer holds."""
    layer.keys, layer.values = keys, values
    addresses = keys.data_ptr(), values.data_ptr()
    _rooms[layer] = (weakref.ref(keys), weakref.ref(values), addresses, keys.shape, room.shape, room.stride())


def begin(layer: DynamicLayer, keys: Tensor, values: Tensor, room: Tensor) -> None:
    """``settle`` of a layer that has held nothing yet, with what ``DynamicLayer.lazy_initialization`` notes."""
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    settle(layer, keys, values, room)
