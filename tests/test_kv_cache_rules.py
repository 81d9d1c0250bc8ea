"""Attention over a cache: what is refused, and that it has written nothing then; PyTorch's machinery."""

import math

import kv_cache_cases
import operator_checks
import pytest
import torch
from kv_cache_cases import OP, call, make_case
from operator_checks import require
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn

poisoned, impl = operator_checks.poisoned, kv_cache_cases.impl


def assert_refused(case, impl, error, message, **changed):
    """The message says why, and the caches are what they were."""
    arguments = case.arguments() | changed
    before = {
        n: arguments[n].clone()
        for n in ("key_cache", "value_cache")
        if isinstance(arguments[n], torch.Tensor)
    }
    with pytest.raises(error, match=message):
        fastattn.attention_with_kv_cache(**arguments, impl=impl)
    for name, tensor in before.items():
        assert torch.equal(arguments[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


PLAIN = make_case(dtype=torch.float32)
x = torch.randn


@pytest.mark.parametrize("changed, message", [
    ({"query": x(3, 4, 8)}, r"query must have 4 dimensions, got query \(3, 4, 8\)"),
    ({"query": x(3, 3, 1, 8)}, "heads must divide the query's"),
    ({"query": x(3, 4, 1, 6)}, "query and key_cache must have the same head dim"),
    ({"query": x(2, 4, 1, 8)}, r"without block_table key_cache must have room for each of the 2"),
    ({"query": x(3, 4, 1, 8).double()}, "key_cache is torch.float32, query torch.float64"),
    ({"query": x(3, 4, 1, 8).long()}, "query must be float32"),
    ({"value_cache": x(3, 2, 11, 8)}, r"value_cache must be \(3, 2, 13\) and its head dim"),
    ({"key": x(3, 2, 1, 7)}, r"key must be \(3, 2, 1, 8\)"),
    ({"key": x(3, 1, 1, 8)}, r"key must be \(3, 2, 1, 8\)"),
    ({"value": x(3, 2, 2, 8)}, r"value must be \(3, 2, 1, 8\)"),
    ({"value": None}, "key and value must be given together"),
    ({"key": None}, "key and value must be given together"),
    ({"key": x(3, 2, 1, 8).half()}, "key must be torch.float32"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens must be \(3,\)"),
    ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens must be torch.int32 or .* got torch.float"),
    ({"block_table": torch.zeros(3, dtype=torch.int32)}, r"block_table must be \(3, pages of"),
    ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table must be \(3, pages of"),
    ({"block_table": torch.zeros(3, 1)}, "block_table must be torch.int32 or torch.int64"),
    ({"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be \(4,\) or \(3, 4\)"),
    ({"alibi_slopes": torch.zeros(4).half()}, "alibi_slopes must be torch.float32"),
    ({"sinks": torch.zeros(2)}, r"sinks must be \(4,\)"),
    ({"query": x(3, 4, 1, 8, device="meta")}, "key_cache is on cpu, query on meta"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(impl, changed, message):
    assert_refused(PLAIN, impl, RuntimeError, message, **changed)


@pytest.mark.parametrize("changed, error, message", [
    ({"cache_seqlens": None}, TypeError, "cache_seqlens must be a Tensor"),
    ({"cache_seqlens": [3]}, TypeError, "cache_seqlens must be a Tensor, got list"),
    ({"cache_seqlens": True}, TypeError, "cache_seqlens must be an integer, got True"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be an integer of at least 0, got -1"),
    ({"cache_seqlens": 13}, RuntimeError, "cache_seqlens must be from 0 to 12"),
    ({"query": None}, TypeError, "query must be a Tensor"),
    ({"key_cache": [1]}, TypeError, "key_cache must be a Tensor, got list"),
    ({"scale": "a"}, TypeError, "scale must be a number"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative, got -1"),
    ({"softcap": math.nan}, ValueError, "softcap"),
    ({"window_size": 3}, ValueError, "window_size must be a pair"),
    ({"window_size": (1, -2)}, ValueError, "window_size must hold two integers"),
    ({"num_splits": -1}, ValueError, "num_splits must be an integer of at least 0, got -1"),
    ({"num_splits": 1.5}, TypeError, "num_splits must be an integer, got 1.5"),
    ({"num_splits": True}, TypeError, "num_splits must be an integer, got True"),
    ({"is_causal": "yes"}, TypeError, "is_causal must be a bool"),
    ({"return_lse": "yes"}, TypeError, "return_lse must be a bool"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(impl, changed, error, message):
    assert_refused(PLAIN, impl, error, message, **changed)


def test_unknown_or_absent_implementations_are_refused():
    assert_refused(PLAIN, "gpu", ValueError, "impl must be 'auto' or one of")
    assert_refused(PLAIN, "triton", NotImplementedError, "on the CPU Triton only has an interpreter")
    assert_refused(PLAIN, "torch", NotImplementedError, "torch has no kernel")


# Values: lengths, pages, memory


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("page_size", (None, 4))
def test_writing_past_the_end_is_refused(impl, page_size):
    case = make_case(room=0, L=2, page_size=page_size)  # 11 tokens; 3 pages of 4 hold 12
    most = 9 if page_size is None else 10
    message = rf"cache_seqlens must be from 0 to {most}, .* 2 new tokens, got {most + 1} at \[2\]"
    assert_refused(case, impl, RuntimeError, message, cache_seqlens=lengths(5, 0, most + 1))
    assert_refused(
        case, impl, RuntimeError, "cache_seqlens .* got -1 at .1.", cache_seqlens=lengths(5, -1, 9)
    )
    huge = lengths(5, 2**31 - 1, 9)
    assert_refused(case, impl, RuntimeError, "cache_seqlens .* got 2147483647 at .1.", cache_seqlens=huge)
    huge = torch.tensor([5, 2**63 - 1, 9])
    assert_refused(case, impl, RuntimeError, "cache_seqlens .* got 9223372036854775807", cache_seqlens=huge)


@pytest.mark.parametrize("name", ("key_cache", "value_cache"))
def test_caches_that_are_still_to_be_negated(impl, name):
    """Kernels refuse them, and write nothing; the reference writes to them as to any other."""
    negated = torch._neg_view(-getattr(PLAIN, name))
    if impl != "reference":
        message = "negations .* resolve_neg"
        return assert_refused(PLAIN, impl, NotImplementedError, message, **{name: negated})
    plain = PLAIN.arguments() | {n: getattr(PLAIN, n).clone() for n in ("key_cache", "value_cache")}
    expected = fastattn.attention_with_kv_cache(**plain, impl=impl)
    given = plain | {n: getattr(PLAIN, n).clone() for n in ("key_cache", "value_cache")} | {name: negated}
    assert torch.equal(fastattn.attention_with_kv_cache(**given, impl=impl), expected)
    assert torch.equal(negated.nan_to_num(7.0), plain[name].nan_to_num(7.0))
    assert not torch.equal(negated.nan_to_num(7.0), getattr(PLAIN, name).nan_to_num(7.0))


def test_more_new_tokens_than_the_cache_holds_are_refused(impl):
    new = {"key": x(3, 2, 14, 8), "value": x(3, 2, 14, 8)}
    message = "key_cache has room for 13 tokens of a sequence, key has 14"
    assert_refused(PLAIN, impl, RuntimeError, message, cache_seqlens=lengths(0, 0, 0), **new)


def test_reading_past_the_end_is_refused(impl):
    case = make_case(room=0, T=0)
    assert_refused(
        case, impl, RuntimeError, "from 0 to 9, .* 0 new tokens, got 10 at", cache_seqlens=lengths(5, 0, 10)
    )
    none = {"key_cache": torch.empty(3, 2, 0, 8), "value_cache": torch.empty(3, 2, 0, 8)}
    assert_refused(case, impl, RuntimeError, "from 0 to 0, .* got 5", **none)


@pytest.mark.parametrize("page", (-1, 8, 2**31 - 1, -(2**31)))
@pytest.mark.parametrize("T", (0, 2))
def test_pages_that_do_not_exist_are_refused(impl, page, T):
    case = make_case((5, 1, 9), L=2, T=T, page_size=4)
    pages = case.key_cache.shape[0]
    case.block_table[2, 1] = page if page != 8 else pages
    message = (
        rf"block_table must name pages from 0 to {pages - 1} .* got {int(case.block_table[2, 1])} at \[2, 1\]"
    )
    assert_refused(case, impl, RuntimeError, message)


def test_a_table_without_pages_is_refused_where_one_is_needed(impl):
    case = make_case((1, 1), page_size=4)
    none = {"key_cache": torch.empty(0, 2, 4, 8), "value_cache": torch.empty(0, 2, 4, 8)}
    assert_refused(case, impl, RuntimeError, "block_table must name pages", **none)
    none = {"block_table": torch.empty(2, 0, dtype=torch.int32)}
    assert_refused(
        case, impl, RuntimeError, "block_table has room for 0 tokens of a sequence, key has 1", **none
    )


@pytest.mark.parametrize("where", ((0, 1), (1, 0), (2, 0)))
def test_pages_that_two_tokens_would_be_written_to_are_refused(impl, where):
    """A page that is written to is named once, by nobody else and not earlier in the same sequence."""
    case = make_case((5, 1, 9), L=2, page_size=4)
    case.block_table[where] = case.block_table[2, 2]
    message = "block_table must not repeat a page that new tokens are written to, got"
    assert_refused(case, impl, RuntimeError, message)
    case = make_case((5, 1, 9), L=2, T=0, page_size=4)  # to read the same page twice is no problem
    case.block_table[0, 1] = case.block_table[2, 1]
    call(case, impl)


@pytest.mark.parametrize("page_size", (None, 4))
def test_memory_that_is_written_to_and_shared_is_refused(impl, page_size):
    case = make_case(page_size=page_size, L=2)
    shape, numel = case.key_cache.shape, case.key_cache.numel()
    expanded = torch.zeros(shape[0], 1, *shape[2:]).expand(shape)
    assert_refused(case, impl, RuntimeError, "key_cache must not overlap itself", key_cache=expanded)
    assert_refused(case, impl, RuntimeError, "value_cache must not overlap itself", value_cache=expanded)
    assert_refused(
        case,
        impl,
        RuntimeError,
        "value_cache must not share memory with key_cache",
        value_cache=case.key_cache,
    )
    memory = torch.zeros(2 * numel)
    halves = {"key_cache": memory[:numel].view(shape), "value_cache": memory[numel - 1 : -1].view(shape)}
    assert_refused(case, impl, RuntimeError, "value_cache must not share memory with key_cache", **halves)
    # Rows of keys and of values in turn, where those of values reach into the next key.
    rows = numel // shape[3]
    memory = torch.zeros(2 * shape[3] * (rows + 1))
    strides = tuple(2 * n for n in case.key_cache.stride()[:3]) + (1,)
    halves = {
        "key_cache": memory.as_strided(shape, strides),
        "value_cache": memory.as_strided(shape, strides, 2 * shape[3] - 1),
    }
    assert_refused(case, impl, RuntimeError, "value_cache must not share memory with key_cache", **halves)
    for name, cache in (("key", "key_cache"), ("value", "value_cache"), ("value", "key_cache")):
        own = getattr(case, cache)[:1, :, :2].expand(getattr(case, name).shape)
        message = f"{name} must not share memory with {cache}"
        assert_refused(case, impl, RuntimeError, message, **{name: own})
    for cache in ("key_cache", "value_cache"):
        own = getattr(case, cache)[:, :1, 1:3].expand(-1, 4, -1, -1)[:1].expand(3, -1, -1, -1)
        assert_refused(case, impl, RuntimeError, f"query must not share memory with {cache}", query=own)
    reading = make_case(page_size=page_size, T=0)
    reading.value_cache = reading.key_cache  # to read from the same memory is no problem
    call(reading, impl)


def test_gradients_that_would_be_lost_are_refused(impl):
    case = make_case(alibi="h", sinks=True)
    for name in ("query", "key_cache", "value_cache", "key", "value", "alibi_slopes", "sinks"):
        tensor = getattr(case, name).clone().requires_grad_()
        assert_refused(case, impl, RuntimeError, "is for inference .*no_grad", **{name: tensor})
        with torch.no_grad():
            call(case, impl, **{name: tensor})
    with pytest.raises(RuntimeError, match="torch.func cannot transform it"):
        torch.func.vmap(lambda q: call(case, impl, query=q)["out"])(case.query.expand(2, *case.query.shape))
    with torch.inference_mode():
        call(make_case(), impl)


def test_the_bare_operator_refuses_gradients_and_wrong_arguments():
    require("cpu", OP)
    op = torch.ops.fastattn.attention_with_kv_cache
    case = make_case(page_size=4)
    arguments = dict(list(case.arguments().items())[:9])
    options = {"scale": 1.0, "softcap": 0.0, "window_left": -1, "window_right": 0, "num_splits": 0}
    op(**arguments, **options)
    with pytest.raises(RuntimeError, match="is for inference"):
        op(**arguments | {"query": case.query.clone().requires_grad_()}, **options)
    for changed in (
        {"query": x(3, 4, 8)}, {"key_cache": x(3, 4)}, {"value_cache": x(3, 2, 1, 8)}, {"key": x(3, 2, 1, 5)},
        {"value": None}, {"key": None}, {"cache_seqlens": torch.zeros(3)}, {"cache_seqlens": lengths(1)},
        {"block_table": torch.zeros(3, 1)}, {"block_table": lengths(1, 2, 3)}, {"sinks": x(3)},
        {"alibi_slopes": x(2, 2)}, {"softcap": -1.0}, {"window_left": -2}, {"num_splits": -1},
        {"block_table": None},
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            op(**arguments | options | changed)


# PyTorch's machinery


def test_autocast_casts_to_the_dtype_of_the_caches(impl):
    case = make_case((5, 0, 9), L=2, dtype=torch.bfloat16, page_size=4)
    expected = call(case, impl)
    wide = {n: getattr(case, n).float() for n in ("query", "key", "value")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = call(case, impl, **wide)
    assert all(torch.equal(results[n].nan_to_num(7.0), expected[n].nan_to_num(7.0)) for n in expected)


def test_a_backward_notices_that_the_cache_has_changed(impl):
    case = make_case()
    for read_only in (False, True):
        weight = torch.ones(1, requires_grad=True)
        loss = (weight * case.key_cache.nan_to_num_(0.0)).sum()
        new = {"key": None, "value": None, "cache_seqlens": lengths(1, 1, 1)} if read_only else {}
        fastattn.attention_with_kv_cache(**case.arguments() | new, impl=impl)
        if read_only:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("page_size", (None, 4))
def test_compile(impl, page_size):
    """One graph, the eager numbers and caches, and no compilation per length."""

    def step(query, key_cache, value_cache, key, value, seqlens, table):
        return fastattn.attention_with_kv_cache(
            query * 2, key_cache, value_cache, key, value, cache_seqlens=seqlens, block_table=table,
            window_size=(9, -1), return_lse=True, impl=impl,
        )  # fmt: skip

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=None, backend=counter)
    for L, past in ((5, (7, 0)), (8, (9, 3)), (1, (12, 4)), (3, (20, 2)), (30, (0, 0))):
        case = make_case(past, L=L, page_size=page_size, seed=L)
        results = []
        for run in (compiled, step):
            caches = case.key_cache.clone(), case.value_cache.clone()
            outputs = run(case.query, *caches, case.key, case.value, case.cache_seqlens, case.block_table)
            results.append([*outputs, *caches])
        torch.testing.assert_close(*results, equal_nan=True)
        with pytest.raises(RuntimeError, match="cache_seqlens"):
            caches = case.key_cache.clone(), case.value_cache.clone()
            compiled(case.query, *caches, case.key, case.value, case.cache_seqlens + 100, case.block_table)
    assert counter.frame_count <= 3


def test_compile_with_one_number_as_the_length():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fastattn.attention_with_kv_cache, fullgraph=True, backend=counter)
    query, cache = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 9, 4)
    for length in (3, 4, 9):
        expected = fastattn.attention_with_kv_cache(query, cache, cache, cache_seqlens=length)
        torch.testing.assert_close(compiled(query, cache, cache, cache_seqlens=length), expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("page_size", (None, 4))
def test_opcheck(page_size):
    require("cpu", OP)
    for options in (
        {"L": 3}, {"T": 0}, {"alibi": "bh", "sinks": True, "Dv": 3, "L": 2}, {"dtype": torch.bfloat16},
    ):  # fmt: skip
        case = make_case(page_size=page_size, **options)
        case.key_cache, case.value_cache = case.key_cache.nan_to_num(0.0), case.value_cache.nan_to_num(0.0)
        arguments = list(case.arguments().values())[:9]
        torch.library.opcheck(
            torch.ops.fastattn.attention_with_kv_cache.default, (*arguments, 0.5, 0.0, 4, 0, 0)
        )


def test_explain_and_fake_tensors():
    case = make_case(page_size=4)
    explanation = fastattn.explain(fastattn.attention_with_kv_cache, **case.arguments())
    assert explanation.impl == "cpu" and "torch has no kernel" in explanation.reasons["torch"]
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        arguments = {
            n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in case.arguments().items()
        }
        out, lse = fastattn.attention_with_kv_cache(**arguments, return_lse=True)
    expected = call(case, "auto")
    for fake, real in ((out, expected["out"]), (lse, expected["lse"])):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_meta_tensors():
    case = make_case(page_size=4)
    arguments = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in case.arguments().items()}
    out = fastattn.attention_with_kv_cache(**arguments)
    assert out.shape == (3, 4, 1, 8) and out.device.type == "meta"
