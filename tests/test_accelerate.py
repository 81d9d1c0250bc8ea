"""accelerate(): PyTorch's function runs on fastattn inside a block, with PyTorch's results and errors."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import _accelerate


@pytest.fixture
def taken(monkeypatch):
    """The calls that fastattn took over."""
    calls = []

    def counting(*args, **kwargs):
        calls.append((args, kwargs))
        return fastattn.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(_accelerate, "scaled_dot_product_attention", counting)
    return calls


@pytest.fixture
def calls(taken, monkeypatch):
    """The same, where no call is too small."""
    monkeypatch.setattr(_accelerate, "is_worthwhile", lambda *size: True)
    return taken


def inputs(L=7, S=7, H=4, Hkv=4, D=8, **options):
    shapes = ((2, H, L, D), (2, Hkv, S, D), (2, Hkv, S, D))
    return [torch.randn(shape, **options) for shape in shapes]


ROUTED = {
    "plain": lambda: (inputs(), {}),
    "causal": lambda: (inputs(5, 9), {"is_causal": True}),
    "boolean mask": lambda: (inputs(), {"attn_mask": torch.rand(2, 1, 7, 7) > 0.3}),
    "float mask": lambda: (inputs(), {"attn_mask": torch.randn(7, 7)}),
    "mask of heads": lambda: (inputs(), {"attn_mask": torch.randn(4, 7, 1)}),
    "shared heads": lambda: (inputs(Hkv=2), {"enable_gqa": True, "scale": 0.3}),
    "float64": lambda: (inputs(dtype=torch.float64), {"scale": -1}),
    "no queries": lambda: (inputs(L=0), {}),
}


@pytest.mark.parametrize("case", ROUTED)
def test_results_and_gradients_are_those_of_torch(case, calls):
    tensors, options = ROUTED[case]()
    results = []
    for run in (F.scaled_dot_product_attention, fastattn.accelerate()(F.scaled_dot_product_attention)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = run(*leaves, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "function", (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention, imported_before)
)
def test_every_name_of_the_function_is_routed(function, calls):
    query, key, value = inputs()
    with fastattn.accelerate():
        function(query, key=key, value=value)
    function(query, key, value)
    assert len(calls) == 1


ERRORS = {
    "head dims": lambda: (torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 9), torch.randn(2, 4, 7, 9)),
    "dtypes": lambda: (*inputs()[:2], torch.randn(2, 4, 7, 8, dtype=torch.float64)),
    "integers": lambda: [torch.ones(2, 4, 7, 8, dtype=torch.int64)] * 3,
    "devices": lambda: (*inputs()[:2], inputs()[2].to("meta")),
    "sparse": lambda: (*inputs()[:2], inputs()[2].to_sparse()),
    "heads": lambda: inputs(H=4, Hkv=3),
    "mask's shape": lambda: (*inputs(), torch.zeros(3, 7)),
    "a mask of one number": lambda: (*inputs(), torch.tensor(True)),
    "a mask of one dimension": lambda: (*inputs(), torch.zeros(7)),
    "mask's dtype": lambda: (*inputs(), torch.zeros(7, 7, dtype=torch.int64)),
    "dropout": lambda: (*inputs(), None, 1.5),
    "too many": lambda: (*inputs(), None, 0.0, False, 1.0),
    "no tensor": lambda: (*inputs()[:2], [1.0]),
    "too few": lambda: inputs()[:2],
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_those_of_torch(case, calls):
    arguments = ERRORS[case]()
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*arguments)
    with pytest.raises(type(theirs.value)) as ours, fastattn.accelerate():
        F.scaled_dot_product_attention(*arguments)
    assert str(ours.value) == str(theirs.value)
    assert not calls


def test_what_fastattn_has_no_kernel_for_goes_to_torch(calls, monkeypatch):
    query, key, value = inputs()
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(5, 4, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    with fastattn.accelerate():
        F.scaled_dot_product_attention(nested, nested, nested)
        pair = TwoTensor(query, key)
        assert type(F.scaled_dot_product_attention(pair, pair, pair)) is TwoTensor
        torch.func.functionalize(lambda q: F.scaled_dot_product_attention(q, key, value))(query)
        F.scaled_dot_product_attention(query[0], key[0], value[0])
        F.scaled_dot_product_attention(*(t.to("meta") for t in (query, key, value)))
        F.scaled_dot_product_attention(query, key, value, causal_lower_right(7, 7))
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, key, value), (query,), (query,))
        torch.jit.trace(lambda q: F.scaled_dot_product_attention(q, key, value), query, check_trace=False)
        assert not calls
        monkeypatch.setattr(_accelerate, "choose", lambda request, impl: "reference")
        monkeypatch.setattr(_accelerate, "common_scale", lambda *arguments: None)
        F.scaled_dot_product_attention(query, key, value)
    assert not calls


def test_a_watched_call_is_torchs(calls):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with fastattn.accelerate(), Watch():
        F.scaled_dot_product_attention(*inputs())
    assert any(name.startswith("aten._scaled_dot_product") for name in seen) and not calls


SMALLEST = {  # heads of 256 queries, 128 keys and 64 channels
    "plain": (1, {}, {}),
    "with gradients": (1, {"requires_grad": True}, {}),
    "causal": (1, {}, {"is_causal": True}),
    "masked": (8, {}, {"attn_mask": torch.ones(256, 1, dtype=torch.bool)}),
    "half precision": (1, {"dtype": torch.bfloat16}, {}),
    "gradients in half precision": (1, {"dtype": torch.bfloat16, "requires_grad": True}, {}),
}


@pytest.mark.parametrize("case", SMALLEST)
def test_calls_too_small_to_be_faster_stay_with_torch(case, taken):
    H, form, options = SMALLEST[case]
    L = {"causal": 128, "gradients in half precision": 2}.get(case, 256)
    query, key, value = (torch.randn(1, H, n, 64, **form) for n in (L, 128, 128))
    with fastattn.accelerate():
        F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], **options)
        assert not taken
        F.scaled_dot_product_attention(query, key, value, **options)
        assert len(taken) == 1
        F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], dropout_p=0.5, **options)
        assert len(taken) == 2  # torch has no kernel for it


def test_autocast_decides_what_is_too_small_by_the_dtype_that_is_computed_in(taken):
    query, key, value = inputs(L=16, S=16, H=4, D=8, requires_grad=True)
    with fastattn.accelerate():
        F.scaled_dot_product_attention(query, key, value)
        assert not taken
        with torch.autocast("cpu", torch.bfloat16):
            F.scaled_dot_product_attention(query, key, value)
    assert len(taken) == 1


def test_rows_without_keys_are_zero_as_in_torch(calls):
    query, key, value = inputs()
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[2] = False
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    with fastattn.accelerate():
        found = F.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(found, expected)
    assert torch.all(found[:, :, 2] == 0) and len(calls) == 1


@pytest.mark.parametrize("training", (False, True))
def test_modules_of_torch_are_routed(calls, training):
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    attention = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2
    ).train(training)
    for module, arguments, options, number in (
        (attention, (x, x, x), {"need_weights": False, "key_padding_mask": padding}, 1),
        (attention, (x, x, x), {}, 0),  # weights are not the function's business
        (encoder, (x,), {}, 2),
        (encoder, (x,), {"src_key_padding_mask": padding}, 2),
    ):
        with torch.set_grad_enabled(training):
            expected = module(*arguments, **options)
            calls.clear()
            with fastattn.accelerate():
                found = module(*arguments, **options)
        if "src_key_padding_mask" in options:
            expected, found = expected[~padding], found[~padding]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert len(calls) == number


def test_errors_of_multihead_attention_stay(calls):
    attention = nn.MultiheadAttention(16, 4)
    arguments = (torch.randn(5, 2, 16), torch.randn(5, 2, 16), torch.randn(4, 2, 16))
    with pytest.raises(Exception) as theirs:
        attention(*arguments, need_weights=False)
    with pytest.raises(type(theirs.value)) as ours, fastattn.accelerate():
        attention(*arguments, need_weights=False)
    assert str(ours.value) == str(theirs.value)


def test_blocks_nest_end_and_can_be_entered_again(calls):
    block = fastattn.accelerate()
    tensors = inputs()
    with block:
        with fastattn.accelerate(), block:
            F.scaled_dot_product_attention(*tensors)
        assert len(calls) == 1
        F.scaled_dot_product_attention(*tensors)
    with pytest.raises(KeyError), block:
        raise KeyError
    F.scaled_dot_product_attention(*tensors)
    assert len(calls) == 2


def test_a_block_belongs_to_its_thread(calls):
    tensors = inputs()
    entered, done = threading.Event(), threading.Event()

    def with_block():
        with fastattn.accelerate():
            entered.set()
            done.wait(10)

    other = threading.Thread(target=with_block)
    other.start()
    assert entered.wait(10)
    F.scaled_dot_product_attention(*tensors)
    assert not calls
    done.set()
    other.join()
    with fastattn.accelerate():
        started_inside = threading.Thread(target=F.scaled_dot_product_attention, args=tensors)
        started_inside.start()
        started_inside.join()
    assert not calls


def test_as_a_decorator_it_covers_each_call(calls):
    @fastattn.accelerate()
    def attend(query, key, value):
        """Attends."""
        return F.scaled_dot_product_attention(query, key, value)

    tensors = inputs()
    attend(*tensors), attend(*tensors)
    F.scaled_dot_product_attention(*tensors)
    assert len(calls) == 2 and attend.__doc__ == "Attends."
    without_parentheses = fastattn.accelerate(F.scaled_dot_product_attention)
    without_parentheses(*tensors)
    assert len(calls) == 3


def test_what_does_not_end_with_its_call_is_no_decorated_function():
    def generator():
        yield

    async def asynchronous_generator():
        yield

    async def coroutine():
        pass

    for function in (generator, asynchronous_generator, coroutine, nn.Module):
        with pytest.raises(TypeError, match="takes a function that returns when it is done"):
            fastattn.accelerate()(function)


BACKWARD = {
    "a method": lambda loss, leaf: loss.backward(),
    "a function": lambda loss, leaf: torch.autograd.backward(loss),
    "of some inputs": lambda loss, leaf: setattr(leaf, "grad", *torch.autograd.grad(loss, leaf)),
}


@pytest.mark.parametrize("how", BACKWARD)
def test_backward_in_the_block_recomputes_as_forward_did(how, calls):
    query, key, value = inputs()
    gradients = []
    for run in (lambda f: f(), fastattn.accelerate(lambda f: f())):
        for use_reentrant in (False, True) if how != "of some inputs" else (False,):
            leaf = query.clone().requires_grad_()

            def step(leaf=leaf, use_reentrant=use_reentrant):
                out = checkpoint(
                    lambda q: F.scaled_dot_product_attention(q, key, value), leaf,
                    use_reentrant=use_reentrant,
                )  # fmt: skip
                BACKWARD[how](out.square().sum(), leaf)

            run(step)
            gradients.append(leaf.grad)
    assert len(calls) == len(gradients)  # half of them by us, in two calls each
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-5)


def test_hooks_of_a_backward_in_the_block_are_routed(calls):
    query, key, value = inputs()
    with fastattn.accelerate():
        out = F.scaled_dot_product_attention(query.requires_grad_(), key, value)
        out.register_hook(lambda grad: F.scaled_dot_product_attention(grad, key, value))
        out.sum().backward()
    assert len(calls) == 2


def targets(run, *arguments):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    out = compiled(*arguments)
    (graph,) = graphs
    return out, [str(node.target) for node in graph.graph.nodes]


def test_compiles_inside_and_around():
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query * 2, key, value, is_causal=True)

    def inside(*tensors):
        with fastattn.accelerate():
            return attend(*tensors)

    tensors = inputs()
    expected = attend(*tensors)
    with fastattn.accelerate():
        around = targets(attend, *tensors)
    for out, names in (targets(inside, *tensors), targets(fastattn.accelerate()(attend), *tensors), around):
        assert "fastattn.attention_forward.default" in names
        torch.testing.assert_close(out, expected)
    out, names = targets(attend, *tensors)
    assert "fastattn.attention_forward.default" not in names


def test_compiles_multihead_attention():
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 5, 16)

    def attend(x):
        return attention(x, x, x, need_weights=False)[0]

    expected = attend(x)
    with fastattn.accelerate():
        out, names = targets(attend, x)
    assert "fastattn.attention_forward.default" in names
    torch.testing.assert_close(out, expected)


def test_under_autocast_it_is_as_precise_as_torch(calls):
    tensors = inputs(L=33, S=33)
    exact = F.scaled_dot_product_attention(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*tensors)
        with fastattn.accelerate():
            found = F.scaled_dot_product_attention(*tensors)
    assert found.dtype == torch.bfloat16 and len(calls) == 1
    assert (found - exact).norm() <= 2 * (expected - exact).norm()


def test_transforms_of_torch_func(calls):
    query, key, value = inputs()

    def loss(query):
        return F.scaled_dot_product_attention(query, key, value).square().sum()

    stacked = torch.stack([query, query + 1])
    expected = torch.func.vmap(torch.func.grad(loss))(stacked)
    with fastattn.accelerate():
        found = torch.func.vmap(torch.func.grad(loss))(stacked)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


def test_dropout_is_routed_and_repeats_by_seed(calls):
    tensors = inputs()
    with fastattn.accelerate():
        first, again = (
            (torch.manual_seed(1), F.scaled_dot_product_attention(*tensors, dropout_p=0.5))[1]
            for _ in range(2)
        )
    assert torch.equal(first, again) and len(calls) == 2
    assert not torch.allclose(first, F.scaled_dot_product_attention(*tensors))
