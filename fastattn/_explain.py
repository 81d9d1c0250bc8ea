"""Says which implementation a call would use, without running it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """``impl`` is the implementation that would run; ``reasons`` maps each other one to why it would not."""

    operator: str
    impl: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.operator} runs on: {self.impl}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """Which implementation ``fn(*args, **kwargs)`` would run, and why each other one would not.

    The arguments are checked as by the call itself, and nothing is computed.

    Returns:
        An :class:`Explanation`: print it, or read ``.impl`` and ``.reasons``.

    Raises:
        TypeError: ``fn`` is not an operator of this package, or does not take these arguments.
        NotImplementedError: the arguments ask for an implementation that cannot run the call.

    Example:
        >>> q = torch.randn(1, 8, 128, 64)
        >>> print(fastattn.explain(fastattn.scaled_dot_product_attention, q, q, q, is_causal=True))
    """
    request_of = getattr(fn, "_choice", None)
    if request_of is None:
        raise TypeError(f"explain takes an operator of fastattn and its arguments, got {fn!r}")
    inspect.signature(fn).bind(*args, **kwargs)  # a TypeError that speaks of the operator's own arguments
    chosen, refused = request_of(*args, **kwargs)
    reasons = {
        name: reason
        or f"it can, but {chosen} was {'asked for' if kwargs.get('impl', 'auto') != 'auto' else 'preferred'}"
        for name, reason in refused.items()
        if name != chosen
    }
    return Explanation(fn.__name__, chosen, reasons)
