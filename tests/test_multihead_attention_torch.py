"""fastattn.nn.MultiheadAttention as a module: state, hooks, memory, compilers, transforms, nested tensors."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
from multihead_attention_cases import (
    CONSTRUCTORS,
    INF,
    E,
    H,
    L,
    N,
    assert_same,
    call,
    causal_masks,
    make_inputs,
    make_pair,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn

# ---------------------------------------------------------------------------------- construction and state


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_same_seed_gives_the_same_parameters_and_attributes(kwargs, batch_first):
    modules = []
    for cls in (nn.MultiheadAttention, fastattn.nn.MultiheadAttention):
        torch.manual_seed(11)
        modules.append(cls(E, H, dropout=0.1, batch_first=batch_first, **kwargs))
    theirs, ours = modules
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    for name in (
        "embed_dim kdim vdim _qkv_same_embed_dim num_heads dropout batch_first head_dim add_zero_attn"
    ).split():
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v".split():
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
    assert type(ours.out_proj) is type(theirs.out_proj)
    assert ours.__constants__ == ["batch_first"]
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, nn.MultiheadAttention)


def test_positional_constructor_arguments_mean_what_they_mean_in_torch():
    args = (8, 2, 0.25, False, True, True, 6, 4, True, "meta", torch.bfloat16)
    theirs, ours = nn.MultiheadAttention(*args), fastattn.nn.MultiheadAttention(*args)
    for name in "embed_dim num_heads dropout kdim vdim batch_first add_zero_attn".split():
        assert getattr(ours, name) == getattr(theirs, name)
    described = {n: (p.shape, p.dtype, p.device) for n, p in theirs.named_parameters()}
    assert described == {n: (p.shape, p.dtype, p.device) for n, p in ours.named_parameters()}


@pytest.mark.parametrize("args", [(0, 1), (4, 0), (-4, 2), (4, -2), (5, 2)])
def test_constructor_errors(args):
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(*args)
    with pytest.raises(theirs.type):
        fastattn.nn.MultiheadAttention(*args)


def test_pickles_without_the_attribute_of_later_versions_load():
    _, module = make_pair()
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    state = dict(state)
    del state["_qkv_same_embed_dim"]
    old = fastattn.nn.MultiheadAttention.__new__(fastattn.nn.MultiheadAttention)
    old.__setstate__(state)
    assert old._qkv_same_embed_dim is True


def test_copies_and_pickles_compute_the_same():
    _, module = make_pair(batch_first=True)
    inputs = make_inputs(module, "batch first")
    want = module(*inputs)[0]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is fastattn.nn.MultiheadAttention
        assert torch.equal(other(*inputs)[0], want)
        assert other.in_proj_weight is not module.in_proj_weight


def test_meta_device_and_dtype_moves():
    with torch.device("meta"):
        module = fastattn.nn.MultiheadAttention(E, H)
    out, weights = module(*(torch.randn(L, N, E, device="meta") for _ in range(3)))
    assert out.shape == (L, N, E) and weights.shape == (N, L, L) and out.is_meta
    module = module.to_empty(device="cpu")
    module._reset_parameters()
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        x = torch.randn(L, N, E, dtype=dtype)
        out, weights = module.to(dtype)(x, x, x)
        assert out.dtype == weights.dtype == dtype


# ------------------------------------------------------------------- hooks, parametrizations, other out_proj


def test_hooks_act():
    _, ours = make_pair(batch_first=True)
    seen = []
    ours.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    ours.register_forward_hook(lambda m, a, o: seen.append("post"))
    ours.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    ours.out_proj.register_forward_pre_hook(lambda m, a: seen.append("out_proj pre"))
    ours.out_proj.register_forward_hook(lambda m, a, o: o * 2)
    inputs = make_inputs(ours, "batch first")
    out = ours(*inputs)[0]
    _, plain = make_pair(batch_first=True)
    torch.testing.assert_close(out, plain(*inputs)[0] * 2)
    out.sum().backward()
    assert seen == ["pre", "out_proj pre", "post", "backward"]


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_parametrizations_of_every_weight_act():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    changed = copy.deepcopy(ours)
    with torch.no_grad():
        changed.in_proj_weight.mul_(2)
        changed.out_proj.weight.mul_(2)
    want = changed(*inputs)[0]
    parametrize.register_parametrization(ours, "in_proj_weight", Double())
    parametrize.register_parametrization(ours.out_proj, "weight", Double())
    assert isinstance(ours, fastattn.nn.MultiheadAttention)
    torch.testing.assert_close(ours(*inputs)[0], want)
    ours(*inputs)[0].sum().backward()
    assert ours.parametrizations.in_proj_weight.original.grad.abs().sum() > 0


def test_weight_norm_acts():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    want = ours(*inputs)[0]
    parametrizations.weight_norm(ours, "in_proj_weight")
    parametrizations.weight_norm(ours.out_proj, "weight")
    torch.testing.assert_close(ours(*inputs)[0], want)
    with torch.no_grad():
        ours.out_proj.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(
        ours(*inputs)[0] - ours.out_proj.bias, 2 * (want - ours.out_proj.bias), rtol=1e-6, atol=1e-8
    )


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def test_another_module_as_out_proj_is_called():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    merged = copy.deepcopy(ours)
    ours.out_proj = LoRA(ours.out_proj)
    with torch.no_grad():
        merged.out_proj.weight += ours.out_proj.up @ ours.out_proj.down
    torch.testing.assert_close(ours(*inputs)[0], merged(*inputs)[0])
    ours(*inputs)[0].sum().backward()
    assert ours.out_proj.up.grad.abs().sum() > 0


def test_shared_parameters_collect_both_gradients():
    _, first = make_pair(batch_first=True)
    _, second = make_pair(batch_first=True)
    second.in_proj_weight = first.in_proj_weight
    inputs = make_inputs(first, "batch first")
    first(*inputs)[0].sum().backward()
    single = first.in_proj_weight.grad.clone()
    first.in_proj_weight.grad = None
    (first(*inputs)[0].sum() + second(*inputs)[0].sum()).backward()
    torch.testing.assert_close(first.in_proj_weight.grad, 2 * single)


# ---------------------------------------------------------------------------------------------------- memory


class Sizes(TorchDispatchMode):
    """Records the number of elements of everything that operators return."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_no_weights_per_head_unless_asked_for(dropout, masked):
    heads, length, width = 8, 64, 16
    module = fastattn.nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
    x = torch.randn(2, length, width, requires_grad=True)
    masks = {}
    if masked:
        masks["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        masks["key_padding_mask"] = torch.arange(length) > torch.tensor([[length], [40]])
    per_head = 2 * heads * length * length
    for need_weights, average in ((False, True), (True, True), (True, False)):
        with Sizes() as sizes:
            out, _ = module(x, x, x, need_weights=need_weights, average_attn_weights=average, **masks)
            out.sum().backward()
        assert (sizes.largest >= per_head) == (not average)


# ---------------------------------------------------------------------- transforms, compilers, nested tensors


COMPILED_CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "causal": {"attn_mask": causal_masks(L, L)["float"], "is_causal": True, "need_weights": False},
    "padding": {"key_padding_mask": torch.zeros(N, L, dtype=torch.bool)},
    "mixed masks": {
        "key_padding_mask": torch.zeros(N, L, dtype=torch.bool),
        "attn_mask": torch.zeros(L, L, dtype=torch.float64),
    },
    "float masks": {
        "key_padding_mask": torch.ones(N, L, dtype=torch.float64),
        "attn_mask": torch.zeros(L, L, dtype=torch.float64),
    },
}


