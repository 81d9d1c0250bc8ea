"""Attention under PyTorch's own machinery: compile, export, torch.func, opcheck, autocast, checkpointing."""

import itertools

import attention_cases
import operator_checks
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from operator_checks import check_compiled, check_compiled_of_parts, negated, require, with_each
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn.ops.attention import attention_with_weights

impl, poisoned = attention_cases.dispatched, operator_checks.poisoned

attend = fastattn.scaled_dot_product_attention


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def plain(query, key, value, impl):
    return (attend(query, key, value, is_causal=True, impl=impl),)


def with_options(query, key, value, attn_mask, padding, slopes, sinks, impl):
    return attend(
        query, key, value, attn_mask, key_padding_mask=padding, alibi_slopes=slopes, sinks=sinks, softcap=3.0,
        window_size=(9, 9), causal_alignment="lower_right", enable_gqa=True, return_lse=True, impl=impl,
    )  # fmt: skip


def with_dropout(query, key, value, impl):
    return (attend(query, key, value, dropout_p=0.3, impl=impl),)


def of_one_tensor(x, impl):
    return (attend(x, x, x, x.mean(-1, keepdim=True), is_causal=True, window_size=[9, 0], impl=impl),)


def with_weights(query, key, value, impl):
    return attention_with_weights(query, key, value, is_causal=True, impl=impl)


def three(*shape):
    return lambda L: [normal(*shape, L, 24, dtype=torch.float32) for _ in range(3)]


def optional(L):
    q, k, v = normal(2, 4, L, 24), normal(2, 2, L + 30, 24), normal(2, 2, L + 30, 18)
    padding = torch.rand(2, L + 30) < 0.7
    inputs = q, k, v, normal(1, 4, L, L + 30), padding, torch.rand(4), normal(4)
    return [t if t.dtype == torch.bool else t.float() for t in inputs]


COMPILED = {
    "plain": (plain, three(2, 4)),
    "3-D": (plain, three(4)),
    "5-D": (plain, three(2, 3, 4)),
    "options": (with_options, optional),
    "dropout": (with_dropout, three(2, 4)),
    "weights": (with_weights, three(2, 4)),
    "one tensor": (of_one_tensor, lambda L: three(2, 4)(L)[:1]),
}
# Tracing the reference takes seconds each time, so that its compilation is checked on one case.
CHOICES = [("cpu", name, None) for name in COMPILED]
CHOICES += [("cpu", "plain", True), ("cpu", "options", True), ("reference", "options", None)]


@pytest.mark.parametrize("impl, name, dynamic", CHOICES)
def test_compile_once_for_all_lengths(impl, name, dynamic):
    """fullgraph, with gradients, and for the main forms also without: three compilations at most."""
    require(impl)
    function, inputs = COMPILED[name]
    both = impl == "cpu" and name in ("plain", "options") and dynamic is None
    gradients = (False, True) if both else (True,)
    check_compiled(function, inputs, impl, dynamic=dynamic, gradients=gradients)


def test_compiled_gradients_of_tensors_put_together_from_parts():
    require("cpu")
    check_compiled_of_parts(with_options, optional(9), "cpu")


def test_compile_with_inductor():
    require("cpu")
    torch._dynamo.reset()
    for function, inputs in ((plain, three(2, 4)(9)), (with_options, optional(9))):
        compiled = torch.compile(function, fullgraph=True)
        results = []
        for run in (compiled, function):
            leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
            outputs = run(*leaves, "cpu")
            sum(t.sin().sum() for t in outputs).backward()
            results.append([*outputs, *(t.grad for t in leaves)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class Attend(torch.nn.Module):
    def forward(self, query, key, value):
        return attend(query, key, value, is_causal=True)


@pytest.mark.parametrize("strict", (False, True))
def test_export(strict):
    require("cpu")
    torch._dynamo.reset()
    length = torch.export.Dim("length", min=2, max=1000)
    exported = torch.export.export(
        Attend(), tuple(three(2, 4)(7)), dynamic_shapes=({2: length},) * 3, strict=strict
    )
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "fastattn.attention_forward.default" in targets
    inputs = three(2, 4)(13)
    torch.testing.assert_close(exported.module()(*inputs), attend(*inputs, is_causal=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_hold_the_operator():
    require("cpu")
    inputs = three(1, 2)(7)
    attend(*inputs)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q, k, v: attend(q, k, v))(*inputs).graph
    assert torch.ops.fastattn.attention_forward.default in [node.target for node in graph.nodes]
    traced = torch.jit.trace(lambda q, k, v: attend(q, k, v), inputs)
    longer = three(1, 2)(9)
    torch.testing.assert_close(traced(*longer), attend(*longer))


def test_profiler_sees_the_operator():
    require("cpu")
    inputs = three(1, 2)(7)
    attend(*inputs)
    with torch.profiler.profile() as profile:
        attend(*inputs)
    assert "fastattn::attention_forward" in [event.key for event in profile.key_averages()]


# torch.func


def tensors():
    """query, key, value, attn_mask, alibi_slopes, sinks."""
    shapes = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4), (2, 1, 5, 6), (4,), (4,)
    return [normal(*shape) for shape in shapes]


PADDING = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0]], dtype=torch.bool)


