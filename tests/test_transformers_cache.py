"""integration.GrowingCache holds what transformers' DynamicCache holds, where it was."""

import copy
import pickle
import random

import pytest
import torch

import fastattn.integrations.transformers as integration

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, D = 2, 2, 4
ACTIONS = ("append", "append", "append", "crop", "beams", "repeat", "select", "copy", "reset")


def tokens(batch, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, count, D, generator=generator).to(dtype) for _ in range(2)]


def append(caches, batch, count, seed=0, dtype=torch.float32):
    for layer in range(LAYERS):
        for cache in caches:
            returned = cache.update(*tokens(batch, count, seed + layer, dtype), layer)
            for found, held in zip(
                returned, (cache.layers[layer].keys, cache.layers[layer].values), strict=True
            ):
                assert torch.equal(found, held)


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
    return [room.data_ptr() for layer in cache.layers for room in layer._rooms]


@pytest.mark.parametrize("max_length", (0, 7, 100))
@pytest.mark.parametrize("seed", range(8))
def test_any_program_leaves_what_it_leaves_in_a_dynamic_cache(seed, max_length):
    choose = random.Random(seed)
    found, expected = integration.GrowingCache(max_length=max_length), transformers.DynamicCache()
    batch, modes = 2, (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for step in range(60):
        with choose.choice(modes)():
            action = choose.choice(ACTIONS)
            length = expected.get_seq_length()
            batch = len(expected.layers[0].keys) if length else batch
            if action == "append" or length == 0:
                append((found, expected), batch, choose.randint(1, 5), seed=step)
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


@torch.no_grad()
def test_tokens_stay_where_they_are():
    cache = integration.GrowingCache(max_length=40)
    append((cache,), 3, 10)
    first = rooms(cache)
    for n in range(30):
        append((cache,), 3, 1, seed=n)
        assert rooms(cache) == first
    append((cache,), 3, 1)
    assert not set(rooms(cache)) & set(first)
    assert all(room.shape[2] == 41 + 20 for layer in cache.layers for room in layer._rooms)
    cache.reset()
    append((cache,), 3, 50)
    cache.crop(-20)
    second = rooms(cache)
    append((cache,), 3, 25)
    assert rooms(cache) == second


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


def test_layers_with_a_window_are_those_of_transformers():
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=4)
    kinds = [layer.is_sliding for layer in transformers.DynamicCache(config=config).layers]
    layers = integration.GrowingCache(config).layers
    assert any(kinds) and not all(kinds)
    for layer, sliding in zip(layers, kinds, strict=True):
        assert layer.is_sliding == sliding and hasattr(layer, "_rooms") != sliding


@pytest.mark.parametrize("max_length, error", ((-1, ValueError), (1.5, TypeError), (True, TypeError)))
def test_a_length_that_is_none_is_refused(max_length, error):
    with pytest.raises(error, match="max_length"):
        integration.GrowingCache(max_length=max_length)


def test_the_module_has_no_other_names():
    with pytest.raises(AttributeError, match="Growing"):
        integration.Growing  # noqa: B018
