"""LinearMultiheadAttention: torch's parameters and conventions around linear attention, and its steps."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastattn
from fastattn.nn import FavorFeatures, LinearMultiheadAttention

FEATURES = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def dense(module, query, key, value, hidden=None, causal=False):
    """The formula, batch first, with every pair of query and key: (N, L, E). `hidden` (N, S) is padding."""
    E, H, D = module.embed_dim, module.num_heads, module.head_dim
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        rest = (module.in_proj_weight.shape[0] - E) // 2
        weights = module.in_proj_weight.split((E, rest, rest))
    sizes = [weight.shape[0] for weight in weights]
    biases = [0.0] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    phi = FEATURES.get(module.feature_map, module.feature_map)
    heads = []
    for h in range(H):
        g = h * module.num_kv_heads // H
        q, k, v = (
            (x @ w.T + b)[..., i * D : (i + 1) * D]
            for x, w, b, i in zip((query, key, value), weights, biases, (h, g, g), strict=True)
        )
        scores = phi(q) @ phi(k).transpose(1, 2)
        position = torch.arange(scores.shape[-1])
        if module.decay is not None:
            # Padding does not age what came before it.
            age = torch.ones(scores.shape[0], len(position)) if hidden is None else 1.0 - hidden.double()
            age = age.to(scores.dtype).cumsum(1)
            age = age[:, :, None] - age[:, None, :]
            scores = scores * (module.decay[h].to(scores.dtype) * age).exp()
        if causal:
            scores = scores.tril()
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, :], 0.0)
        out = scores @ v
        if module.normalize:
            total = scores.sum(-1, keepdim=True)
            out = torch.where(total == 0, 0.0, out / (total + module.eps))
        heads.append(out)
    return module.out_proj(torch.cat(heads, -1))


def double(module):
    return copy.deepcopy(module).double()


CONFIGURATIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "relu": {"feature_map": "relu", "eps": 1e-2},
    "unnormalized": {"feature_map": "identity", "normalize": False},
    "callable": {"feature_map": lambda x: x.square() + 0.1},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "bias": False},
    "decay": {"decay": [-0.5, -0.1, 0.0, -2.0]},
    "grouped decay": {"num_kv_heads": 2, "decay": torch.tensor([-0.5, -0.1, 0.0, -2.0])},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_self_attention_is_the_formula(configuration, batch_first):
    options = CONFIGURATIONS[configuration]
    module = double(LinearMultiheadAttention(16, 4, batch_first=batch_first, **options))
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    given = x if batch_first else x.transpose(0, 1)
    hidden = torch.zeros(3, 7, dtype=torch.bool)
    hidden[0, :2] = hidden[1, 4:] = hidden[2] = True
    for is_causal in [True] if "decay" in options else [True, False]:
        for padding in (None, hidden):
            out, state = module(given, given, given, key_padding_mask=padding, is_causal=is_causal)
            assert state is None and out.shape == given.shape
            out = out if batch_first else out.transpose(0, 1)
            torch.testing.assert_close(out, dense(module, x, x, x, padding, is_causal))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("dims", [(16, 16), (5, 6)])
def test_cross_attention_is_the_formula(dims, num_kv_heads):
    module = LinearMultiheadAttention(
        16, 4, kdim=dims[0], vdim=dims[1], batch_first=True, num_kv_heads=num_kv_heads
    )
    module = double(module)
    query = torch.randn(2, 3, 16, dtype=torch.float64)
    key, value = (torch.randn(2, 9, dim, dtype=torch.float64) for dim in dims)
    torch.testing.assert_close(module(query, key, value)[0], dense(module, query, key, value))
    if dims == (16, 16):
        torch.testing.assert_close(module(query, key, key)[0], dense(module, query, key, key))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 3}, {"batch_first": True}])
def test_parameters_are_those_of_torch_and_the_state_dict_can_be_carried_over(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(8, 2, **options)
    torch.manual_seed(3)
    ours = LinearMultiheadAttention(8, 2, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_positional_arguments_are_those_of_torch():
    module = LinearMultiheadAttention(8, 2, 0.0, True, False, False, 5, 3, True, None, torch.float64)
    assert (module.kdim, module.vdim, module.batch_first) == (5, 3, True)
    assert module.out_proj.weight.dtype == torch.float64
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    key, value = (torch.randn(1, 4, dim, dtype=torch.float64) for dim in (5, 3))
    hidden = torch.tensor([[False, False, True, True]])
    out, state = module(x, key, value, hidden, False, None, True, False)
    assert state is None
    torch.testing.assert_close(out, module(x, key[:, :2], value[:, :2])[0])


def test_unbatched_inputs():
    module = LinearMultiheadAttention(8, 2)
    x, hidden = torch.randn(5, 8), torch.tensor([False, False, False, True, True])
    out, _ = module(x, x, x, key_padding_mask=hidden, is_causal=True)
    expected, _ = module(x[:, None], x[:, None], x[:, None], key_padding_mask=hidden[None], is_causal=True)
    torch.testing.assert_close(out, expected[:, 0])


# Masks


def causal_masks(length):
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {
        "boolean": future,
        "float": nn.Transformer.generate_square_subsequent_mask(length),
        "per head": future.expand(6, length, length),
    }


@pytest.mark.parametrize("kind", ["boolean", "float", "per head"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_causal_mask_is_accepted(kind, is_causal):
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 6, 8)
    out, _ = module(x, x, x, attn_mask=causal_masks(6)[kind], is_causal=is_causal)
    torch.testing.assert_close(out, module(x, x, x, is_causal=True)[0])


@pytest.mark.parametrize("is_causal", [False, True])
def test_any_other_mask_is_refused(is_causal):
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 6, 8)
    masks = [mask.clone() for mask in causal_masks(6).values()]
    masks[0][3, 1] = True
    masks[1][3, 1] = -1.0
    masks[2][4, 0, 5] = False
    learnt = causal_masks(6)["float"].requires_grad_()
    for mask in (*masks, torch.zeros(6, 6), learnt):
        with pytest.raises(NotImplementedError, match="attn_mask must be the causal mask"):
            module(x, x, x, attn_mask=mask, is_causal=is_causal)
    with pytest.raises(RuntimeError, match=r"shape of the 2D attn_mask is \(5, 5\)"):
        module(x, x, x, attn_mask=causal_masks(5)["float"], is_causal=is_causal)


def test_floating_point_padding_is_0_or_minus_infinity():
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    x, hidden = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    bias = torch.zeros(2, 5).masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(
        module(x, x, x, key_padding_mask=bias)[0], module(x, x, x, key_padding_mask=hidden)[0]
    )
    with pytest.raises(ValueError, match="only 0 and -inf"):
        module(x, x, x, key_padding_mask=bias - 1.0)
    with pytest.raises(AssertionError, match="key_padding_mask"):
        module(x, x, x, key_padding_mask=hidden.long())


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_has_no_influence_even_if_it_is_nan(is_causal):
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    x, hidden = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
    hidden[0, :2] = hidden[1, 3:] = True
    clean = x.clone().requires_grad_()
    dirty = x.masked_fill(hidden.unsqueeze(-1), float("nan")).requires_grad_()
    results = []
    for given in (clean, dirty):
        module.zero_grad()
        out, _ = module(x, given, given, key_padding_mask=hidden, is_causal=is_causal)
        out.square().sum().backward()
        results.append((out, given.grad[~hidden]))
        assert given.grad[hidden].eq(0).all()
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_query_that_sees_no_key_gives_the_bias_of_out_proj():
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(1, 4, 8, requires_grad=True)
    out, _ = module(x, x, x, key_padding_mask=torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(out, module.out_proj.bias.expand_as(out))
    out.sum().backward()
    assert x.grad.eq(0).all()


def test_refusals_name_the_argument():
    module, x = LinearMultiheadAttention(8, 2, decay=[0.0, -1.0]), torch.randn(3, 2, 8)
    with pytest.raises(NotImplementedError, match="need_weights=True"):
        module(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="decay needs is_causal=True"):
        module(x, x, x)
    with pytest.raises(RuntimeError, match="is_causal needs query and key of one length"):
        module(x, x[:2], x[:2], is_causal=True)
    with pytest.raises(NotImplementedError, match="dropout=0.1"):
        LinearMultiheadAttention(8, 2, dropout=0.1)
    with pytest.raises(NotImplementedError, match="add_bias_kv=True"):
        LinearMultiheadAttention(8, 2, add_bias_kv=True)
    with pytest.raises(NotImplementedError, match="add_zero_attn=True"):
        LinearMultiheadAttention(8, 2, add_zero_attn=True)
    for heads in (3, 0):
        with pytest.raises(ValueError, match=f"num_kv_heads must divide num_heads=4, got {heads}"):
            LinearMultiheadAttention(8, 4, num_kv_heads=heads)
    with pytest.raises(TypeError, match=r"num_kv_heads must be an integer, got 2\.0"):
        LinearMultiheadAttention(8, 4, num_kv_heads=2.0)
    with pytest.raises(TypeError, match="num_kv_heads must be an integer, got True"):
        LinearMultiheadAttention(8, 4, num_kv_heads=True)
    assert LinearMultiheadAttention(8, 4, num_kv_heads=torch.tensor(2)).num_kv_heads == 2
    with pytest.raises(TypeError, match="normalize must be a bool, got 'no'"):
        LinearMultiheadAttention(8, 4, normalize="no")
    with pytest.raises(TypeError, match="eps must be a number, got 'x'"):
        LinearMultiheadAttention(8, 4, eps="x")
    with pytest.raises(ValueError, match="eps must be finite and not negative, got -1"):
        LinearMultiheadAttention(8, 4, eps=-1)
    with pytest.raises(ValueError, match="feature_map must be .* got 'softmax'"):
        LinearMultiheadAttention(8, 2, feature_map="softmax")
    with pytest.raises(ValueError, match=r"decay must hold num_heads=2 numbers, got shape \(3,\)"):
        LinearMultiheadAttention(8, 2, decay=[0.0, 0.0, 0.0])
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        LinearMultiheadAttention(9, 2)
    with pytest.raises(ValueError, match=r"x must be \(batch, 8\) or \(8,\), got \(3, 2, 8\)"):
        module.step(x, module.initial_state(2))
    with pytest.raises(ValueError, match="step is self-attention"):
        LinearMultiheadAttention(8, 2, kdim=4).step(x[0], None)
    with pytest.raises(NotImplementedError, match="torch.jit.script"):
        torch.jit.script(module)


# Steps and states


def modules():
    learnt = nn.Sequential(nn.Linear(4, 6), nn.Softplus())
    options = {
        **CONFIGURATIONS,
        "favor": {"feature_map": FavorFeatures(4, 10)},
        "learnt features": {"feature_map": learnt},
        "learnt decay": {"decay": nn.Parameter(torch.tensor([-0.5, -0.1, 0.0, -2.0]))},
    }
    return {name: double(LinearMultiheadAttention(16, 4, **given)) for name, given in options.items()}


@pytest.mark.parametrize("name", modules())
def test_steps_are_the_causal_sequence_in_values_and_gradients(name):
    module = modules()[name]
    x = torch.randn(6, 2, 16, dtype=torch.float64, requires_grad=True)
    parameters = [x, *module.parameters()]
    whole, _ = module(x, x, x, is_causal=True)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, parameters, grad)

    # A prompt of two tokens at once, then one by one.
    prompt, state = module(x[:2], x[:2], x[:2], is_causal=True, return_state=True)
    outputs = [prompt]
    for token in x[2:]:
        out, state = module.step(token, state)
        outputs.append(out.unsqueeze(0))
    stepped = torch.cat(outputs)
    torch.testing.assert_close(stepped, whole)
    for ours, theirs in zip(torch.autograd.grad(stepped, parameters, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)

    state = None
    for token, expected_token in zip(x, whole, strict=True):
        out, state = module.step(token, state)
        torch.testing.assert_close(out, expected_token)
    alone, _ = module.step(x[0, 0], module.initial_state(1))
    torch.testing.assert_close(alone, whole[0, 0])


@torch.no_grad()
def test_a_step_leaves_the_given_state_alone_unless_inplace():
    module = LinearMultiheadAttention(8, 2)
    x = torch.randn(3, 2, 8)
    _, state = module.step(x[0])
    kept = state.clone()
    first, forked = module.step(x[1], state)
    assert all(map(torch.equal, state, kept))
    again, _ = module.step(x[1], state)
    assert torch.equal(first, again)
    out, same = module.step(x[1], state, inplace=True)
    torch.testing.assert_close(out, first)
    assert same.kv is state.kv and not torch.equal(state.kv, kept.kv)
    torch.testing.assert_close(state.kv, forked.kv)


def test_states_of_layers_are_a_list_that_can_be_reordered():
    layers = nn.ModuleList(LinearMultiheadAttention(8, 2) for _ in range(3))
    tokens = torch.randn(4, 3, 8)

    def run(tokens, states):
        outputs = []
        for x in tokens:
            for i, layer in enumerate(layers):
                x, states[i] = layer.step(x, states[i])
            outputs.append(x)
        return torch.stack(outputs), states

    beams = torch.tensor([2, 0])
    _, states = run(tokens[:2], [layer.initial_state(3) for layer in layers])
    out, _ = run(tokens[2:, beams], [state.index_select(beams) for state in states])
    whole, _ = run(tokens, [None] * 3)
    torch.testing.assert_close(out, whole[2:, beams])


def test_initial_state_has_the_modules_device_precision_and_number_of_features():
    module = LinearMultiheadAttention(8, 2, feature_map=FavorFeatures(4, 7))
    state = module.initial_state(3)
    assert state.kv.shape == (3, 2, 7, 4) and state.z.shape == (3, 2, 7)
    assert state.kv.dtype == state.z.dtype == torch.float32
    assert module.bfloat16().initial_state(3).kv.dtype == torch.float32
    assert module.double().initial_state(3).kv.dtype == torch.float64
    assert module.initial_state(3, device="meta", dtype=torch.float16).z.device.type == "meta"
    assert module.initial_state(0).kv.shape == (0, 2, 7, 4)


def test_grouped_and_decaying_states_start_where_others_do():
    module = LinearMultiheadAttention(16, 4, num_kv_heads=2, decay=[-1.0] * 4)
    assert module.initial_state(3).kv.shape == (3, 4, 4, 4)
    assert module.in_proj_weight.shape == (32, 16) and module.in_proj_bias.shape == (32,)


# Life as a module


def test_decay_is_a_buffer_or_a_learnt_parameter():
    fixed = LinearMultiheadAttention(8, 2, decay=(-1.0, -0.5))
    assert "decay" in dict(fixed.named_buffers()) and "decay" in fixed.state_dict()
    assert fixed.decay.dtype == torch.float32
    given = torch.tensor([-1.0, -0.5])
    copied = LinearMultiheadAttention(8, 2, decay=given)
    given.zero_()
    assert torch.equal(copied.decay, fixed.decay)
    learnt = LinearMultiheadAttention(8, 2, decay=nn.Parameter(torch.tensor([-1.0, -0.5])))
    learnt.load_state_dict(fixed.state_dict())
    x = torch.randn(5, 2, 8)
    out, _ = learnt(x, x, x, is_causal=True)
    torch.testing.assert_close(out, fixed(x, x, x, is_causal=True)[0])
    out.square().sum().backward()
    assert learnt.decay.grad.abs().min() > 0


@pytest.mark.parametrize("name", ["plain", "grouped", "favor", "learnt decay"])
def test_copies_and_pickles(name):
    module = modules()[name]
    x = torch.randn(4, 2, 16, dtype=torch.float64)
    expected = module(x, x, x, is_causal=True)[0]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, x, x, is_causal=True)[0], expected)
    assert "16, num_heads=4, feature_map=" in repr(module)


def test_replace_attention_leaves_it_alone():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.self_attn = LinearMultiheadAttention(8, 2)
    assert fastattn.replace_attention(layer) == 0
    assert type(layer.self_attn) is LinearMultiheadAttention


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = LinearMultiheadAttention(8, 2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options)


def test_inside_an_encoder_of_torch_it_is_what_runs_in_every_mode():
    model = encoder()
    x, hidden = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    def outputs():
        return [
            model(x),
            model(x, mask=mask, is_causal=True),
            model(x, src_key_padding_mask=hidden).masked_fill(hidden.unsqueeze(-1), 0.0),
        ]

    expected = outputs()
    by_hand = x
    for layer in model.layers:
        by_hand = layer.norm1(by_hand + layer.self_attn(by_hand, by_hand, by_hand)[0])
        by_hand = layer.norm2(by_hand + layer.linear2(torch.relu(layer.linear1(by_hand))))
    torch.testing.assert_close(expected[0], by_hand)
    with torch.no_grad():
        # In evaluation the encoder may turn the padded batch into a nested tensor.
        for ours, theirs in zip(
            map(torch.Tensor.detach, expected), (model.eval(), *outputs())[1:], strict=True
        ):
            torch.testing.assert_close(theirs, ours)


def test_nested_tensors_are_sequences_of_their_own():
    module = LinearMultiheadAttention(8, 2, batch_first=True).eval()
    sequences = [torch.randn(n, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(sequences)
    out, state = module(nested, nested, nested)
    assert state is None
    for ours, x in zip(out.unbind(), sequences, strict=True):
        torch.testing.assert_close(ours, module(x, x, x)[0])
    with pytest.raises(AssertionError, match="no masks and states beside nested"):
        module(nested, nested, nested, is_causal=True)


def test_compiles_in_one_piece_with_masks_and_for_steps():
    module = LinearMultiheadAttention(8, 2, batch_first=True, decay=[-1.0, -0.1])
    x, mask = torch.randn(2, 6, 8), nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(2, 6)
    padding[1, 4:] = float("-inf")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    options = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": True}
    torch.testing.assert_close(compiled(x, x, x, **options)[0], module(x, x, x, **options)[0])
    with pytest.raises(Exception, match="only 0 and -inf"):
        compiled(x, x, x, **options | {"key_padding_mask": padding - 1.0})
    step = torch.compile(module.step, fullgraph=True, backend="aot_eager")
    state = module.initial_state(2)
    for ours, theirs in zip(step(x[:, 0], state), module.step(x[:, 0], state), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_mask_that_cannot_be_read_needs_is_causal():
    module = LinearMultiheadAttention(8, 2, batch_first=True).to("meta")
    x, mask = torch.empty(2, 6, 8, device="meta"), torch.empty(6, 6, device="meta")
    assert module(x, x, x, attn_mask=mask, is_causal=True)[0].shape == (2, 6, 8)
    with pytest.raises(NotImplementedError, match="a mask whose values cannot be read here"):
        module(x, x, x, attn_mask=mask)


def test_autocast_and_half_precision_keep_states_in_float32():
    module, x = LinearMultiheadAttention(8, 2, batch_first=True), torch.randn(2, 6, 8)
    exact = module(x, x, x, is_causal=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = module(x, x, x, is_causal=True, return_state=True)
        token, state = module.step(x[:, 0], state)
    assert out.dtype == token.dtype == torch.bfloat16 and state.kv.dtype == torch.float32
    assert (out.float() - exact).norm() < 0.02 * exact.norm()
    half, y = copy.deepcopy(module).bfloat16(), x.bfloat16()
    out, state = half(y, y, y, is_causal=True, return_state=True)
    token, state = half.step(y[:, 0], state)
    assert out.dtype == token.dtype == torch.bfloat16 and state.z.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_empty_batches_and_sequences(shape):
    module = LinearMultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(shape, requires_grad=True)
    for is_causal in (False, True):
        out, state = module(x, x, x, is_causal=is_causal, return_state=True)
        assert out.shape == shape and state.kv.shape == (shape[0], 2, 4, 4)
        assert state.kv.eq(0).all()
        out.sum().backward()