def everything(query, key, value, attn_mask, slopes, sinks, impl="cpu", padding=PADDING):
    return attend(
        query, key, value, attn_mask, alibi_slopes=slopes, sinks=sinks, key_padding_mask=padding, softcap=2.0,
        enable_gqa=True, return_lse=True, impl=impl,
    )  # fmt: skip


ALL = tuple(range(6))


def summed(*args, **options):
    return sum(t.sin().sum() for t in everything(*args, **options))


def test_func_grad_and_jacrev():
    require("cpu")
    inputs = tensors()
    for transform, function in ((torch.func.grad, summed), (torch.func.jacrev, everything)):
        mine, reference = (
            transform(lambda *a, f=function, i=impl: f(*a, impl=i), ALL)(*inputs)
            for impl in ("cpu", "reference")
        )
        torch.testing.assert_close(mine, reference)

    def second_order(query, impl):
        first = torch.func.grad(lambda q: summed(q, *inputs[1:], impl=impl))
        return torch.func.grad(lambda q: first(q).cos().sum())(query)

    torch.testing.assert_close(second_order(inputs[0], "cpu"), second_order(inputs[0], "reference"))
    hessian = torch.func.hessian(lambda q: summed(q, *inputs[1:], impl="reference"))(inputs[0])
    reverse = torch.func.jacrev(torch.func.jacrev(lambda q: summed(q, *inputs[1:])))(inputs[0])
    torch.testing.assert_close(reverse, hessian)


@pytest.mark.parametrize("padded", (False, True))
def test_vmap_over_every_combination(impl, padded):
    single, N = tensors(), 3
    many = [normal(N, *t.shape) for t in single]
    for mapped in itertools.product((False, True), repeat=6):
        if not any(mapped):
            continue
        args = [m if is_mapped else s for is_mapped, m, s in zip(mapped, many, single, strict=True)]
        padding = torch.stack([PADDING, ~PADDING, PADDING.roll(1, 1)]) if padded else PADDING
        dims = (*[0 if m else None for m in mapped], 0 if padded else None)
        outputs = torch.vmap(lambda *a: everything(*a[:6], padding=a[6], impl=impl), dims)(*args, padding)
        for n in range(N):
            one = [t[n] if m else t for t, m in zip(args, mapped, strict=True)]
            expected = everything(*one, padding=padding[n] if padded else padding, impl=impl)
            torch.testing.assert_close(tuple(o[n] for o in outputs), expected)


def test_vmap_in_and_out_of_gradients(impl):
    single, N = tensors(), 2
    many = [normal(N, *t.shape) for t in single]
    for mapped in ((0,), (1,), (3,), (4,), (5,), (0, 2, 4), ALL):
        args = [m if n in mapped else s for n, (m, s) in enumerate(zip(many, single, strict=True))]
        dims = tuple(0 if n in mapped else None for n in ALL)
        for wanted in ((0,), (3,), (4,), (5,), ALL):
            gradient = torch.func.grad(lambda *a: summed(*a, impl=impl), wanted)
            results = torch.vmap(gradient, dims)(*args)
            for n in range(N):
                expected = gradient(*[t[n] if d == 0 else t for t, d in zip(args, dims, strict=True)])
                torch.testing.assert_close(tuple(r[n] for r in results), expected)
    total = lambda *a: torch.vmap(lambda *b: everything(*b, impl=impl), 0)(*a)[0].sin().sum()  # noqa: E731
    each = [
        torch.func.grad(lambda *a: everything(*a, impl=impl)[0].sin().sum(), ALL)(*a)
        for a in zip(*many, strict=True)
    ]
    stacked = tuple(torch.stack(g) for g in zip(*each, strict=True))
    torch.testing.assert_close(torch.func.grad(total, ALL)(*many), stacked)


