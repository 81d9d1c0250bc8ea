"""Softmax attention of Hugging Face transformers, by ``attn_implementation="fastattn"``."""

import functools
import inspect
import sys
import warnings
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fastattn.ops._common import is_watched
from fastattn.ops.attention import attention_with_weights, scaled_dot_product_attention

__all__ = [
    "GrowingCache",  # noqa: F822
    "attention_forward",
    "attention_mask",
    "convert",
    "implementations",
    "register",
    "unregister",
]

NAME = "fastattn"
# Before this release mask functions were called with other arguments.
OLDEST = (5, 12)


def __getattr__(name: str):
    if name == "GrowingCache":  # a subclass, which needs transformers to be imported
        from fastattn.integrations._transformers_cache import GrowingCache

        return GrowingCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    r"""Make ``attn_implementation="fastattn"`` known to transformers, for every model that is switchable.

    Registers :func:`attention_forward` and :func:`attention_mask`. The results are those of ``"eager"`` up to
    rounding, with two exceptions: a query that sees no key (a padded one) gives 0, where eager gives the mean
    of the values, and dropout draws another pattern. Calling it again changes nothing; :func:`unregister`
    takes it back.

    Models with attention code of their own accept the name as well, and go on as before:
    :func:`implementations` tells, and :func:`convert` warns.

    Raises:
        ImportError: transformers is missing, or older than 5.12.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import fastattn.integrations.transformers as integration
        >>> integration.register()
        >>> config = LlamaConfig(
        ...     vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="fastattn",
        ... )
        >>> model = LlamaForCausalLM(config)  # or from_pretrained(..., attn_implementation="fastattn")
        >>> model.set_attn_implementation("fastattn")  # a model that exists already
    """
    attention, mask = _interfaces()
    attention.register(NAME, attention_forward)
    mask.register(NAME, attention_mask)


def unregister() -> None:
    """Take :func:`register` back. Models that are set to "fastattn" raise transformers' KeyError from now on.

    Raises:
        ImportError: transformers is missing, or older than 5.12.
    """
    for interface in _interfaces():
        # There is no public way; entries of one instance only, which there are, cannot be seen by all models.
        interface._global_mapping.pop(NAME, None)


def convert(model: torch.nn.Module) -> int:
    r"""Register fastattn and set a model, or all models of transformers within a module, to it.

    Returns:
        The number of attention modules that run on fastattn from now on.

    Warns:
        UserWarning: some attention modules do not, since they have code of their own.

    Raises:
        ImportError: transformers is missing, or older than 5.12. TypeError: there is no model of
        transformers.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> import fastattn.integrations.transformers as integration
        >>> integration.convert(GPT2Model(GPT2Config(vocab_size=100, n_embd=64, n_layer=3, n_head=4)))
        3
    """
    register()
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise TypeError(f"there is no model of transformers in this {type(model).__name__}")
    inner = {id(part) for whole in models for part in whole.modules() if part is not whole}
    for whole in models:
        if id(whole) not in inner:  # which its own models follow
            whole.set_attn_implementation(NAME)
    found = implementations(model)
    left = [name for name, implementation in found.items() if implementation != NAME]
    if left:
        classes = sorted({type(model.get_submodule(name)).__name__ for name in left})
        warnings.warn(
            f"{len(left)} of {len(found)} attention modules do not run on fastattn, because their code does "
            f"not use transformers' AttentionInterface: {', '.join(classes)}",
            stacklevel=2,
        )
    return len(found) - len(left)


def implementations(model: torch.nn.Module) -> dict[str, str | None]:
    r"""What computes each attention of a model, by the name of the module.

    That is the ``attn_implementation`` that the module's configuration is set to, or None where the module
    has code of its own, which the setting does not reach: transformers accepts it all the same. Attention
    modules are known by their classes' names, and by their code; those that only hold others do not count.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> import fastattn.integrations.transformers as integration
        >>> model = GPT2Model(GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4))
        >>> integration.implementations(model)
        {'h.0.attn': 'sdpa'}
    """
    modules = {name: m for name, m in model.named_modules() if "Attention" in type(m).__name__}
    parents = {name[:dot] for name in modules for dot in range(len(name)) if name[dot] == "."}
    if "" in modules and len(modules) > 1:
        parents.add("")
    return {
        name: _configured(model, name) if _uses_interface(type(module)) else None
        for name, module in modules.items()
        if name not in parents
    }


