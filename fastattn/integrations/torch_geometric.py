"""Run the layers of a torch_geometric model on fastattn's operators."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastattn import nn as layers
from fastattn.graph import Graph

__all__ = ["Conversion", "convert", "converted"]

_COUNTERPARTS = {
    "GCNConv": layers.GCNConv,
    "SAGEConv": layers.SAGEConv,
    "GINConv": layers.GINConv,
    "GATConv": layers.GATConv,
    "GATv2Conv": layers.GATv2Conv,
    "TransformerConv": layers.GraphTransformerConv,
    "GatedGraphConv": layers.GatedGraphConv,
}
# How many positional arguments follow edge_attr, of which return_attention_weights is the last.
_AFTER_EDGE_ATTR = {"GATConv": 2, "GATv2Conv": 1, "TransformerConv": 1}
_ONLY_SUMS = ("GCNConv", *_AFTER_EDGE_ATTR)
_SUMS = {"add": "SumAggregation", "sum": "SumAggregation"}
_REDUCES = _SUMS | {"mean": "MeanAggregation", "max": "MaxAggregation", "min": "MinAggregation"}

# What a layer computes is spread over these methods: with another one it would compute something else.
_METHODS = (
    "forward",
    "message",
    "aggregate",
    "message_and_aggregate",
    "update",
    "edge_update",
    "propagate",
    "edge_updater",
    "explain_message",
)
_HOOKS = tuple(
    f"_{stage}_forward_{kind}hooks"
    for stage in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_", "")
)


@dataclass
class Conversion:
    """What :func:`convert` did: ``replaced`` maps names of modules to their layer, ``left`` names of
    torch_geometric's layers that still run as before to the reason."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for what, layers_of in (("converted", self.replaced), ("left alone", self.left)):
            if layers_of or what == "converted":
                lines.append(f"{len(layers_of)} layer{'s' * (len(layers_of) != 1)} {what}")
            lines += [f"  {name}: {text}" for name, text in layers_of.items()]
        return "\n".join(lines)


def convert(model: nn.Module) -> Conversion:
    r"""Let the graph layers of a torch_geometric model run on fastattn's operators, in place.

    Converts ``GCNConv``, ``SAGEConv``, ``GINConv``, ``GATConv``, ``GATv2Conv``, ``TransformerConv`` and
    ``GatedGraphConv``. The module objects stay and only change their class, to one that is theirs and
    fastattn's at once: the very same parameters (optimizers go on), ``state_dict``, module hooks,
    ``training``, references held elsewhere and ``isinstance`` stay. The numbers stay too, up to rounding,
    except that dropout draws another pattern and that ties of a maximum give their whole gradient to the
    first edge rather than to all of them.

    The layers take what they took before: edges as a tensor or ``EdgeIndex``, a ``SparseTensor`` or
    torch.sparse matrix, pairs of features; and a :class:`fastattn.Graph`. Edges passed as the same object
    again are not sorted again.

    Left alone is a layer with methods of its own (``message``, ``forward``, ...), with hooks on message
    passing, in explain mode, parametrized itself, or with an option that fastattn does not have. A converted
    layer that gets such hooks or is explained later runs torch_geometric's code again for as long as that
    lasts; so does a call whose result fastattn does not have in that form: attention weights as a sparse
    matrix, or of ``TransformerConv`` before dropout.

    Returns:
        A :class:`Conversion`: print it, or read ``replaced`` and ``left``. Converted layers of an earlier
        call appear in neither.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``. ImportError: there is no torch_geometric.

    Example:
        >>> import torch_geometric.nn as pyg, fastattn.integrations.torch_geometric as integration
        >>> model = pyg.GAT(16, 32, num_layers=2, out_channels=7)
        >>> print(integration.convert(model))
        2 layers converted
          convs.0: GATConv
          convs.1: GATConv
    """
    report, _ = _convert(model)
    return report


@contextlib.contextmanager
def converted(model: nn.Module) -> Iterator[Conversion]:
    """:func:`convert` for the time of a ``with`` block; afterwards the layers it replaced are as before.

    Example:
        >>> with converted(model) as report:
        ...     out = model(x, edge_index)
    """
    report, modules = _convert(model)
    try:
        yield report
    finally:
        for module in modules:
            made = parametrize.type_before_parametrizations(module)
            if made is type(module):
                module.__class__ = made.__bases__[0]
            else:  # parametrized since, by a class that torch derived for this module alone
                type(module).__bases__ = made.__bases__[:1]
            vars(module).pop("_normalized", None)