def test_vmap_of_dropout():
    """The randomness modes of vmap, on both implementations alike."""
    require("cpu")
    query, key = torch.zeros(3, 2, 2, 7, 4), torch.zeros(2, 2, 9, 4)
    value = torch.eye(9).expand(2, 2, 9, 9)

    def drop(query, impl):
        return attend(query, key, value, dropout_p=0.5, impl=impl)

    patterns = {}
    for randomness in ("same", "different"):
        for implementation in ("cpu", "reference"):
            torch.manual_seed(0)
            run = torch.vmap(lambda q, i=implementation: drop(q, i), randomness=randomness)
            patterns[implementation] = run(query) != 0
        assert torch.equal(patterns["cpu"], patterns["reference"])
        assert torch.equal(patterns["cpu"][0], patterns["cpu"][1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda q: drop(q, "cpu"))(query)
    torch.manual_seed(0)
    scaled = lambda q: (drop(q, "cpu") * q.sum()).sum()  # noqa: E731
    gradient = torch.vmap(torch.func.grad(scaled), randomness="same")(query)
    assert torch.equal(gradient[0], gradient[2])


def test_vectorized_jacobian(impl):
    """Batched gradients of torch.autograd, which map over the backward in a way of their own."""
    inputs = tuple(tensors())
    run = lambda *a: everything(*a, impl=impl)[0]  # noqa: E731
    looped = torch.autograd.functional.jacobian(run, inputs)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, inputs, vectorize=True), looped)


