"""Put fastattn's modules into an existing model."""

import functools

from torch import nn
from torch.nn.utils import parametrize

from fastattn.nn.multihead_attention import MultiheadAttention, keep_own_forward


def replace_attention(model: nn.Module) -> int:
    r"""Swap each ``torch.nn.MultiheadAttention`` in ``model`` for fastattn's, in place.

    The module objects stay and only change their class, so everything that hangs on them stays as well:
    the very same parameters (optimizers go on), ``out_proj``, hooks, parametrizations, ``training``,
    ``requires_grad``, extra attributes, references held elsewhere. ``model`` may itself be the attention.

    A subclass is swapped if it inherits ``forward`` unchanged; the result is an instance of both classes. A
    module with a ``forward`` of its own, by its class or by assignment, is left alone, because that
    ``forward`` is what its author wants to run. A second call finds nothing to do.

    Returns:
        The number of modules that were swapped. A module that occurs at several places counts once.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> import torch, fastattn
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 3)
        >>> fastattn.replace_attention(model)
        3
        >>> type(model.layers[0].self_attn)
        <class 'fastattn.nn.multihead_attention.MultiheadAttention'>
        >>> fastattn.replace_attention(model)
        0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    return sum(_swap(module) for module in list(model.modules()))


def _swap(module):
    cls = parametrize.type_before_parametrizations(module)
    if not issubclass(cls, nn.MultiheadAttention) or issubclass(cls, MultiheadAttention):
        return False
    if cls.forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        return False
    swapped = MultiheadAttention if cls is nn.MultiheadAttention else _with_our_forward(cls)
    if parametrize.is_parametrized(module):
        # torch keeps the properties of a parametrized module in a class made for it, whose only base is the
        # class to return to when the parametrization is removed.
        made = type(module)
        namespace = {k: v for k, v in vars(made).items() if k not in ("__dict__", "__weakref__")}
        swapped = type(made)(made.__name__, (swapped,), namespace)
    module.__class__ = swapped
    keep_own_forward(module)
    return True


@functools.cache
def _with_our_forward(cls):
    """``cls``, except that the ``forward`` it inherits is fastattn's."""

    def reduce(self, protocol):
        # A class made at run time cannot be pickled by name, the class it was made from can.
        _, _, *state = super(swapped, self).__reduce_ex__(protocol)
        return (_new_with_our_forward, (cls,), *state)

    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": reduce}
    swapped = type(cls)(cls.__name__, (cls, MultiheadAttention), namespace)
    return swapped


def _new_with_our_forward(cls):
    swapped = _with_our_forward(cls)
    return swapped.__new__(swapped)