@functools.cache
def _uses_interface(attention_class: type) -> bool:
    functions = (f for base in attention_class.__mro__ for f in vars(base).values() if callable(f))
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in functions)
    return any(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def _configured(model: torch.nn.Module, name: str) -> str | None:
    """The implementation in the configuration of a module, or else of the one that holds it."""
    while True:
        config = getattr(model.get_submodule(name), "config", None)
        if (implementation := getattr(config, "_attn_implementation", None)) is not None or not name:
            return implementation
        name = name.rpartition(".")[0]


def _interfaces():
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"fastattn needs transformers {oldest} or later, found {transformers.__version__}")
    return transformers.AttentionInterface, transformers.AttentionMaskInterface


# Arguments that select keys in place of the mask. Ignoring them would compute something else.
_UNKNOWN_SELECTIONS = ("indices", "block_indices", "block_table", "head_mask", "layer_head_mask")


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers' models call.

    Args:
        module: the calling layer; its ``is_causal`` counts where the argument is None.
        query: (B, H, L, D). key, value: (B, Hkv, S, D), heads that are shared are not repeated.
        attention_mask: (B, 1 or H, L, S), boolean (True = attend) or added to the scores; what
            :func:`attention_mask` returned; or None: causal if ``is_causal`` and L > 1, else everything.
        dropout: probability of dropping a weight. scaling: factor of the scores.
        position_bias: (1 or B, H, L, S) added to the scores (T5). Has a gradient.
        softcap: bound of the scores (Gemma 2). s_aux: (H,) sinks (GPT-OSS). Has a gradient.
        output_attentions: also return the weights.
        kwargs: what other implementations need and the mask says already: ``sliding_window``, ...

    Returns:
        (B, L, H, D) contiguous, and the weights (B, H, L, S) after dropout, or None.

    Raises:
        NotImplementedError: the layer selects keys by an argument that is not known here.
    """
    for name in _UNKNOWN_SELECTIONS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attn_implementation='fastattn' does not support {name} of {type(module).__name__}; "
                "attn_implementation='eager' does"
            )
    options = {}
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A single query comes after all keys of the cache. (While torch.jit traces, sizes are tensors.)
        causal = bool(query.shape[2] > 1) and causal
    elif isinstance(attention_mask, _Band) and attention_mask.band is not None:
        band, attention_mask = attention_mask.band, None
        causal = band.right == 0
        options["key_padding_mask"] = band.padding
        options["window_size"] = (band.left, -1 if causal else band.right)
        options["causal_alignment"] = "lower_right" if band.lower_right else "upper_left"
    else:
        causal = False  # the mask has it
        if isinstance(attention_mask, _Band):
            attention_mask = attention_mask.write_out()
    if position_bias is not None:
        attention_mask = _with_bias(attention_mask, position_bias)
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    gqa = bool(query.shape[1] != key.shape[1])
    if output_attentions or _weights_are_collected():
        out, weights = attention_with_weights(
            query, key, value, attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling,
            enable_gqa=gqa, average_weights=False, **options,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), weights
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scaling, gqa, **options
    )
    return out.transpose(1, 2).contiguous(), None


def _weights_are_collected() -> bool:
    """Whether weights were asked for at the model, which not every model hands on to its layers."""
    collecting = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected = None if collecting is None or is_compiling() else collecting.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


class _BandForm(NamedTuple):
    """Keys from ``left`` before to ``right`` behind the diagonal (-1 = unlimited), of which ``padding``, (B,
    S), is True."""

    left: int
    right: int
    lower_right: bool
    padding: Tensor | None


class _Band(Tensor):
    """A mask (B, 1, L, S) that :func:`attention_forward` reads as a band and padded keys.

    Models pass masks on as they are; one that does something else with it finds the boolean tensor that it
    stands for, which is only written out then. Once somebody writes to that, or holds a part of it, which may
    be written to, it is what counts: ``band`` is None.
    """

    @staticmethod
    def __new__(cls, shape, device, band: _BandForm, write_out):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.band = band
        mask.write_out = functools.cache(write_out)
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        may_write = any(argument.alias_info is not None for argument in func._schema.arguments)

        def plain(x):
            if not isinstance(x, cls):
                return x
            if may_write:
                x.band = None
            return x.write_out()

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self):
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.band})"


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs,
) -> Tensor | None:
    """The mask function that goes with :func:`attention_forward`: the cheapest form of each mask.

    None where a single query sees everything; for masks that are causal, a window, padding, or nothing, a
    tensor that only says so, and becomes the boolean mask (batch_size, 1, q_length, kv_length) if anything
    but :func:`attention_forward` looks into it; for all other masks that boolean tensor.

    Raises:
        NotImplementedError: the model has code of its own in place of attention functions.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function

    def write_out():
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs,
        )  # fmt: skip

    def ask_transformers():
        # None leaves it to the layer whether it is causal. Where models do not support "sdpa", which depends
        # on that, layers need not know.
        skip = "config" not in kwargs or _layers_know_causality(kwargs["config"])
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip and skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and skip, **kwargs,
        )  # fmt: skip

    # While tracing, values decide nothing. Where skipping is not allowed, the mask will be worked on.
    if is_compiling() or is_watched() or not (allow_is_causal_skip or allow_is_bidirectional_skip):
        return ask_transformers()
    if "config" in kwargs:
        _check_switchable(type(kwargs["config"]))
    window = _window(mask_function)
    if window is None or (attention_mask is not None and not _can_be_read(attention_mask)):
        return ask_transformers()
    left, right = window
    first, L, S = int(q_offset) - kv_offset, q_length, kv_length  # of the queries among the keys
    # As far as they reach beyond all keys, limits are none.
    left = left if 0 <= left < first + L - 1 else -1
    right = right if 0 <= right < S - 1 - first else -1
    padding = _padding(attention_mask, kv_offset, S, first + L if right == 0 else S)
    if L == 1 and left < 0 and right < 0:
        return None if padding is None else padding[:, None, None]
    if first not in (0, S - L):
        return write_out()
    device = kwargs.get("device", "cpu") if padding is None else padding.device
    return _Band((batch_size, 1, L, S), device, _BandForm(left, right, first != 0, padding), write_out)