def test_forward_mode_is_refused_not_zero():
    require("cpu")
    q = normal(1, 2, 5, 4)
    for options in ({}, {"softcap": 1.0}):
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(lambda q, o=options: attend(q, q, q, **o), (q,), (q,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotImplementedError, match="jvp"):
                attend(dual, dual, dual, **options)
            with pytest.raises(NotImplementedError, match="jvp"):
                torch.ops.fastattn.attention_forward(q, dual, q, *[None] * 5, 1.0, 0.0, -1, -1, False, 0.0)
    _, tangent = torch.func.jvp(lambda q: attend(q, q, q, impl="reference"), (q,), (q,))
    assert (tangent != 0).all()


def test_forward_mode_is_refused_under_a_tracer():
    require("cpu")
    q = normal(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.linearize(lambda q: attend(q, q, q, softcap=1.0), q)


# Tensors that are more than memory on the CPU


@pytest.mark.parametrize("wanted", (False, True))
def test_pending_negation(impl, wanted):
    single = [t.float() for t in tensors()]
    for inputs in (single[:1] * 3, single[:4], single):
        rest = [None] * (6 - len(inputs))
        leaves = [t.clone().requires_grad_(wanted) for t in inputs]
        expected = everything(*leaves, *rest, impl, None)
        for args, _ in with_each(leaves, lambda t: negated(t.detach()).requires_grad_(wanted)):
            results = everything(*args, *rest, impl, None)
            torch.testing.assert_close(results, expected)
            if wanted:
                gradient = negated(torch.ones_like(results[0]))
                mine = torch.autograd.grad(results[0], args, gradient)
                theirs = torch.autograd.grad(expected[0], leaves, gradient, retain_graph=True)
                torch.testing.assert_close(mine, theirs)
    q = single[0]
    attend(q, q, q)
    for args, _ in with_each([q, q, q], negated):
        assert torch.equal(attend(*args, impl="auto"), attend(q, q, q))


def test_zeros_without_memory():
    require("cpu")
    q = normal(1, 2, 5, 4)
    for args, _ in with_each(
        [q, q, q, normal(5, 5)], lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)
    ):
        torch.testing.assert_close(attend(*args), attend(*[t + 0 for t in args]))


def test_subclasses_are_seen_wherever_they_are(impl):
    class Named(torch.Tensor):
        pass

    inputs = [normal(1, 2, 5, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4), normal(5, 5)]
    expected = attend(*inputs, impl=impl)
    for args, _ in with_each(inputs, lambda t: t.as_subclass(Named)):
        out = attend(*args, impl=impl)
        assert type(out) is Named and torch.equal(out.as_subclass(torch.Tensor), expected)
    attend(*inputs[:3])
    for args, _ in with_each(inputs[:3], lambda t: t.as_subclass(Named)):
        assert type(attend(*args)) is Named


def test_wrappers_are_not_looked_through():
    """A tensor without memory of its own beside plain ones: its class decides, nothing is read."""
    require("cpu")
    q, mask = normal(1, 2, 5, 4), normal(5, 5)
    for args, chosen in with_each([q, q, q, mask], lambda t: FakeTensorMode().from_tensor(t)):
        if len(chosen) == 1:
            with pytest.raises(Exception, match="Fake"):
                attend(*args)
        if len(chosen) == 1 and chosen[0] < 3:
            with pytest.raises(Exception, match="Fake"):
                attend(*args[:3])
    with FakeTensorMode():
        fake = torch.empty(1, 2, 5, 4)
        assert attend(fake, fake, fake, dropout_p=0.1).shape == (1, 2, 5, 4)


@pytest.mark.parametrize("options", (
    {}, {"is_causal": True}, {"softcap": 1.0, "dropout_p": 0.1, "return_lse": True},
), ids=str)  # fmt: skip
def test_meta_tensors(options):
    q = torch.empty(2, 3, 5, 8, device="meta", requires_grad=True)
    k, v = torch.empty(2, 3, 7, 8, device="meta"), torch.empty(2, 3, 7, 6, device="meta")
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            out = attend(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape == (2, 3, 5, 6) and out.device.type == "meta"
        out.sum().backward()
        assert q.grad.shape == q.shape


# Registration


@pytest.mark.parametrize("layout, gradients", (("contiguous", False), ("permuted", True)))
def test_opcheck(layout, gradients):
    require("cpu")
    ops = torch.ops.fastattn
    query, key, value, attn_mask, slopes, sinks = tensors()
    if layout == "permuted":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    options, more = (0.5, 0.0, -1, -1, False, 0.0), (0.5, 1.0, 2, 3, True, 0.3)
    seed = torch.tensor([3])
    out, lse = ops.attention_forward(query, key, value, attn_mask, PADDING, slopes, sinks, seed, *more)
    out, lse = out.detach(), lse.detach()
    floating = (query, key, value, attn_mask, slopes, sinks, normal(2, 4, 5, 4), normal(2, 4, 5), lse.clone())
    query, key, value, attn_mask, slopes, sinks, grad_out, grad_lse, given_lse = (
        t.requires_grad_(gradients) for t in floating
    )
    biases = (attn_mask, PADDING, slopes)
    samples = (
        (ops.attention_forward, (query, key, value, *[None] * 5, *options)),
        (ops.attention_forward, (query, key, value, *biases, sinks, seed, *more)),
        (
            ops.attention_backward,
            (grad_out, None, query, key, value, out, lse, *[None] * 5, *options, *[False] * 3),
        ),
        (
            ops.attention_backward,
            (grad_out, grad_lse, query, key, value, out, lse, *biases, sinks, seed, *more, *[True] * 3),
        ),
        (ops.attention_weights, (query, key, given_lse, *[None] * 5, *options, True)),
        (ops.attention_weights, (query, key, given_lse, *biases, sinks, seed, *more, False)),
        (ops.attention_forward_with_weights, (query, key, value, *[None] * 5, *options, True)),
        (ops.attention_forward_with_weights, (query, key, value, *biases, sinks, seed, *more, False)),
    )
    # The second order is the reference's, which takes many seconds to trace; it is checked by its values.
    untraced = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, args in samples:
        second_order = gradients and op is ops.attention_backward
        torch.library.opcheck(op.default, args, **({"test_utils": untraced} if second_order else {}))


def test_bare_operators_have_their_gradients():
    require("cpu")
    inputs = [t.requires_grad_() for t in tensors()]
    query, key, value, attn_mask, slopes, sinks = inputs
    scale = 3**-0.5
    outputs = torch.ops.fastattn.attention_forward(
        query, key, value, attn_mask, PADDING, slopes, sinks, None, scale, 2.0, -1, -1, False, 0.0
    )
    results = torch.autograd.grad(sum(t.sin().sum() for t in outputs), inputs)
    torch.testing.assert_close(results, torch.autograd.grad(summed(*inputs), inputs))


def test_operator_refuses_what_would_read_outside():
    """The ops trust nobody with memory: shapes and dtypes that do not fit raise."""
    require("cpu")
    q, k, v = normal(1, 2, 5, 3), normal(1, 2, 6, 3), normal(1, 2, 6, 4)
    options = (1.0, 0.0, -1, -1, False, 0.0)

    def forward(q=q, k=k, v=v, mask=None, padding=None, slopes=None, sinks=None, seed=None, options=options):
        return torch.ops.fastattn.attention_forward(q, k, v, mask, padding, slopes, sinks, seed, *options)

    forward()
    for wrong in (
        {"q": q[0]}, {"k": k[..., :2]}, {"v": v[:, :, :5]}, {"k": k[:, :1]}, {"v": v.float()},
        {"q": normal(1, 3, 5, 3)}, {"mask": normal(1, 2, 5, 7)}, {"mask": normal(5, 7)},
        {"mask": normal(2, 5, 6, 1)}, {"mask": normal(1, 1, 1, 5, 6)},
        {"mask": torch.ones(1, 1, 1, 1).long()},
        {"padding": torch.ones(1, 7).bool()}, {"padding": torch.ones(1, 6)}, {"slopes": torch.ones(2)},
        {"slopes": normal(3)}, {"sinks": normal(3)}, {"options": (1.0, 0.0, -1, -1, False, 0.5)},
        {"options": (1.0, 0.0, -5, -1, False, 0.0)}, {"options": (1.0, 0.0, -1, -1, False, 1.5)},
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            forward(**wrong)


def test_operator_takes_masks_of_fewer_dimensions():
    require("cpu")
    q, k, v = normal(2, 3, 5, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 4)
    options = (1.0, 0.0, -1, -1, False, 0.0)
    for shape in ((6,), (1, 6), (5, 6), (3, 5, 6), (1, 5, 1)):
        mask = normal(*shape).requires_grad_()
        results = []
        for given in (mask, mask.broadcast_to(2, 3, 5, 6)):
            out, _ = torch.ops.fastattn.attention_forward(q, k, v, given, *[None] * 4, *options)
            results.append((out, *torch.autograd.grad(out.sin().sum(), mask)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "dtype", (torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16), ids=str
)
def test_causality_of_masks(dtype):
    require("cpu")
    hidden = True if dtype == torch.bool else float("-inf")
    for shape in ((1, 1), (5, 5), (3, 7), (7, 3), (2, 40, 40), (2, 2, 4, 4)):
        causal = torch.full(shape, hidden, dtype=dtype).triu(1)
        assert torch.ops.fastattn.attention_causality(causal) == 2
        assert torch.ops.fastattn.attention_causality(causal.mT.contiguous().mT) == 2
        biased = causal.clone()
        biased[..., -1, 0] = 1
        assert torch.ops.fastattn.attention_causality(biased) == 1
        for value in () if dtype == torch.bool or shape[-1] == 1 else (0.0, float("inf"), float("nan"), -1.0):
            shown = causal.clone()
            shown[..., 0, -1] = value
            assert torch.ops.fastattn.attention_causality(shown) == 0
        if dtype != torch.bool:
            assert torch.ops.fastattn.attention_causality(causal.masked_fill(causal == 0, -0.0)) == 2


# Precision and memory modes


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(impl, dtype):
    inputs = [t.requires_grad_() for t in three(2, 4)(7)]
    attn_mask = torch.full((7, 7), torch.finfo(torch.float32).min).triu(1)
    for options in ({}, {"attn_mask": attn_mask}, {"sinks": torch.zeros(4), "return_lse": True}):
        with torch.autocast("cpu", dtype):
            out = attend(*inputs, impl=impl, **options)
            detached = attend(*[t.detach() for t in inputs], impl=impl, **options)
            assert attend(*[t.double() for t in inputs], impl=impl).dtype == torch.float64
        expected = attend(*[t.to(dtype) for t in inputs], impl=impl, **options)
        out, detached, expected = (t[0] if isinstance(t, tuple) else t for t in (out, detached, expected))
        assert out.dtype == detached.dtype == dtype
        assert torch.equal(out, expected) and torch.equal(out, detached)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        assert all(g.dtype == torch.float32 for g in gradients)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing_repeats_the_dropout(impl, use_reentrant):
    run = lambda q, k, v: attend(q, k, v, dropout_p=0.4, impl=impl)  # noqa: E731
    results = []
    for checkpointed in (True, False):
        torch.manual_seed(1)
        inputs = [t.requires_grad_() for t in three(2, 4)(7)]
        torch.manual_seed(3)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=use_reentrant)
        else:
            out = run(*inputs)
        torch.rand(7)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for repeated, once in zip(*results, strict=True):
        assert torch.equal(repeated, once)


def test_backward_twice_and_accumulation(impl):
    inputs = [t.requires_grad_() for t in three(2, 4)(7)]
    out = attend(*inputs, impl=impl)
    gradient = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
    out.backward(gradient, retain_graph=True)
    out.backward(gradient)
    for tensor, once in zip(inputs, first, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * once)


def test_one_tensor_as_query_key_and_value(impl):
    x = normal(1, 2, 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attend(x, x, x, is_causal=True, impl=impl), x, fast_mode=True)
