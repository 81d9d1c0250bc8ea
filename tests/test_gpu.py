"""What only a GPU shows: large tensors, streams, graphs, memory, compilation. Run by `make gpu`."""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

import fastattn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu` runs it there")

B, H, D = 2, 4, 64
NODES, EDGES = 500, 4000


def normal(*shape, dtype=torch.float16, device="cuda"):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def rows(length, device):
    return [normal(B, H, length, D, device=device) for _ in range(3)]


def edges(nodes, device):
    """Of a graph that has built its indices: that reads sizes back from the device."""
    ends = torch.randint(nodes, (2, EDGES), device=device)
    graph = fastattn.Graph(ends, nodes)
    fastattn.aggregate(torch.ones(nodes, 1, device=device, requires_grad=True), graph).sum().backward()
    return graph


def attention(length, device="cuda"):
    return rows(length, device), lambda q, k, v: fastattn.scaled_dot_product_attention(
        q, k, v, is_causal=True, impl="triton"
    )


def linear_attention(length, device="cuda"):
    return rows(length, device), lambda q, k, v: fastattn.linear_attention(
        q, k, v, is_causal=True, impl="triton"
    )


def aggregation(length, device="cuda"):
    graph = edges(length, device)
    return [
        normal(length, D, device=device),
        normal(EDGES, device=device),
    ], lambda x, weight: fastattn.aggregate(x, graph, edge_weight=weight, impl="triton")


def maximum(length, device="cuda"):
    graph = edges(length, device)
    return [normal(length, D, device=device)], lambda x: fastattn.aggregate(x, graph, "max", impl="triton")


def gat_attention(length, device="cuda"):
    graph = edges(length, device)
    inputs = [normal(length, *shape, device=device) for shape in ((H, D), (H,), (H,))]
    return inputs, lambda *inputs: fastattn.gat_attention(*inputs, graph, impl="triton")


OPERATORS: tuple[Callable, ...] = (attention, linear_attention, aggregation, maximum, gat_attention)
each = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)


def step(function, inputs) -> list[torch.Tensor]:
    """The result and the gradients of its sum."""
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


@contextmanager
def compilations():
    """A list of the kernels that Triton compiles, or loads from its cache, meanwhile."""
    from triton import knobs

    names, before = [], knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda *args, fn, **kwargs: names.append(fn.name) and None
    try:
        yield names
    finally:
        knobs.runtime.jit_cache_hook = before


@each
def test_other_lengths_compile_nothing(operator):
    with compilations() as first:
        step(*reversed(operator(1024)))
    with compilations() as second:
        for length in (1000, 2048, 777):
            step(*reversed(operator(length)))
    assert first and not second


@each
def test_work_waits_for_its_stream_and_for_no_other(operator):
    """Inputs are written late on a stream of its own; on another stream the kernels would miss them."""
    inputs, function = operator(NODES)
    expected = step(function, inputs)
    late = [torch.zeros_like(t).requires_grad_() for t in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # 0.1 s
        with torch.no_grad():
            for target, source in zip(late, inputs, strict=True):
                target.copy_(source)
        results = step(function, late)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    torch.testing.assert_close(results, expected)


@each
def test_cuda_graph(operator):
    """Captured once, forward and backward; a replay reads what the inputs hold by then."""
    inputs, function = operator(NODES)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(function, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(function, inputs)
    for _ in range(2):
        with torch.no_grad():
            for tensor in inputs:
                tensor.normal_()
        graph.replay()
        torch.testing.assert_close(results, step(function, inputs))


@each
def test_torch_compile(operator):
    inputs, function = operator(NODES)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(step(compiled, inputs), step(function, inputs))


@pytest.mark.parametrize("operator", (attention, linear_attention), ids=lambda f: f.__name__)
def test_memory_is_that_of_inputs_and_results(operator):
    """At 16384 tokens a tensor of all pairs has 256 times the bytes of one of the inputs."""
    inputs, function = operator(16384)
    step(function, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step(function, inputs)
    torch.cuda.synchronize()
    growth = torch.cuda.max_memory_allocated() - before
    assert growth <= 4 * sum(t.nbytes for t in results)


def needs(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of the GPU's memory, {free / 1e9:.0f} GB are free")


@pytest.mark.parametrize("operator", (fastattn.scaled_dot_product_attention, fastattn.linear_attention))
def test_more_elements_than_32_bits_count(operator):
    """The last heads of more than 2^31 elements are as they are alone, also where sequences are so long."""
    needs(60)
    shapes = [(2**19 + 1, 64)] + [(1, 2**20 + 1)] * (operator is fastattn.linear_attention)
    for batch, length in shapes:
        heads = 2**31 // (batch * length * D) + 1
        inputs = [normal(batch, heads, length, D) for _ in range(3)]
        assert inputs[0].numel() > 2**31
        results = step(lambda *t: operator(*t, is_causal=True, impl="triton"), inputs)
        few = [t[-1:, -2:].detach().clone().requires_grad_() for t in inputs]
        alone = step(lambda *t: operator(*t, is_causal=True, impl="triton"), few)
        torch.testing.assert_close([t[-1:, -2:] for t in results], alone)
        del inputs, results


def test_more_features_than_32_bits_count():
    needs(40)
    nodes, width = 2**23 + 8, 256
    x = normal(nodes, width)
    ends = torch.randint(nodes - 1000, nodes, (2, EDGES), device="cuda")
    for reduce in ("sum", "max"):
        out, grad = step(
            lambda x, reduce=reduce: fastattn.aggregate(
                x, fastattn.Graph(ends, nodes), reduce, impl="triton"
            ),
            [x],
        )
        few = x[-1000:].detach().clone().requires_grad_()
        graph = fastattn.Graph(ends - (nodes - 1000), 1000)
        alone = step(lambda x, r=reduce, g=graph: fastattn.aggregate(x, g, r, impl="triton"), [few])
        torch.testing.assert_close([out[-1000:], grad[-1000:]], alone)
        assert not out[:-1000].any() and not grad[:-1000].any()


@each
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one(operator):
    inputs, function = operator(NODES, "cuda:1")
    assert torch.cuda.current_device() == 0
    results = step(function, inputs)
    with torch.cuda.device(1):
        expected = step(function, inputs)
    assert all(t.device == torch.device("cuda:1") for t in results)
    torch.testing.assert_close(results, expected)
