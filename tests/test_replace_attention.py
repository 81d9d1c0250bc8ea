"""fastattn.replace_attention swaps the modules in place, and the swapped ones are really used."""

import copy
import doctest
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fastattn
import fastattn.integrations.convert as implementation

Ours = fastattn.nn.MultiheadAttention
N, L, S, E, H = 3, 6, 4, 16, 2


@pytest.fixture
def calls(monkeypatch):
    """A list that grows by one with every forward of our module."""
    forward, seen = Ours.forward, []

    def counting(self, *args, **kwargs):
        seen.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Ours, "forward", counting)
    return seen


@pytest.fixture(autouse=True)
def fast_path_switch_is_left_alone():
    assert torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.backends.mha.get_fastpath_enabled()


def attention(**kwargs):
    return nn.MultiheadAttention(E, H, batch_first=True, **kwargs)


def test_swaps_in_place_and_keeps_everything():
    model = nn.ModuleDict({"a": attention(), "b": nn.Sequential(nn.Linear(E, E), attention(kdim=8, vdim=8))})
    module = model["a"].eval()
    module.in_proj_bias.requires_grad_(False)
    module.note = "mine"
    module.register_buffer("extra", torch.ones(2))
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    state, out_proj = copy.deepcopy(model.state_dict()), module.out_proj
    assert fastattn.replace_attention(model) == 2
    assert model["a"] is module and type(module) is Ours and type(model["b"][1]) is Ours
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == before
    assert module.out_proj is out_proj and module.note == "mine" and not module.training and model.training
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    assert fastattn.replace_attention(model) == 0


def test_the_model_itself_may_be_the_attention(calls):
    module = attention()
    x = torch.randn(N, L, E)
    want = module(x, x, x)
    assert fastattn.replace_attention(module) == 1
    torch.testing.assert_close(module(x, x, x), want)
    assert calls == [module]


def test_a_shared_module_stays_shared_and_counts_once():
    module = attention()
    model = nn.ModuleList([module, nn.Sequential(module), attention()])
    assert fastattn.replace_attention(model) == 2
    assert model[0] is model[1][0] is module


def test_nothing_to_swap():
    assert fastattn.replace_attention(nn.Linear(2, 2)) == 0
    assert fastattn.replace_attention(nn.Sequential(Ours(4, 2))) == 0
    with pytest.raises(TypeError, match="str"):
        fastattn.replace_attention("model")


