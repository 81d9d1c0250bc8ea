"""Linear attention under PyTorch's own machinery: compile, export, torch.func, opcheck, autocast."""

import itertools

import linear_attention_cases
import operator_checks
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from linear_attention_cases import require
from operator_checks import check_compiled, check_compiled_of_parts, negated, with_each
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn import LinearAttentionState

impl, poisoned = linear_attention_cases.dispatched, operator_checks.poisoned

attend, step = fastattn.linear_attention, fastattn.linear_attention_step


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def plain(query, key, value, impl):
    return (attend(query, key, value, is_causal=True, impl=impl),)


def with_options(query, key, value, decay, padding, kv, z, impl):
    out, state = attend(
        query, key, value, decay=decay, key_padding_mask=padding, initial_state=LinearAttentionState(kv, z),
        feature_map="exp", is_causal=True, return_state=True, impl=impl,
    )  # fmt: skip
    return out, *state


def with_packed(query, key, value, cu_seqlens, impl):
    out, state = attend(query, key, value, cu_seqlens=cu_seqlens, return_state=True, impl=impl)
    return out, *state


def with_callable(query, key, value, impl):
    return (attend(query, key, value, feature_map=lambda x: x.relu() + 0.1, impl=impl),)


def of_one_tensor(x, impl):
    return (attend(x, x, x, is_causal=True, decay=-x.mean(-1).square(), impl=impl),)


def with_steps(query, key, value, kv, z, impl):
    out, state = step(query, key, value, LinearAttentionState(kv, z), impl=impl)
    out, state = step(query, key, out, state, decay=query.mean((0, 2)).neg().exp().neg(), impl=impl)
    return out, *state


def three(L):
    return [normal(2, 4, L, 24, dtype=torch.float32) for _ in range(3)]


def optional(L):
    q, k, v = normal(2, 4, L, 24), normal(2, 2, L, 24), normal(2, 2, L, 18)
    inputs = q, k, v, -torch.rand(2, 4, L), torch.rand(2, L) < 0.7, normal(2, 4, 24, 18), torch.rand(2, 4, 24)
    return [t if t.dtype == torch.bool else t.float() for t in inputs]