def _can_be_read(mask: Tensor) -> bool:
    return mask.dim() == 2 and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _padding(attention_mask: Tensor | None, offset: int, S: int, seen: int) -> Tensor | None:
    """Which of S keys from the offset on are no padding; None if all of the first ``seen`` are none."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, offset : offset + S]
    if padding.shape[1] >= min(seen, S) and padding[:, :seen].all():
        return None
    return torch.nn.functional.pad(padding, (0, S - padding.shape[1]))


def _window(mask_function) -> tuple[int, int] | None:
    """The (left, right) that a mask function keeps, or None if it is not known to be such a band."""
    from transformers import masking_utils as known

    if mask_function is known.causal_mask_function:
        return -1, 0
    if mask_function is known.bidirectional_mask_function:
        return -1, -1
    code, cells = getattr(mask_function, "__code__", None), getattr(mask_function, "__closure__", None)
    if code is None or cells is None:
        return None
    held = [cell.cell_contents for cell in cells]
    if code is known.sliding_window_overlay(1).__code__ and isinstance(held[0], int) and held[0] > 0:
        return held[0] - 1, -1
    if code is known.sliding_window_bidirectional_overlay(1).__code__ and isinstance(held[0], int):
        return held[0], held[0]
    if code is known.and_masks().__code__:
        windows = [_window(part) for part in held[0]]
        if None not in windows:
            return tuple(min((n for n in side if n >= 0), default=-1) for side in zip(*windows, strict=True))
    return None


@functools.cache
def _check_switchable(config_class: type) -> None:
    # A model that has its own branches for "sdpa" and "eager" takes any other name for eager, and would add
    # our boolean mask to its scores. Where a model consists of others, those have the attention.
    module = _modeling(config_class)
    own = any("Attention" in name for name, _ in _classes(module))
    if own and not config_class.sub_configs and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise NotImplementedError(
            f"attn_implementation='fastattn' cannot reach the attention of {module.__name__}, which does not "
            "use transformers' AttentionInterface"
        )


def _layers_know_causality(config) -> bool:
    # Gemma has an option that makes layers bidirectional, and masks that are causal in spite of it.
    return not getattr(config, "use_bidirectional_attention", None) and _supports_sdpa(type(config))


@torch.compiler.assume_constant_result
def _supports_sdpa(config_class: type) -> bool:
    return all(getattr(c, "_supports_sdpa", True) for _, c in _classes(_modeling(config_class)))


def _modeling(config_class: type) -> ModuleType | None:
    """The module with the models of a configuration, or of the one that it is derived from."""
    names = (c.__module__.replace(".configuration_", ".modeling_") for c in config_class.__mro__)
    return next((sys.modules[name] for name in names if ".modeling_" in name and name in sys.modules), None)


@functools.cache
def _classes(module: ModuleType | None) -> list[tuple[str, type]]:
    """Those that a module has code of."""
    members = inspect.getmembers(module, inspect.isclass)
    return [(name, c) for name, c in members if module and c.__module__ == module.__name__]
