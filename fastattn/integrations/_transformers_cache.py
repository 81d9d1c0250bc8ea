"""A cache for generation by transformers in which tokens stay where they are when new ones come."""

import functools

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _storage_Use_Count,
)
from torch.autograd import forward_ad
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

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if _is_recorded():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = _append(self.keys, key_states, self._max_length)
        self.values = _append(self.values, value_states, self._max_length)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if _is_recorded() or self.get_seq_length() == 0:
            return super().reorder_cache(beam_idx)
        self.keys = _select(self.keys, beam_idx, self._max_length)
        self.values = _select(self.values, beam_idx, self._max_length)


def _is_recorded() -> bool:
    """Whether something follows the tensors, to which one that is written to is not one that is new."""
    return (
        torch.is_grad_enabled()
        or is_compiling()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
    )


def _append(held: Tensor, new: Tensor, max_length: int) -> Tensor:
    if new.dim() != 4 or new.dtype != held.dtype or new.device != held.device:
        return torch.cat([held, new], -2)  # promotes the dtype, or refuses it
    B, H, more, D = new.shape
    length = held.shape[2] if held.dim() == 4 else 0
    if held.shape != (
        (B, H, length, D) if held.dim() == 4 else (0,)
    ):  # of nothing yet there are no dimensions
        return torch.cat([held, new], -2)
    room, end = held._base, length + more
    if room is None or not _goes_on(room, held, length, end):
        room = _make_room(new, B, end, max_length)
        if length > 0:
            room.narrow(2, 0, length).copy_(held)
    # Nobody else can see the places that are written to: for a backward, too, what was returned is unchanged.
    room.data.narrow(2, length, more).copy_(new)
    room.taken = end
    return room.narrow(2, 0, end)


def _goes_on(room: Tensor, held: Tensor, length: int, end: int) -> bool:
    """Whether these are the first tokens in a room for ``end``, and nobody sees what follows them there."""
    taken = getattr(room, "taken", None)
    if taken is None or room.dtype != held.dtype or held.stride() != room.stride() or held.storage_offset():
        return False
    B, H, places, D = room.shape
    return (
        end <= places
        and held.shape == (B, H, length, D)
        # Tokens that were cropped may still be somebody's. A storage alone has three uses: by the room, by
        # what is held, and by the object through which it is asked.
        and (taken == length or _storage_Use_Count(room.untyped_storage()._cdata) <= 3)
    )


def _select(held: Tensor, index: Tensor, max_length: int) -> Tensor:
    index, length = index.to(held.device), held.shape[2]
    room = _make_room(held, len(index), length, max_length)
    room.taken = length
    return torch.index_select(held, 0, index, out=room.narrow(2, 0, length))


@torch.inference_mode(False)  # of what is made within, not everything could be written to outside
def _make_room(like: Tensor, batch_size: int, length: int, max_length: int) -> Tensor:
    _, H, _, D = like.shape
    return like.new_empty(batch_size, H, max(max_length, length + length // 2), D)


class GrowingCache(DynamicCache):
    r"""transformers' ``DynamicCache`` without a copy of all keys and values for each token.

    Layers that attend to everything keep room for tokens to come, and for half as many as they have where it
    is used up; layers with a window, and those that are no attention, are transformers' own. Cropping, beams
    and what else can be done with a ``DynamicCache`` work as there, with any ``attn_implementation``, and
    give the same numbers. Memory is that of the tokens and at most half as much for those to come.

    Tensors that it has returned do not change when it is written to. Where gradients are recorded, and in
    compiled or traced code, it is a ``DynamicCache``.

    Args:
        config: the model's, as for ``DynamicCache``. None: all layers attend to everything.
        max_length: tokens that each sequence gets room for at once; the cache may still grow beyond them.

    Raises:
        ImportError: transformers is missing. ValueError: max_length is negative. TypeError: it is no integer,
        or config is no configuration.

    Example:
        >>> cache = integration.GrowingCache(model.config, max_length=len(prompt[0]) + 256)
        >>> model.generate(prompt, past_key_values=cache, max_new_tokens=256)
    """

    def __init__(self, config: PreTrainedConfig | None = None, max_length: int = 0):
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a model's configuration or None, got {type(config).__name__}")
        max_length = integer("max_length", max_length)
        super().__init__(config=config)
        layer = functools.partial(_GrowingLayer, max_length)
        self.layers = [layer() if type(of) is DynamicLayer else of for of in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = layer