@pytest.mark.parametrize("kwargs", COMPILED_CALLS.values(), ids=COMPILED_CALLS)
def test_compile_without_graph_breaks(kwargs):
    torch.compiler.reset()
    _, ours = make_pair(batch_first=True)
    x = make_inputs(ours, "batch first", keys="self")[0]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    want, got = call(ours, (x, x, x), **kwargs), call(compiled, (x, x, x), **kwargs)
    assert_same({k.removeprefix("_orig_mod."): v for k, v in got.items()}, want, rtol=1e-9, atol=1e-11)


def test_one_dynamic_compilation_serves_every_length():
    torch.compiler.reset()
    _, ours = make_pair(batch_first=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for length in (5, 6, 8, 13, 40):
        x = torch.randn(N, length, E, dtype=torch.float64)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        torch.testing.assert_close(compiled(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask))
    assert counter.frame_count <= 3


def test_export():
    _, ours = make_pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    program = torch.export.export(ours.eval(), (x, x, x))
    torch.testing.assert_close(program.module()(x, x, x), ours(x, x, x))


def test_functional_call_and_vmap():
    _, ours = make_pair(batch_first=True)
    x = torch.randn(4, N, L, E, dtype=torch.float64)
    doubled = {name: p.detach() * 2 for name, p in ours.named_parameters()}
    changed = copy.deepcopy(ours)
    changed.load_state_dict(doubled)
    torch.testing.assert_close(
        torch.func.functional_call(ours, doubled, (x[0],) * 3), changed(x[0], x[0], x[0])
    )

    def loss(parameters, x, padding):
        out, weights = torch.func.functional_call(ours, parameters, (x, x, x, padding))
        return out.square().sum() + weights.square().sum()

    padding = torch.zeros(4, N, L, dtype=torch.float64).masked_fill(torch.arange(L) == 3, -INF)
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(doubled, x, padding)
    for n in range(4):
        for name, grad in torch.func.grad(loss)(doubled, x[n], padding[n]).items():
            torch.testing.assert_close(grads[name][n], grad)


def test_scripting_is_refused_in_words():
    _, ours = make_pair()
    with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="torch.jit.script"):
        warnings.simplefilter("ignore")
        torch.jit.script(ours)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("average", [True, False])
def test_nested_self_attention(average):
    theirs, ours = (m.eval() for m in make_pair(batch_first=True))
    sequences = [torch.randn(n, E, dtype=torch.float64) for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(sequences)
    for training in (False, True):
        with torch.no_grad():
            out, weights = ours.train(training)(x, x, x, average_attn_weights=average)
            for sequence, o, w in zip(sequences, out.unbind(), weights, strict=True):
                n = len(sequence)
                want, want_weights = theirs(sequence, sequence, sequence, average_attn_weights=average)
                torch.testing.assert_close(o, want)
                torch.testing.assert_close(w[..., :n, :n], want_weights)
                assert w.sum() == pytest.approx(n * (1 if average else H))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_are_refused():
    _, ours = make_pair(batch_first=True)
    sequences = [torch.randn(n, E, dtype=torch.float64) for n in (3, 5)]
    strided = torch.nested.nested_tensor(sequences)
    jagged = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    for args, kwargs in (
        ((jagged, jagged, jagged), {}),
        ((strided, strided, torch.nested.nested_tensor(sequences)), {}),
        ((strided, strided, strided), {"attn_mask": mask}),
        ((strided, strided, strided), {"key_padding_mask": mask[:2]}),
    ):
        with pytest.raises(AssertionError, match="nested"):
            ours(*args, **kwargs)