def test_an_optimizer_goes_on():
    models = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(4):
            if step == 2 and swap:
                assert fastattn.replace_attention(model) == 1
            optimizer.zero_grad()
            model(torch.randn(N, L, E, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        models.append(model.state_dict())
    for name, want in models[0].items():
        torch.testing.assert_close(models[1][name], want, rtol=1e-6, atol=1e-8)


def test_all_kinds_of_hooks_stay():
    module, seen = attention(), []
    module.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    module.register_forward_pre_hook(lambda m, a, k: seen.append("pre kwargs"), with_kwargs=True)
    handle = module.register_forward_hook(lambda m, a, o: seen.append("post"))
    module.register_full_backward_pre_hook(lambda m, g: seen.append("backward pre"))
    module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    module.register_state_dict_post_hook(lambda m, s, p, meta: seen.append("state_dict"))
    module.register_load_state_dict_post_hook(lambda m, keys: seen.append("load"))
    module.out_proj.register_forward_hook(lambda m, a, o: seen.append("out_proj"))
    fastattn.replace_attention(module)
    x = torch.randn(N, L, E, requires_grad=True)
    module(x, x, x)[0].sum().backward()
    assert seen == ["pre", "pre kwargs", "out_proj", "post", "backward pre", "backward"]
    seen.clear()
    module.load_state_dict(module.state_dict())
    assert seen == ["state_dict", "load"]
    handle.remove()
    seen.clear()
    module(x, x, x)
    assert "post" not in seen


def test_parametrizations_stay_and_can_be_removed():
    module = attention().double()
    x = torch.randn(N, L, E, dtype=torch.float64)
    parametrizations.weight_norm(module, "in_proj_weight")
    parametrizations.orthogonal(module.out_proj, "weight")
    twin = copy.deepcopy(module)
    want = module(x, x, x)[0]
    assert fastattn.replace_attention(nn.Sequential(module)) == 1
    assert isinstance(module, Ours) and not isinstance(twin, Ours)
    assert parametrize.type_before_parametrizations(module) is Ours
    torch.testing.assert_close(module(x, x, x)[0], want)
    torch.testing.assert_close(copy.deepcopy(module)(x, x, x)[0], want)
    with torch.no_grad():
        module.parametrizations.in_proj_weight.original0.mul_(1.5)
    assert not torch.allclose(module(x, x, x)[0], want)
    changed = module(x, x, x)[0]
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is Ours
    torch.testing.assert_close(module(x, x, x)[0], changed)
    assert fastattn.replace_attention(module) == 0


def test_parametrizations_added_after_the_swap_act():
    module = attention()
    fastattn.replace_attention(module)
    x = torch.randn(N, L, E)
    want = module(x, x, x)[0]
    parametrizations.weight_norm(module, "in_proj_weight")
    torch.testing.assert_close(module(x, x, x)[0], want)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_hook_based_weight_norm_stays():
    module = attention()
    x = torch.randn(N, L, E)
    torch.nn.utils.weight_norm(module, "in_proj_weight")
    fastattn.replace_attention(module)
    want = module(x, x, x)[0]
    with torch.no_grad():
        module.in_proj_weight_g.mul_(2)
    assert not torch.allclose(module(x, x, x)[0], want)


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(torch.randn(E, E))

    def forward(self, x):
        return self.base(x) + x @ self.delta


@pytest.mark.parametrize("first", ["swap", "adapter"])
def test_an_adapter_on_out_proj_acts(first):
    model = nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    plain = copy.deepcopy(model)
    if first == "swap":
        fastattn.replace_attention(model)
    model.self_attn.out_proj = Adapter(model.self_attn.out_proj)
    if first == "adapter":
        fastattn.replace_attention(model)
    with torch.no_grad():
        plain.self_attn.out_proj.weight += model.self_attn.out_proj.delta.t()
    x = torch.randn(N, L, E)
    model.self_attn.eval(), plain.self_attn.eval()
    torch.testing.assert_close(model.self_attn(x, x, x)[0], plain.self_attn(x, x, x)[0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- subclasses


class Labelled(nn.MultiheadAttention):
    """No forward of its own."""

    def label(self):
        return f"{self.num_heads} heads"

    def extra_repr(self):
        return super().extra_repr() + self.label()


class Halved(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return out / 2, weights


class HalvedLabelled(Halved):
    pass


class Wider(Ours):
    pass


def test_a_subclass_that_inherits_forward_is_swapped(calls):
    module, twin = (Labelled(E, H, batch_first=True) for _ in range(2))
    x = torch.randn(N, L, E)
    want = module(x, x, x)[0]
    assert fastattn.replace_attention(nn.ModuleList([module, twin])) == 2
    assert isinstance(module, Labelled) and isinstance(module, Ours) and type(module) is type(twin)
    assert "2 heads" in repr(module)
    torch.testing.assert_close(module(x, x, x)[0], want)
    assert len(calls) == 1
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        torch.testing.assert_close(other(x, x, x)[0], want)
    parametrizations.weight_norm(module, "in_proj_weight")
    torch.testing.assert_close(module(x, x, x)[0], want)
    assert fastattn.replace_attention(nn.ModuleList([module, twin])) == 0


def test_a_parametrized_subclass_is_swapped(calls):
    module = Labelled(E, H, batch_first=True)
    parametrizations.weight_norm(module, "in_proj_weight")
    x = torch.randn(N, L, E)
    want = module(x, x, x)[0]
    assert fastattn.replace_attention(module) == 1
    torch.testing.assert_close(module(x, x, x)[0], want)
    parametrize.remove_parametrizations(module, "in_proj_weight")
    torch.testing.assert_close(module(x, x, x)[0], want)
    assert len(calls) == 2 and isinstance(module, Labelled)


@pytest.mark.parametrize("cls", [Halved, HalvedLabelled, torch.ao.nn.quantizable.MultiheadAttention, Wider])
def test_a_module_with_its_own_forward_is_left_alone(cls):
    module = cls(E, H, batch_first=True)
    assert fastattn.replace_attention(nn.Sequential(module)) == 0
    assert type(module) is cls


def test_an_assigned_forward_is_left_alone():
    module = attention()
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    assert fastattn.replace_attention(module) == 0
    assert type(module) is nn.MultiheadAttention


# ---------------------------------------------------------------------------------------- inside transformers


def encoder(**kwargs):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, dtype=torch.float64, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return nn.TransformerEncoder(layer, 2)


left_aligned = torch.arange(L) >= torch.tensor([[L], [L - 2], [1]])
PADDINGS = {
    "no padding": None,
    "left aligned": left_aligned,
    "right aligned": left_aligned.flip(1),
    "float": torch.zeros(N, L, dtype=torch.float64).masked_fill(left_aligned, -torch.inf),
}
MASKS = {
    "no mask": None,
    "causal": torch.ones(L, L, dtype=torch.bool).triu(1),
    "float": torch.randn(L, L, dtype=torch.float64),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_uses_the_swapped_modules_in_every_mode(batch_first, norm_first, mask, padding, calls):
    model = encoder(batch_first=batch_first, norm_first=norm_first)
    x = torch.randn(N, L, E, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    swapped = copy.deepcopy(model)
    assert fastattn.replace_attention(swapped) == 2
    for training, grad in itertools.product((True, False), repeat=2):
        calls.clear()
        results = []
        for module in (model.train(training), swapped.train(training)):
            with torch.set_grad_enabled(grad):
                out = module(x, mask=mask, src_key_padding_mask=padding)
            out = out if batch_first else out.transpose(0, 1)
            hidden = left_aligned if padding is None or padding.dtype != torch.bool else padding
            results.append(out if padding is None else out[~hidden])
        assert calls == [layer.self_attn for layer in swapped.layers]
        assert not results[1].isnan().any()
        # torch returns NaN where a row sees nothing; elsewhere the numbers are the same.
        seen = ~results[0].isnan()
        torch.testing.assert_close(results[1][seen], results[0][seen], rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fully_padded_sequence_gives_no_nan(calls):
    model = encoder(batch_first=True)
    fastattn.replace_attention(model)
    x = torch.randn(N, L, E, dtype=torch.float64)
    padding = torch.arange(L) >= torch.tensor([[L], [2], [0]])
    for training, grad in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(grad):
            assert model.train(training)(x, src_key_padding_mask=padding).isfinite().all()
    assert len(calls) == 8


def test_module_put_in_by_hand_is_used(calls):
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True).eval()
    layer.self_attn = Ours(E, H, batch_first=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        model = nn.TransformerEncoder(layer, 2)
        copies = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            for n, module in enumerate((model, copies), 1):
                module(torch.randn(N, L, E))
                module(torch.randn(N, L, E), src_key_padding_mask=left_aligned)
                assert len(calls) == 4 * n


@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_with_decoder(batch_first, calls):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = nn.Transformer(E, H, 1, 2, 32, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    swapped = copy.deepcopy(model)
    assert fastattn.replace_attention(swapped) == 1 + 2 * 2
    source, target = (torch.randn(N, n, E, dtype=torch.float64) for n in (S, L))
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    future = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    source_padding = torch.zeros(N, S, dtype=torch.float64)
    source_padding[1, 2:] = -torch.inf
    masks = {
        "tgt_mask": future,
        "memory_key_padding_mask": source_padding,
        "tgt_key_padding_mask": torch.zeros(N, L, dtype=torch.float64).masked_fill(left_aligned, -torch.inf),
    }
    for training, grad in itertools.product((True, False), repeat=2):
        for kwargs in ({}, {"tgt_mask": future, "tgt_is_causal": True}, masks):
            calls.clear()
            with torch.set_grad_enabled(grad):
                want = model.train(training)(source, target, **kwargs)
                got = swapped.train(training)(source, target, **kwargs)
            assert len(calls) == 5
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_gradients_through_a_swapped_encoder():
    model = encoder(batch_first=True)
    swapped = copy.deepcopy(model)
    fastattn.replace_attention(swapped)
    x = torch.randn(N, L, E, dtype=torch.float64)
    for module in (model, swapped):
        module(x, mask=MASKS["causal"], is_causal=True).square().sum().backward()
    for want, got in zip(model.parameters(), swapped.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-10)


def test_swapped_encoder_compiles_without_graph_breaks():
    torch.compiler.reset()
    model = encoder(batch_first=True).eval()
    fastattn.replace_attention(model)
    x = torch.randn(N, L, E, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x, mask=MASKS["causal"]), model(x, mask=MASKS["causal"]))


def test_documented_examples():
    results = doctest.testmod(implementation)
    assert results.attempted > 4 and results.failed == 0
