"""KVCache: random programs of append, truncate and reorder against plain lists of tensors; and its errors."""

import copy
import itertools
import math
import pickle

import numpy as np
import operator_checks
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_cache_cases import OP
from operator_checks import require

import fastattn
from fastattn import KVCache

poisoned = operator_checks.poisoned

Hkv, H, D, Dv, MOST = 2, 4, 4, 3, 24


def attend(query, key, value):
    """One sequence, (heads, tokens, D): the last query sees the last token."""
    return fastattn.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, causal_alignment="lower_right", enable_gqa=True,
        impl="reference",
    )[0]  # fmt: skip


class Programs(RuleBasedStateMachine):
    """``tokens[layer][sequence]`` and ``values`` are (Hkv, length, D): what the cache has to hold."""

    @initialize(
        batch=st.integers(0, 4), layers=st.integers(1, 2), page_size=st.sampled_from((None, 1, 3, 8)),
        limited=st.booleans(),
    )  # fmt: skip
    def start(self, batch, layers, page_size, limited):
        self.generator = torch.Generator().manual_seed(0)
        self.most = MOST if limited or page_size is None else None
        self.cache = KVCache(batch, Hkv, D, self.most, value_dim=Dv, layers=layers, page_size=page_size)
        self.tokens = [[torch.empty(Hkv, 0, D)] * batch for _ in range(layers)]
        self.values = [[torch.empty(Hkv, 0, Dv)] * batch for _ in range(layers)]

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def lengths(self, of=min):
        """What every layer holds of each sequence, or the longest of them."""
        return [of(t.shape[1] for t in of_layers) for of_layers in zip(*self.tokens, strict=True)]

    def append(self, layer, L, T):
        B = len(self.tokens[0])
        query, key, value = self.normal(B, H, L, D), self.normal(B, Hkv, T, D), self.normal(B, Hkv, T, Dv)
        out = self.cache.attend(query, *((key, value) if T else ()), layer=layer)
        for b in range(B):
            self.tokens[layer][b] = torch.cat([self.tokens[layer][b], key[b]], 1)
            self.values[layer][b] = torch.cat([self.values[layer][b], value[b]], 1)
            expected = attend(query[b], self.tokens[layer][b], self.values[layer][b])
            torch.testing.assert_close(out[b], expected)

    @rule(T=st.integers(0, 7), L=st.integers(1, 3), only_first=st.booleans())
    def step(self, T, L, only_first):
        """All layers take the next tokens, or the first alone, unless they do not fit."""
        for layer in range(1 if only_first else self.cache.layers):
            lengths = [t.shape[1] for t in self.tokens[layer]]
            if self.most is not None and T and max(lengths, default=0) + T > self.most:
                new = self.normal(len(lengths), Hkv, T, D), self.normal(len(lengths), Hkv, T, Dv)
                with pytest.raises(RuntimeError, match="the cache is full"):
                    self.cache.attend(self.normal(len(lengths), H, T, D), *new, layer=layer)
            else:
                self.append(layer, L, T)

    @precondition(lambda self: self.tokens[0])
    @rule(data=st.data())
    def truncate(self, data):
        lengths = [data.draw(st.integers(0, n)) for n in self.lengths()]
        self.cache.truncate(data.draw(st.sampled_from((list, torch.tensor)))(lengths))
        for held in (*self.tokens, *self.values):
            held[:] = [t[:, :n] for t, n in zip(held, lengths, strict=True)]

    @precondition(lambda self: self.tokens[0])
    @rule(data=st.data())
    def reorder(self, data):
        index = data.draw(st.lists(st.integers(0, len(self.tokens[0]) - 1), max_size=5))
        self.cache.reorder(torch.tensor(index, dtype=torch.int64))
        for held in (*self.tokens, *self.values):
            held[:] = [held[n] for n in index]

    @rule()
    def reset(self):
        self.cache.reset()
        for held in (*self.tokens, *self.values):
            held[:] = [t[:, :0] for t in held]

    @rule(
        how=st.sampled_from((copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: c.to("cpu")))
    )
    def duplicate(self, how):
        """The copy goes on; what happens to it leaves the original alone."""
        original, self.cache = self.cache, how(self.cache)
        original.reset()
        for memory in (*original._keys, *original._values):
            memory.fill_(math.nan)

    @invariant()
    def holds_what_it_was_given(self):
        assert self.cache.lengths.tolist() == self.lengths() and self.cache.batch_size == len(self.lengths())
        for layer in range(self.cache.layers):
            for b in range(self.cache.batch_size):
                keys, values = self.cache.sequence(b, layer)
                assert torch.equal(keys, self.tokens[layer][b])
                assert torch.equal(values, self.values[layer][b])

    @invariant()
    def counts_its_pages(self):
        cache = self.cache
        named = [page for pages in cache._pages for page in pages]
        assert cache._uses == [named.count(page) for page in range(cache.num_pages)]
        assert sorted(cache._free) == [page for page, uses in enumerate(cache._uses) if uses == 0]
        if self.most is not None and self.lengths():
            pages = -(-self.most // cache.page_size)
            assert len(set(named)) <= len(self.lengths()) * pages
        paged = [-(-n // cache.page_size) for n in self.lengths(max)]
        assert [len(pages) for pages in cache._pages] == paged


Programs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
TestPrograms = pytest.mark.usefixtures("poisoned")(Programs.TestCase)


def test_layers_take_turns():
    """In the middle of a step the first layer is ahead; lengths are those that all layers hold."""
    cache = KVCache(2, 1, 4, 8, layers=2)
    new = [torch.randn(2, 1, 3, 4) for _ in range(3)]
    cache.attend(*new, layer=0)
    assert cache.lengths.tolist() == [0, 0]
    cache.attend(*new, layer=1)
    assert cache.lengths.tolist() == [3, 3] and cache.lengths.dtype == torch.int32


def test_a_layer_that_is_ahead_keeps_its_tokens_where_another_writes_to_a_shared_page():
    cache = KVCache(1, 1, 4, layers=2, page_size=4)
    new = [torch.randn(1, 1, 3, 4) for _ in range(3)]
    cache.attend(*new, layer=0)
    cache.reorder([0, 0])
    cache.attend(*(t.expand(2, -1, -1, -1) for t in new), layer=1)
    for b, layer in itertools.product(range(2), range(2)):
        assert torch.equal(cache.sequence(b, layer)[0], new[1][0])


def test_beams_share_pages_until_they_write():
    cache = KVCache(1, 1, 4, page_size=4)
    cache.attend(*(torch.randn(1, 1, 10, 4) for _ in range(3)))
    held = cache.num_pages
    cache.reorder([0, 0, 0])
    assert len({tuple(pages) for pages in cache._pages}) == 1 and cache.num_pages == held
    cache.attend(*(torch.randn(3, 1, 1, 4) for _ in range(3)))
    first, *rest = zip(*cache._pages, strict=True)
    assert len(set(first)) == 1 and len(set(rest[0])) == 1 and len(set(rest[1])) == 3


def test_memory_is_reused_and_grows_on_demand():
    cache = KVCache(1, 1, 4, page_size=4)
    assert cache.num_pages == 0
    for _ in range(3):
        cache.attend(*(torch.randn(1, 1, 17, 4) for _ in range(3)))
        pages = cache.num_pages
        assert 5 <= pages <= 8
        cache.reset()
    cache.attend(*(torch.randn(1, 1, 17, 4) for _ in range(3)))
    assert cache.num_pages == pages
    assert KVCache(3, 1, 4, 8).num_pages == 3
    limited = KVCache(1, 1, 4, 20, page_size=4)
    limited.attend(*(torch.randn(1, 1, 20, 4) for _ in range(3)))
    assert limited.num_pages == 5


def test_memory_grows_in_few_steps():
    cache, held = KVCache(1, 1, 1, page_size=1), set()
    for _ in range(100):
        cache.attend(*(torch.randn(1, 1, 1, 1) for _ in range(3)))
        held.add(cache.num_pages)
    assert len(held) < 20 and max(held) <= 150


def test_nothing_appended_copies_no_shared_page():
    cache = KVCache(1, 1, 4, page_size=4)
    cache.attend(*(torch.randn(1, 1, 6, 4) for _ in range(3)))
    cache.reorder([0, 0])
    held = cache.num_pages
    cache.attend(*(torch.randn(2, 1, T, 4) for T in (1, 0, 0)))
    assert cache.num_pages == held and cache._pages[0] == cache._pages[1]


def test_options_reach_the_operator_and_the_operator_takes_the_arguments():
    cache = KVCache(2, 2, 4, 16, dtype=torch.bfloat16)
    query, key, value = (torch.randn(2, n, 5, 4).bfloat16() for n in (4, 2, 2))
    options = {"window_size": (2, -1), "softcap": 1.0, "return_lse": True, "sinks": torch.randn(4)}
    results = cache.attend(query, key, value, impl="reference", **options)
    again = fastattn.attention_with_kv_cache(query, **cache.arguments(), impl="reference", **options)
    for a, b in zip(results, again, strict=True):
        assert torch.equal(a, b)
    assert cache.arguments()["cache_seqlens"].tolist() == [5, 5]


def test_to_changes_dtype_and_device_of_a_copy():
    cache = KVCache(2, 1, 4, page_size=4)
    cache.attend(*(torch.randn(2, 1, 6, 4) for _ in range(3)))
    half = cache.to(torch.bfloat16)
    assert half.sequence(1)[0].dtype == torch.bfloat16 and cache.sequence(1)[0].dtype == torch.float32
    assert torch.equal(half.sequence(1)[1], cache.sequence(1)[1].bfloat16())
    assert {t.device.type for t in cache.to("meta").arguments().values()} == {"meta"}
    assert "dtype=torch.bfloat16" in repr(half) and "page_size=4" in repr(half)


def test_torch_save(tmp_path):
    cache = KVCache(2, 1, 4, page_size=4)
    cache.attend(*(torch.randn(2, 1, 6, 4) for _ in range(3)))
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt")
    assert torch.equal(loaded.sequence(1)[0], cache.sequence(1)[0])


@pytest.mark.parametrize("page_size", (None, 4))
@pytest.mark.parametrize("impl", ("cpu", "reference"))
def test_inference_mode_may_begin_and_end_at_any_time(impl, page_size):
    """What one mode made, every other may write to."""
    require(impl, OP)
    new = torch.randn(3, 1, 5, 4)
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    for first, second in itertools.product(modes, modes):
        with first():
            cache = KVCache(2, 1, 4, 24, page_size=page_size)
            cache.attend(*(new[:2],) * 3, impl=impl)
            cache.truncate([5, 2])
            cache.reorder([0, 1, 0])
            cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        with second():
            cache.attend(*(new,) * 3, impl=impl)
            cache.reset()
            cache.attend(*(new,) * 3, impl=impl)
            cache.attend(*(new,) * 3, impl=impl)
        with first():
            cache.attend(*(new,) * 3, impl=impl)
        assert cache.lengths.tolist() == cache.arguments()["cache_seqlens"].tolist() == [15] * 3
        assert torch.equal(cache.sequence(1)[0], new[1].repeat(1, 3, 1))


def test_a_growth_that_failed_can_be_repeated(monkeypatch):
    cache = KVCache(1, 1, 4, layers=2, page_size=4)
    new = [torch.randn(1, 1, 10, 4) for _ in range(3)]
    empty, calls = torch.Tensor.new_empty, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return empty(*arguments)

    monkeypatch.setattr(torch.Tensor, "new_empty", fail_once)
    with pytest.raises(MemoryError):
        cache.attend(*new)
    for layer in range(2):
        cache.attend(*new, layer=layer)
    assert cache.lengths.tolist() == [10] and torch.equal(cache.sequence(0, 1)[1], new[2][0])


@pytest.mark.parametrize("arguments, options, error, message", [
    ((-1, 1, 4, 8), {}, ValueError, "batch_size must be an integer of at least 0, got -1"),
    ((1, 1.5, 4, 8), {}, TypeError, "kv_heads must be an integer, got 1.5"),
    ((1, 1, True, 8), {}, TypeError, "head_dim must be an integer, got True"),
    ((1, 1, 4, 0), {}, ValueError, "max_length must be an integer of at least 1, got 0"),
    ((1, 1, 4), {}, ValueError, "max_length may only be None with page_size"),
    ((1, 1, 4), {"page_size": 0}, ValueError, "page_size must be an integer of at least 1"),
    ((1, 1, 4, 8), {"layers": 0}, ValueError, "layers must be an integer of at least 1"),
    ((1, 1, 4, 8), {"value_dim": "a"}, TypeError, "value_dim must be an integer, got 'a'"),
    ((1, 1, 4, 8), {"dtype": torch.int64}, ValueError, "dtype must be float32, .*, got torch.int64"),
])  # fmt: skip
def test_impossible_caches_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        KVCache(*arguments, **options)


def test_integers_may_be_of_numpy_or_tensors():
    cache = KVCache(np.int64(2), torch.tensor(1), 4, np.int32(8))
    cache.attend(*(torch.randn(2, 1, 6, 4) for _ in range(3)), layer=np.int64(0))
    cache.truncate(np.int64(5))
    assert cache.lengths.tolist() == [5, 5]
    cache.truncate(np.array([4, 3]))
    cache.reorder(np.array([1, 0, 1]))
    assert cache.lengths.tolist() == [3, 4, 3]
    cache.truncate(torch.tensor(2))
    assert cache.lengths.tolist() == [2, 2, 2]


@pytest.mark.parametrize("page_size", (None, 4))
def test_a_refused_call_changes_nothing(page_size):
    cache = KVCache(2, 1, 4, 8, page_size=page_size)
    new = [torch.randn(2, 1, 6, 4) for _ in range(3)]
    small = torch.ones(2, 1, 1, 1, 4)
    cache.attend(*new)
    for error, message, call in (
        (RuntimeError, "sequence 0 has 6 tokens, 6 more are more than", lambda: cache.attend(*new)),
        (RuntimeError, r"holds 2 sequences, query \(1, 1, 6, 4\) 1", lambda: cache.attend(new[0][:1])),
        (RuntimeError, "key must be a tensor of 4 dimensions, got int", lambda: cache.attend(new[0], 3, 4)),
        (RuntimeError, r"key must be \(2, 1, 1, 4\)", lambda: cache.attend(new[0], *small)),
        (RuntimeError, "key and value must be given together", lambda: cache.attend(new[0], small[0])),
        (ValueError, "layer must be from 0 to 0, got 1", lambda: cache.attend(*new, layer=1)),
        (ValueError, "layer must be from 0 to 0, got -1", lambda: cache.arguments(-1)),
        (TypeError, "unexpected keyword", lambda: cache.attend(new[0], dropout=1)),
        (ValueError, r"lengths must be from 0 to \[6, 6\].* got \[7, 0\]", lambda: cache.truncate([7, 0])),
        (ValueError, "lengths must be .* got .-1, -1.", lambda: cache.truncate(-1)),
        (ValueError, "lengths must be .* got .1.", lambda: cache.truncate([1])),
        (ValueError, r"index must name sequences from 0 to 1, got \[0, 2\]", lambda: cache.reorder([0, 2])),
        (TypeError, "index must be an integer, got 0.5", lambda: cache.reorder(torch.tensor([0.5]))),
        (TypeError, "index must be an integer, got True", lambda: cache.reorder(torch.tensor([True, False]))),
        (TypeError, "index must be integers, got 1", lambda: cache.reorder(1)),
        (TypeError, "lengths must be an integer, got 1.0", lambda: cache.truncate(torch.ones(2))),
        (TypeError, "lengths must be an integer, got True", lambda: cache.truncate(True)),
        (TypeError, "layer must be an integer, got None", lambda: cache.attend(*new, layer=None)),
        (ValueError, "index must be from 0 to 1, got 2", lambda: cache.sequence(2)),
        (ValueError, "dtype must be float32, .*, got torch.int64", lambda: cache.to(torch.int64)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert cache.lengths.tolist() == [6, 6]
    for b in range(2):
        keys, values = cache.sequence(b)
        assert torch.equal(keys, new[1][b]) and torch.equal(values, new[2][b])
    with torch.enable_grad(), pytest.raises(RuntimeError, match="is for inference"):
        cache.attend(torch.randn(2, 1, 1, 4, requires_grad=True))