def _convert(model: nn.Module) -> tuple[Conversion, list[nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    import torch_geometric.nn as pyg

    counterparts = {getattr(pyg, name) for name in _COUNTERPARTS}
    report, modules = Conversion(), []
    for name, module in model.named_modules():
        if not isinstance(module, pyg.MessagePassing) or isinstance(module, _Converted):
            continue
        name = name or "(model)"
        cls = parametrize.type_before_parametrizations(module)
        base = next((c for c in cls.__mro__ if c in counterparts), None)
        reason = _why_not(module, cls, base)
        if reason is not None:
            report.left[name] = f"{cls.__name__}: {reason}"
            continue
        module.__class__ = _converted_class(cls, base)
        report.replaced[name] = cls.__name__
        modules.append(module)
    return report, modules


def _why_not(module, cls: type, base: type | None) -> str | None:
    if base is None:
        return "fastattn has no layer of this kind"
    reason = _interrupted(module)
    if reason is not None:
        return reason
    if module.decomposed_layers != 1:
        return f"decomposed_layers={module.decomposed_layers}"
    own = [name for c in cls.__mro__[: cls.__mro__.index(base)] for name in _METHODS if _defines(c, name)]
    own += _assigned(module)
    if own:
        return f"it has its own {own[0]}()"
    if parametrize.is_parametrized(module):
        return "it is parametrized itself, not only a layer inside it"
    kind = base.__name__
    expected = _SUMS if kind in _ONLY_SUMS else _REDUCES
    found = type(module.aggr_module).__name__
    if not isinstance(module.aggr, str) or expected.get(module.aggr) != found:
        return f"aggr={module.aggr!r}"
    if module.flow != "source_to_target":
        return f"flow={module.flow!r}"
    node_dim = 0 if kind in _AFTER_EDGE_ATTR else -2
    if module.node_dim != node_dim:
        return f"node_dim={module.node_dim}"
    if getattr(module, "fill_value", None) == "mul":
        return "fill_value='mul'"
    return None


def _defines(cls: type, name: str) -> bool:
    method = vars(cls).get(name)
    # torch_geometric itself writes a propagate and an edge_updater into each class, from a template.
    made = name in ("propagate", "edge_updater") and getattr(method, "__module__", "").startswith(
        f"{cls.__module__}_{cls.__name__}"
    )
    return method is not None and not made


def _assigned(module) -> list[str]:
    """Methods put on the module itself; not the class's own, which explain mode leaves there when it ends."""
    attributes = vars(module)
    names = [name for name in _METHODS if name in attributes]
    generated = getattr(type(module), "_jinja_propagate", None)
    return [
        name
        for name in names
        if not (name == "propagate" and getattr(attributes[name], "__func__", None) is generated)
    ]


def _interrupted(module) -> str | None:
    """Why message passing must really happen, if somebody looks into it."""
    if module.explain:
        return "explain mode is on"
    for hooks in _HOOKS:
        if getattr(module, hooks):
            return f"it has hooks on {hooks[1 : hooks.index('_forward')]}()"
    return None


class _Converted:
    """Marks the classes that :func:`convert` makes."""


@functools.cache
def _converted_class(cls: type, base: type) -> type:
    """``cls``, except that its ``forward`` is that of fastattn's layer wherever that gives the same."""
    kind, ours = base.__name__, _COUNTERPARTS[base.__name__]
    attends = kind in _AFTER_EDGE_ATTR

    @functools.wraps(cls.forward)
    def forward(self, x, edge_index, *args, **kwargs):
        if (
            _interrupted(self) is not None
            or _assigned(self)
            or (attends and _needs_original(self, kind, edge_index, args, kwargs))
        ):
            return cls.forward(self, x, edge_index, *args, **kwargs)
        return ours.forward(self, x, edge_index, *args, **kwargs)

    def reset_parameters(self):
        cls.reset_parameters(self)
        vars(self).pop("_normalized", None)  # what GCNConv(cached=True) has kept

    def reduce(self, protocol):
        # A class made at run time cannot be pickled by name, the class it was made from can.
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return (_new_converted, (cls, base), *state)

    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
        "forward": forward,
        "reset_parameters": reset_parameters,
    }
    made = type(cls)(cls.__name__, (cls, ours, _Converted), namespace)
    return made


def _new_converted(cls, base):
    made = _converted_class(cls, base)
    return made.__new__(made)


def _needs_original(module, kind: str, edge_index, args: tuple, kwargs: dict) -> bool:
    """Calls of attention layers whose result fastattn's layer refuses, or has in another form."""
    edge_attr = kwargs.get("edge_attr", args[0] if args else None)
    if edge_attr is not None and module.lin_edge is None:
        return True  # torch_geometric ignores it, or adds it as it is
    position = _AFTER_EDGE_ATTR[kind]
    returned = kwargs.get("return_attention_weights", args[position] if len(args) > position else None)
    if kind == "TransformerConv":
        returned = isinstance(returned, bool)
        if returned and module.training and module.dropout > 0:
            return True
    matrix = not isinstance(edge_index, Graph) and not (
        isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    )
    return bool(returned) and matrix
