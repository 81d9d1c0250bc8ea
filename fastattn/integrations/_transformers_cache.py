"""A cache for generation by transformers in which tokens stay where they are when new ones come."""

import functools

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from fastattn.ops._common import integer

__all__ = ["GrowingCache"]


class _GrowingLayer(DynamicLayer):
    """Keys and values are the first tokens in rooms for more.

    The base class may do with them what it wants to: tokens that are no longer the first in a room move into
    another one when the next come.
    """

    def __init__(self, max_length: int = 0):
        super().__init__()
        self._max_length = max_length
        self._rooms: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or is_compiling():  # a backward needs what was held, unchanged
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if torch.is_grad_enabled() or is_compiling() or self.get_seq_length() == 0:
            return super().reorder_cache(beam_idx)
        self.keys = self._select(0, self.keys, beam_idx)
        self.values = self._select(1, self.values, beam_idx)

    def _append(self, which: int, held: Tensor, new: Tensor) -> Tensor:
        B, H, more, D = new.shape
        length = held.shape[2] if held.dim() == 4 else 0  # of nothing there are no dimensions yet
        if length > 0 and (
            held.shape != (B, H, length, D) or held.dtype != new.dtype or held.device != new.device
        ):
            return torch.cat([held, new], -2)  # refuses it, or promotes the dtype
        room, end = self._rooms[which], length + more
        if room is None or not (
            room.shape == (B, H, max(end, room.shape[2]), D)
            and room.dtype == new.dtype
            and room.device == new.device
            and (length == 0 or (held._base is room and held.storage_offset() == 0))
            and not room.is_inference()  # of a copy, which could not always be written to
        ):
            room = self._make_room(which, new, B, end)
            if length > 0:
                room.narrow(2, 0, length).copy_(held)
        room.narrow(2, length, more).copy_(new)
        return room.narrow(2, 0, end)

    def _select(self, which: int, held: Tensor, index: Tensor) -> Tensor:
        index, length = index.to(held.device), held.shape[2]
        room = self._make_room(which, held, len(index), length)
        return torch.index_select(held, 0, index, out=room.narrow(2, 0, length))

    @torch.inference_mode(False)
    def _make_room(self, which: int, like: Tensor, batch_size: int, length: int) -> Tensor:
        _, H, _, D = like.shape
        room = like.new_empty(batch_size, H, max(self._max_length, length + length // 2), D)
        self._rooms[which] = room
        return room


class GrowingCache(DynamicCache):
    r"""transformers' ``DynamicCache`` without a copy of all keys and values for each token.

    Layers that attend to everything keep room for tokens to come, and for half as many as they have where it
    is used up; layers with a window, and those that are no attention, are transformers' own. Cropping, beams
    and what else can be done with a ``DynamicCache`` work as there, with any ``attn_implementation``, and
    give the same numbers. Memory is that of the tokens and at most half as much for those to come.

    Where gradients are recorded, and in compiled code, it is a ``DynamicCache``. Elsewhere tensors that it
    has returned are views of what it holds: tokens that come after a crop replace those that were cropped in
    them, too.

    Args:
        config: the model's, as for ``DynamicCache``. None: all layers attend to everything.
        max_length: tokens that each sequence gets room for at once; the cache may still grow beyond them.

    Raises:
        ImportError: transformers is missing. ValueError: max_length is negative. TypeError: it is no integer.

    Example:
        >>> cache = integration.GrowingCache(model.config, max_length=len(prompt[0]) + 256)
        >>> model.generate(prompt, past_key_values=cache, max_new_tokens=256)
    """

    def __init__(self, config: PreTrainedConfig | None = None, max_length: int = 0):
        max_length = integer("max_length", max_length)
        super().__init__(config=config)
        layer = functools.partial(_GrowingLayer, max_length)
        self.layers = [layer() if type(of) is DynamicLayer else of for of in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = layer
