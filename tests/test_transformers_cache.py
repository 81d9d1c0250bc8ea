"""integration.GrowingCache holds what transformers' DynamicCache holds, where it was."""

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn.integrations.transformers as integration

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, D = 2, 2, 4
ACTIONS = ("append", "append", "append", "crop", "beams", "repeat", "select", "copy", "reset")


def tokens(batch, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, count, D, generator=generator).to(dtype) for _ in range(2)]


def append(caches, batch, count, seed=0, dtype=torch.float32):
    """What the last cache returned."""
    found = []
    for layer in range(LAYERS):
        for cache in caches:
            returned = cache.update(*tokens(batch, count, seed + layer, dtype), layer)
            assert torch.equal(returned[0], cache.layers[layer].keys)
            assert torch.equal(returned[1], cache.layers[layer].values)
        found += returned
    return found


def assert_same(found, expected):
    assert found.get_seq_length() == expected.get_seq_length()
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        if not theirs.is_initialized:
            assert not ours.is_initialized
            continue
        for name in ("keys", "values"):
            ours_held, theirs_held = getattr(ours, name), getattr(theirs, name)
            assert ours_held.dtype == theirs_held.dtype and torch.equal(ours_held, theirs_held)


def rooms(cache):
    return [held.data_ptr() for layer in cache.layers for held in (layer.keys, layer.values)]


@pytest.mark.parametrize("max_length", (0, 7, 100))
@pytest.mark.parametrize("seed", range(8))
def test_any_program_leaves_what_it_leaves_in_a_dynamic_cache(seed, max_length):
    choose = random.Random(seed)
    found, expected = integration.GrowingCache(max_length=max_length), transformers.DynamicCache()
    batch, modes = 2, (torch.no_grad, torch.inference_mode, torch.enable_grad)
    seen = []
    for step in range(60):
        with choose.choice(modes)():
            action = choose.choice(ACTIONS)
            length = expected.get_seq_length()
            batch = len(expected.layers[0].keys) if length else batch
            if action == "append" or length == 0:
                returned = append((expected, found), batch, choose.randint(1, 5), seed=step)
                if choose.random() < 0.3:
                    seen += [(tensor, tensor.clone()) for tensor in returned]
                del returned
            elif action == "copy":
                kept = found
                found = choose.choice((copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))))(found)
                append((kept,), batch, 2, seed=-step)  # is another one's
            for cache in (found, expected):
                if length == 0:
                    continue
                if action == "crop":
                    cache.crop(-min(2, length - 1))
                elif action == "beams":
                    cache.reorder_cache(torch.tensor([step % batch, *range(1, batch)]))
                elif action == "repeat" and batch < 9:
                    cache.batch_repeat_interleave(2)
                elif action == "select" and batch > 1:
                    cache.batch_select_indices(torch.tensor([batch - 1, 0]))
                elif action == "reset":
                    cache.reset()
            assert_same(found, expected)
    assert all(torch.equal(*pair) for pair in seen)


@torch.no_grad()
def test_tokens_stay_where_they_are():
    cache = integration.GrowingCache(max_length=40)
    append((cache,), 3, 10)
    first = rooms(cache)
    for n in range(30):
        append((cache,), 3, 1, seed=n)
        assert rooms(cache) == first
    append((cache,), 3, 1)
    assert all(layer.keys._base.shape[2] == layer.values._base.shape[2] == 41 + 20 for layer in cache.layers)
    cache.reset()
    append((cache,), 3, 50)
    cache.crop(-20)
    second = rooms(cache)
    append((cache,), 3, 25)
    assert rooms(cache) == second


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("view", (lambda t: t, Tensor.detach, lambda t: t[0, 0], Tensor.numpy))
def test_what_somebody_holds_does_not_change(view, mode):
    cache = integration.GrowingCache(max_length=40)
    with mode():
        held = view(append((cache,), 2, 8)[0])
        before = copy.deepcopy(held)
        cache.crop(-5)
        append((cache,), 2, 2, seed=7)
        cache.reset()
        append((cache,), 2, 8, seed=8)
        assert (held == before).all()


@torch.no_grad()
def test_copies_of_layers_share_no_room():
    cache, other = integration.GrowingCache(max_length=40), integration.GrowingCache()
    append((cache,), 2, 8)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for seed in (1, 2):
        first = append((cache,), 2, 1, seed)[0]
        before = first.clone()
        append((other,), 2, 1, -seed)
        assert torch.equal(first, before)


PRUNED = {
    "every other token": lambda t: t[:, :, ::2],
    "the last tokens": lambda t: t[:, :, 3:],
    "as many tokens as heads, transposed": lambda t: t[:, :, :HEADS].transpose(1, 2),
    "one sequence for all": lambda t: t[:1].expand(2, -1, -1, -1),
    "one head for all": lambda t: t[:, :1].expand(-1, HEADS, -1, -1),
    "one token for all": lambda t: t[:, :, :1].expand(-1, -1, 3, -1),
    "somebody's": lambda t: torch.ones(2, HEADS, 30, D)[:, :, :5],
    "nothing": lambda t: t[:, :, :0],
}