def packed(L):
    cu_seqlens = torch.tensor([0, L // 3, L // 2, L], dtype=torch.int32)
    return [normal(L, 2, 8).float() for _ in range(3)] + [cu_seqlens]


def stepped(B):
    shapes = (B, 4, 24), (B, 4, 24), (B, 4, 24), (B, 4, 24, 24), (B, 4, 24)
    return [normal(*s).float().abs() for s in shapes]


COMPILED = {
    "plain": (plain, three),
    "options": (with_options, optional),
    "packed": (with_packed, packed),
    "callable": (with_callable, three),
    "steps": (with_steps, stepped),
    "one tensor": (of_one_tensor, lambda L: three(L)[:1]),
}
# Tracing the reference takes seconds each time, and each number of chunks is traced anew: one case.
CHOICES = [("cpu", name, None) for name in COMPILED]
CHOICES += [("cpu", "options", True), ("reference", "plain", None)]


@pytest.mark.parametrize("impl, name, dynamic", CHOICES)
def test_compile_once_for_all_lengths(impl, name, dynamic):
    """fullgraph, with gradients, and for the main forms also without: three compilations at most."""
    require(impl)
    function, inputs = COMPILED[name]
    sizes = (5, 8, 1, 33, 64) if impl == "cpu" else (5, 8)
    both = impl == "cpu" and name in ("options", "steps") and dynamic is None
    gradients = (False, True) if both else (True,)
    check_compiled(function, inputs, impl, dynamic=dynamic, sizes=sizes, gradients=gradients)


def test_compiled_gradients_of_tensors_put_together_from_parts():
    require("cpu")
    check_compiled_of_parts(with_options, optional(9), "cpu")


def test_compile_with_inductor():
    require("cpu")
    torch._dynamo.reset()
    for function, inputs in ((with_options, optional(9)), (with_steps, stepped(2))):
        compiled = torch.compile(function, fullgraph=True)
        results = []
        for run in (compiled, function):
            leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
            outputs = run(*leaves, "cpu")
            sum(t.sin().sum() for t in outputs).backward()
            results.append([*outputs, *(t.grad for t in leaves)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_compiled_steps_in_place(impl):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    @torch.no_grad()
    def generate(query, key, value, state):
        out, state = step(query, key, value, state, inplace=True, impl=impl)
        return out + 1, state

    q, k, v, kv, z = stepped(2)
    expected, after = step(q, k, v, LinearAttentionState(kv, z), impl=impl)
    state = LinearAttentionState(kv.clone(), z.clone())
    out, returned = generate(q, k, v, state)
    torch.testing.assert_close(out, expected + 1)
    torch.testing.assert_close(tuple(state), tuple(after))
    assert type(returned) is LinearAttentionState and torch.equal(returned.kv, state.kv)


class Attend(torch.nn.Module):
    def forward(self, query, key, value, state):
        return attend(query, key, value, is_causal=True, initial_state=state, return_state=True)


@pytest.mark.parametrize("strict", (False, True))
def test_export(strict):
    require("cpu")
    torch._dynamo.reset()
    length = torch.export.Dim("length", min=2, max=1000)
    state = LinearAttentionState.zeros(2, 4, 24, 24)
    shapes = (*[{2: length}] * 3, LinearAttentionState(None, None))
    exported = torch.export.export(Attend(), (*three(7), state), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "fastattn.linear_attention_forward.default" in targets
    inputs = three(13)
    results = exported.module()(*inputs, state)
    expected = attend(*inputs, is_causal=True, return_state=True)
    assert type(results[1]) is LinearAttentionState
    torch.testing.assert_close(results, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_hold_the_operator():
    require("cpu")
    inputs, tokens = three(7), stepped(2)
    run = lambda *t: step(*t[:3], LinearAttentionState(*t[3:]))  # noqa: E731
    step(*tokens[:3], LinearAttentionState(*tokens[3:]))
    for function, given, op in (
        (lambda q, k, v: attend(q, k, v), inputs, torch.ops.fastattn.linear_attention_forward.default),
        (run, tokens, torch.ops.fastattn.linear_attention_step.default),
    ):
        graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*given).graph
        assert op in [node.target for node in graph.nodes]
    traced = torch.jit.trace(lambda q, k, v: attend(q, k, v), inputs)
    longer = three(9)
    torch.testing.assert_close(traced(*longer), attend(*longer))


def test_profiler_sees_the_operator():
    require("cpu")
    tokens = stepped(2)
    state = LinearAttentionState(*tokens[3:])
    step(*tokens[:3], state)
    with torch.profiler.profile() as profile:
        attend(*three(7))
        step(*tokens[:3], state)
        step(*tokens[:3], state, inplace=True)
    seen = [event.key for event in profile.key_averages()]
    assert {f"fastattn::linear_attention_{op}" for op in ("forward", "step", "step_")} <= set(seen)


# torch.func


def tensors():
    """query, key, value, decay, initial kv, initial z."""
    shapes = (2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 4, 5), (2, 4, 3, 2), (2, 4, 3)
    query, key, value, decay, kv, z = (normal(*shape) for shape in shapes)
    return [query, key, value, -decay.abs(), kv, z.abs()]


PADDING = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool)


def everything(query, key, value, decay, kv, z, impl="cpu", padding=PADDING):
    out, state = attend(
        query, key, value, decay=decay, initial_state=LinearAttentionState(kv, z), key_padding_mask=padding,
        is_causal=True, return_state=True, impl=impl,
    )  # fmt: skip
    return out, *state


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
    many = [torch.stack([t * (n + 1) / 2 for n in range(N)]) for t in single]
    for mapped in itertools.product((False, True), repeat=6):
        if not any(mapped) and not padded:
            continue
        args = [m if is_mapped else s for is_mapped, m, s in zip(mapped, many, single, strict=True)]
        padding = torch.stack([PADDING, ~PADDING, PADDING.roll(1, 1)]) if padded else PADDING
        dims = (*[0 if m else None for m in mapped], 0 if padded else None)
        outputs = torch.vmap(lambda *a: everything(*a[:6], padding=a[6], impl=impl), dims)(*args, padding)
        for n in range(N):
            one = [t[n] if m else t for t, m in zip(args, mapped, strict=True)]
            expected = everything(*one, padding=padding[n] if padded else padding, impl=impl)
            torch.testing.assert_close(tuple(o[n] for o in outputs), expected)


def test_vmap_of_other_forms(impl):
    """Mapped dimensions anywhere; no normaliser, no state, decay per head; packed sequences; steps."""
    q, k, v = normal(2, 4, 5, 3, 6), normal(2, 2, 6, 5, 3), normal(6, 2, 2, 5, 3)
    decay = -normal(4, 6).abs()
    run = torch.vmap(
        lambda q, k, v, d: attend(q, k, v, decay=d, is_causal=True, normalize=False, impl=impl), (4, 2, 0, 1)
    )
    out = run(q, k, v, decay)
    for n in range(6):
        one = attend(
            q[..., n], k[:, :, n], v[n], decay=decay[:, n], is_causal=True, normalize=False, impl=impl
        )
        torch.testing.assert_close(out[n], one)

    q, k, cu_seqlens = normal(7, 3, 4, 3), normal(7, 2, 3), torch.tensor([0, 3, 3, 7])
    run = torch.vmap(lambda q, c: attend(q, k, k, cu_seqlens=c, return_state=True, impl=impl), (1, None))
    out, state = run(q, cu_seqlens)
    for n in range(3):
        expected, after = attend(q[:, n], k, k, cu_seqlens=cu_seqlens, return_state=True, impl=impl)
        torch.testing.assert_close(out[n], expected)
        torch.testing.assert_close(state.kv[n], after.kv)

    q, k, v, kv, z = (normal(3, *s) for s in ((2, 4, 3), (2, 2, 3), (2, 2, 5), (2, 4, 3, 5), (2, 4, 3)))
    take = lambda *a: step(*a[:3], LinearAttentionState(*a[3:]), impl=impl)  # noqa: E731
    out, state = torch.vmap(take)(q, k, v, kv, z)
    for n in range(3):
        torch.testing.assert_close((out[n], state.kv[n], state.z[n]), (lambda o, s: (o, *s))(*take(
            q[n], k[n], v[n], kv[n], z[n]
        )))  # fmt: skip


def test_vmap_of_steps_in_place(impl):
    q, k, v, kv, z = (normal(3, *s) for s in ((2, 4, 3), (2, 2, 3), (2, 2, 5), (2, 4, 3, 5), (2, 4, 3)))
    expected = torch.vmap(lambda *a: step(*a[:3], LinearAttentionState(*a[3:]), impl=impl))(q, k, v, kv, z)
    run = lambda *a: step(*a[:3], LinearAttentionState(*a[3:]), inplace=True, impl=impl)[0]  # noqa: E731
    torch.testing.assert_close(torch.vmap(run)(q, k, v, kv, z), expected[0])
    torch.testing.assert_close((kv, z), tuple(expected[1]))


def test_vmap_in_and_out_of_gradients(impl):
    single, N = tensors(), 2
    many = [torch.stack([t, t * 0.7]) for t in single]
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


def test_gradients_for_each_sample(impl):
    """The usual use: one set of weights, a batch of sequences, each with its own padding and gradient."""
    weight, x = normal(3, 12), normal(4, 5, 3)
    padding = torch.rand(4, 5) < 0.7

    def loss(weight, x, padding):
        q, k, v = (x @ weight).view(1, 5, 3, 4).permute(2, 0, 1, 3)[:, :, None]
        return attend(q, k, v, key_padding_mask=padding[None], impl=impl).square().sum()

    results = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weight, x, padding)
    for n in range(4):
        torch.testing.assert_close(results[n], torch.func.grad(loss)(weight, x[n], padding[n]))


def test_vectorized_jacobian(impl):
    """Batched gradients of torch.autograd, which map over the backward in a way of their own."""
    inputs = tuple(tensors())
    run = lambda *a: everything(*a, impl=impl)[0]  # noqa: E731
    looped = torch.autograd.functional.jacobian(run, inputs)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, inputs, vectorize=True), looped)


def test_forward_mode_is_refused_not_zero():
    require("cpu")
    q = normal(1, 2, 5, 4)
    state = LinearAttentionState.zeros(1, 2, 4, 4, dtype=torch.float64)
    one = lambda q: step(*[q[:, :, 0]] * 3, state)[0]  # noqa: E731
    for function in (lambda q: attend(q, q, q), one):
        function(q)
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(function, (q,), (q,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(forward_ad.make_dual(q, torch.ones_like(q)))
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.linearize(function, q)
    _, tangent = torch.func.jvp(lambda q: attend(q, q, q, is_causal=True, impl="reference"), (q,), (q,))
    assert (tangent != 0).all()


# Tensors that are more than memory on the CPU


def one_step(query, key, value, kv, z, decay, **options):
    out, state = step(query, key, value, LinearAttentionState(kv, z), decay=decay, **options)
    return out, *state


def step_tensors():
    return [normal(*s) for s in ((2, 4, 3), (2, 2, 3), (2, 2, 5), (2, 4, 3, 5), (2, 4, 3), (4,))]


def test_pending_negation(impl):
    inputs = tensors()
    for wanted in (False, True):
        leaves = [t.clone().requires_grad_(wanted) for t in inputs]
        expected = everything(*leaves, impl)
        for args, _ in with_each(leaves, lambda t, w=wanted: negated(t.detach()).requires_grad_(w)):
            results = everything(*args, impl)
            torch.testing.assert_close(results, expected)
            if wanted:
                gradient = negated(torch.ones_like(results[0]))
                mine = torch.autograd.grad(results[0], args, gradient)
                theirs = torch.autograd.grad(expected[0], leaves, gradient, retain_graph=True)
                torch.testing.assert_close(mine, theirs)
    inputs = step_tensors()
    expected = one_step(*inputs, impl=impl)
    for args, _ in with_each(inputs, negated):
        torch.testing.assert_close(one_step(*args, impl=impl), expected)
    query, key, value, kv, z = (t.detach() for t in inputs[:5])
    out, state = step(query, key, value, LinearAttentionState(kv, z), impl=impl)
    in_place = LinearAttentionState(torch._neg_view(-kv), torch._neg_view(-z))  # contiguous
    mine, _ = step(query, key, value, in_place, inplace=True, impl=impl)
    torch.testing.assert_close((mine, *in_place), (out, *state))


def test_zeros_without_memory():
    require("cpu")
    zeros = lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)  # noqa: E731
    for run, inputs in ((everything, tensors()), (one_step, step_tensors())):
        run(*inputs)
        for args, _ in with_each(inputs, zeros):
            torch.testing.assert_close(run(*args), run(*[t + 0 for t in args]))


def test_subclasses_are_seen_wherever_they_are(impl):
    class Named(torch.Tensor):
        pass

    for run, inputs in ((everything, tensors()), (one_step, step_tensors())):
        expected = run(*inputs, impl=impl)
        for args, _ in with_each(inputs, lambda t: t.as_subclass(Named)):
            out = run(*args, impl=impl)[0]
            assert type(out) is Named and torch.equal(out.as_subclass(torch.Tensor), expected[0])


def test_wrappers_are_not_looked_through():
    """A tensor without memory of its own beside plain ones: its class decides, nothing is read."""
    require("cpu")
    for run, inputs in ((everything, tensors()), (one_step, step_tensors())):
        run(*inputs)
        for args, chosen in with_each(inputs, lambda t: FakeTensorMode().from_tensor(t)):
            if len(chosen) == 1:
                with pytest.raises(Exception, match="Fake"):
                    run(*args)
    with FakeTensorMode():
        fake = torch.empty(1, 2, 5, 4)
        out, state = attend(fake, fake, fake, return_state=True)
        assert out.shape == (1, 2, 5, 4) and state.kv.shape == (1, 2, 4, 4)


def test_meta_tensors():
    q = torch.empty(2, 4, 5, 8, device="meta", requires_grad=True)
    k, v = torch.empty(2, 2, 5, 8, device="meta"), torch.empty(2, 2, 5, 6, device="meta")
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            out, state = attend(q, k, v, is_causal=True, return_state=True)
        assert out.shape == (2, 4, 5, 6) and out.is_meta and state.kv.shape == (2, 4, 8, 6)
        out.sum().backward()
        assert q.grad.shape == q.shape
        out, state = step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
        assert out.shape == (2, 4, 6) and state.z.is_meta


# Registration


@pytest.mark.parametrize("layout, gradients", (("contiguous", False), ("permuted", True)))
def test_opcheck(layout, gradients):
    require("cpu")
    ops = torch.ops.fastattn
    query, key, value, decay, kv, z = tensors()
    if layout == "permuted":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    options, more = ("elu", False, True, 1e-6, 1.0), ("exp", True, False, 0.5, 0.7)
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    out, den, *_ = ops.linear_attention_forward(query, key, value, *[None] * 5, *options, False)
    grad_out, grad_kv, grad_z = normal(2, 4, 5, 2), normal(2, 4, 3, 2), normal(2, 4, 3)
    saved = out.detach(), den.detach()
    more_out, more_den, *_ = ops.linear_attention_forward(
        query, key, value, decay, PADDING, None, kv, z, *more, True
    )
    more_saved = more_out.detach(), more_den.detach()
    floating = (query, key, value, decay, kv, z, grad_out, grad_kv, grad_z)
    query, key, value, decay, kv, z, grad_out, grad_kv, grad_z = (
        t.requires_grad_(gradients) for t in floating
    )
    q, k, v = query[:1], key[:1], value[:1]
    token = (query[:, :, 0].detach(), key[:, :, 0].detach(), value[:, :, 0].detach())
    given = [
        t.clone().requires_grad_(gradients)
        for t in (*token, kv.detach(), z.detach(), decay.detach()[0, :, 0])
    ]
    plain_step = ("elu", True, 1e-6, 1.0)
    samples = (
        (ops.linear_attention_forward, (query, key, value, *[None] * 5, *options, False)),
        (ops.linear_attention_forward, (query, key, value, decay, PADDING, None, kv, z, *more, True)),
        (ops.linear_attention_forward, (q, k, v, None, None, cu_seqlens, None, None, *options, True)),
        (
            ops.linear_attention_backward,
            (grad_out, None, None, query, key, value, *saved, *[None] * 5, *options, False, False),
        ),
        (
            ops.linear_attention_backward,
            (
                grad_out, grad_kv, grad_z, query, key, value, *more_saved, decay, PADDING, None, kv, z, *more,
                True, True,
            ),
        ),
        (ops.linear_attention_step, (*given[:5], None, *plain_step)),
        (ops.linear_attention_step, (*given, *plain_step)),
        (ops.linear_attention_step_, (*[t.detach() for t in given], *plain_step)),
    )  # fmt: skip
    # The second order is the reference's, which takes many seconds to trace; it is checked by its values.
    untraced = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, args in samples:
        second_order = gradients and op is ops.linear_attention_backward
        torch.library.opcheck(op.default, args, **({"test_utils": untraced} if second_order else {}))


def test_bare_operators_have_their_gradients():
    require("cpu")
    inputs = [t.requires_grad_() for t in tensors()]
    query, key, value, decay, kv, z = inputs
    out, _, final_kv, final_z = torch.ops.fastattn.linear_attention_forward(
        query, key, value, decay, PADDING, None, kv, z, "elu", True, True, 1e-6, 1.0, True
    )
    results = torch.autograd.grad(sum(t.sin().sum() for t in (out, final_kv, final_z)), inputs)
    torch.testing.assert_close(results, torch.autograd.grad(summed(*inputs), inputs))
    inputs = [t.requires_grad_() for t in step_tensors()]
    outputs = torch.ops.fastattn.linear_attention_step(*inputs, "elu", True, 1e-6, 1.0)
    results = torch.autograd.grad(sum(t.sin().sum() for t in outputs), inputs)
    expected = torch.autograd.grad(sum(t.sin().sum() for t in one_step(*inputs, impl="reference")), inputs)
    torch.testing.assert_close(results, expected)
    with pytest.raises(RuntimeError, match="overwrite"):
        torch.ops.fastattn.linear_attention_step_(*inputs, "elu", True, 1e-6, 1.0)


def test_operator_refuses_what_would_read_outside():
    """The ops trust nobody with memory: shapes and dtypes that do not fit raise."""
    require("cpu")
    q, k, v = normal(1, 4, 5, 3), normal(1, 2, 5, 3), normal(1, 2, 5, 4)
    state = {"kv": normal(1, 4, 3, 4), "z": normal(1, 4, 3)}
    causal, everyone = ("elu", True, True, 1e-6, 1.0, True), ("elu", False, True, 1e-6, 1.0, True)

    def forward(q=q, k=k, v=v, decay=None, padding=None, cu=None, kv=None, z=None, options=causal):
        return torch.ops.fastattn.linear_attention_forward(q, k, v, decay, padding, cu, kv, z, *options)

    forward(decay=normal(1, 4, 5), padding=torch.ones(1, 5).bool(), **state)
    for wrong in (
        {"q": q[0]}, {"k": k[..., :2]}, {"v": v[:, :, :4]}, {"k": k[:, :1]}, {"v": v.float()},
        {"q": normal(1, 3, 5, 3)}, {"q": q[:, :, :4]}, {"decay": normal(5)}, {"decay": normal(1, 4, 6)},
        {"decay": torch.ones(4).long()}, {"decay": normal(4), "options": everyone},
        {"padding": torch.ones(1, 6).bool()}, {"padding": torch.ones(1, 5)},
        {"kv": state["kv"]}, {"z": state["z"]}, {"kv": state["kv"][..., :3], "z": state["z"]},
        {"kv": state["kv"], "z": state["z"][..., :2]}, {"kv": state["kv"].float(), "z": state["z"].float()},
        {"cu": torch.tensor([0, 6])}, {"cu": torch.tensor([1, 5])}, {"cu": torch.tensor([0, 4, 3, 5])},
        {"cu": torch.tensor([0.0, 5.0])}, {"cu": torch.tensor([[0, 5]])}, {"cu": torch.zeros(0).long()},
        {"cu": torch.tensor([0, 2, 5]), **state}, {"options": ("silu", *causal[1:])},
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            forward(**wrong)

    inputs = dict(zip(("q", "k", "v", "kv", "z", "decay"), step_tensors(), strict=True))
    for op in (torch.ops.fastattn.linear_attention_step, torch.ops.fastattn.linear_attention_step_):
        op(*inputs.values(), "elu", True, 1e-6, 1.0)
        for wrong in (
            {"q": normal(2, 4, 4)}, {"q": normal(2, 3, 3)}, {"k": normal(1, 2, 3)}, {"v": normal(2, 4, 5)},
            {"kv": normal(2, 4, 3, 4)}, {"kv": normal(2, 4, 3, 5).float()}, {"z": normal(2, 4, 2)},
            {"z": normal(2, 2, 3)}, {"decay": normal(3)}, {"q": normal(4, 3)}, {"v": normal(2, 2, 5).float()},
            {"decay": torch.ones(4).int()},
        ):  # fmt: skip
            with pytest.raises(RuntimeError):
                op(*(inputs | wrong).values(), "elu", True, 1e-6, 1.0)


# Precision and memory modes


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(impl, dtype):
    inputs = [t.requires_grad_() for t in three(7)]
    state = LinearAttentionState.zeros(2, 4, 24, 24)
    options = {"is_causal": True, "decay": -torch.rand(4), "initial_state": state, "impl": impl}
    with torch.autocast("cpu", dtype):
        out = attend(*inputs, **options)
        detached = attend(*[t.detach() for t in inputs], **options)
        assert attend(*[t.double() for t in inputs], impl=impl).dtype == torch.float64
        mapped = attend(*inputs, feature_map=torch.nn.Linear(24, 5), impl=impl)
        one, after = step(*[t[:, :, 0].detach() for t in inputs], state, impl=impl)
    expected = attend(*[t.to(dtype) for t in inputs], **options)
    assert out.dtype == detached.dtype == mapped.dtype == one.dtype == dtype
    assert after.kv.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(out, detached)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    assert all(g.dtype == torch.float32 for g in gradients)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing(impl, use_reentrant):
    run = lambda q, k, v: attend(q, k, v, is_causal=True, impl=impl)  # noqa: E731
    given, results = three(7), []
    for checkpointed in (True, False):
        inputs = [t.clone().requires_grad_() for t in given]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=use_reentrant)
        else:
            out = run(*inputs)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for repeated, once in zip(*results, strict=True):
        assert torch.equal(repeated, once)


def test_backward_twice_and_accumulation(impl):
    inputs = [t.requires_grad_() for t in three(7)]
    out = attend(*inputs, is_causal=True, impl=impl)
    gradient = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
    out.backward(gradient, retain_graph=True)
    out.backward(gradient)
    for tensor, once in zip(inputs, first, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * once)


def test_one_tensor_as_query_key_and_value(impl):
    x = normal(1, 2, 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attend(x, x, x, is_causal=True, impl=impl), x, fast_mode=True)