@pytest.mark.parametrize("prune", PRUNED.values(), ids=PRUNED)
@torch.no_grad()
def test_any_tensors_may_be_put_in_place_of_the_tokens(prune):
    caches = integration.GrowingCache(max_length=40), transformers.DynamicCache()
    append(caches, 2, 8)
    for cache in caches:
        for layer in cache.layers:
            layer.keys, layer.values = prune(layer.keys), prune(layer.values)
    places = caches[0].layers[0].keys
    behind = places if places._base is None else places._base
    before = behind.clone()
    append(caches, 2, 1, seed=3)
    assert_same(*caches)
    assert hasattr(behind, "taken") or torch.equal(behind, before)


@torch.no_grad()
def test_beams_move_once_for_each_token():
    cache = integration.GrowingCache()
    append((cache,), 2, 10)
    cache.reorder_cache(torch.tensor([1, 0]))
    moved = rooms(cache)
    append((cache,), 2, 1)
    assert rooms(cache) == moved


def test_a_backward_finds_what_its_forward_saw():
    cache = integration.GrowingCache()
    with torch.no_grad():
        cache.update(*tokens(1, 8), 0)
    new = [t.requires_grad_() for t in tokens(1, 1, seed=1)]
    keys, values = cache.update(*new, 0)
    product = (keys * values).sum()
    with torch.no_grad():
        cache.update(*tokens(1, 2, seed=2), 0)
    product.backward()
    assert torch.equal(new[0].grad, new[1].detach())


def test_a_backward_finds_what_was_returned_without_gradients():
    cache, weight = integration.GrowingCache(max_length=40), torch.ones(D, requires_grad=True)
    with torch.no_grad():
        keys = append((cache,), 2, 8)[0]
    product = (keys * weight).sum()
    with torch.no_grad():
        append((cache,), 2, 1)
    product.backward()
    assert torch.allclose(weight.grad, keys.sum((0, 1, 2)))


def test_room_is_given_back_where_gradients_are_recorded():
    cache = integration.GrowingCache(max_length=40)
    with torch.no_grad():
        append((cache,), 2, 8)
    room = weakref.ref(cache.layers[0].keys._base)
    append((cache,), 2, 1)
    gc.collect()
    assert room() is None


@torch.no_grad()
def test_tokens_of_a_transform_follow_those_of_before():
    cache = integration.GrowingCache(max_length=40)
    before = append((cache,), 1, 4)[-2]
    new = torch.randn(3, 1, HEADS, 2, D)
    keys = torch.func.vmap(lambda tokens: cache.update(tokens, tokens, LAYERS - 1)[0])(new)
    assert torch.equal(keys[1], torch.cat([before, new[1]], 2))


@torch.no_grad()
def test_a_traced_step_does_not_write_to_the_cache():
    cache = integration.GrowingCache(max_length=40)
    before = append((cache,), 1, 4)[0]

    def step(keys, values):
        return copy.copy(cache.layers[0]).update(keys, values)

    graph = make_fx(step)(*tokens(1, 1))
    first = graph(*tokens(1, 1, seed=1))[0]
    graph(*tokens(1, 1, seed=2))
    assert torch.equal(first, torch.cat([before, tokens(1, 1, seed=1)[0]], 2))


@torch.no_grad()
def test_other_tokens_are_as_in_a_dynamic_cache():
    caches = integration.GrowingCache(), transformers.DynamicCache()
    append(caches, 1, 4, dtype=torch.bfloat16)
    append(caches, 1, 4)
    assert_same(*caches)
    assert caches[0].layers[0].keys.dtype == torch.float32
    for cache in caches:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            cache.update(*tokens(3, 1), 0)
        cache.crop(-8)
        assert cache.update(*tokens(1, 2, dtype=torch.bfloat16), 0)[0].dtype == torch.float32
        cache.crop(-2)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            cache.update(*tokens(3, 1), 0)
        assert cache.update(torch.ones(2, 3, D), torch.ones(2, 3, 1), LAYERS)[0].shape == (2, 3, D)
        with pytest.raises(RuntimeError, match="same number of dimensions"):
            cache.update(*tokens(3, 1), LAYERS)


def test_layers_with_a_window_are_those_of_transformers():
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=4)
    kinds = [layer.is_sliding for layer in transformers.DynamicCache(config=config).layers]
    layers = integration.GrowingCache(config).layers
    assert any(kinds) and not all(kinds)
    for layer, sliding in zip(layers, kinds, strict=True):
        assert layer.is_sliding == sliding and hasattr(layer, "_max_length") != sliding


@pytest.mark.parametrize("max_length, error", ((-1, ValueError), (1.5, TypeError), (True, TypeError)))
def test_a_length_that_is_none_is_refused(max_length, error):
    with pytest.raises(error, match="max_length"):
        integration.GrowingCache(max_length=max_length)


def test_a_length_in_place_of_the_configuration_is_refused():
    with pytest.raises(TypeError, match="config must be .* got int"):
        integration.GrowingCache(512)


def test_the_module_has_no_other_names():
    with pytest.raises(AttributeError, match="Growing"):
        integration.Growing  # noqa: B018
