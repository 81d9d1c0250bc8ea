"""The tests' own tools: cases that are moved to another device, as on a machine with a GPU."""

import aggregation_cases
import attention_cases
import graph_attention_cases
import kv_cache_cases
import linear_attention_cases
import numpy as np
import operator_checks
import pytest
import torch
from operator_checks import CPU, LAYOUTS, moved

import fastattn

# The CPU under another name, so that everything is copied.
ELSEWHERE = torch.device("cpu", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moved_tensor_lies_as_it_did(layout):
    tensor = LAYOUTS[layout](torch.randn(2, 3, 4, 5))[1:]
    twin = moved(tensor, ELSEWHERE)
    assert twin.data_ptr() != tensor.data_ptr() and torch.equal(twin, tensor)
    expanded = torch.randn(3, 1, 2, requires_grad=True).expand(3, 4, 2)
    meta = torch.device("meta")
    for t in (tensor, expanded, torch.empty(0, 3)):
        there = moved(t, meta)
        assert there.device == meta and there.shape == t.shape and there.requires_grad == t.requires_grad
        assert there.stride() == t.stride() and there.storage_offset() == t.storage_offset()
    assert moved(tensor, CPU) is tensor


def test_what_holds_tensors_is_moved_with_them():
    meta = torch.device("meta")
    case = attention_cases.make_case(mask="bool", alibi="h", softcap=1.5)
    there = moved(case, meta)
    assert there.query.device == there.attn_mask.device == there.alibi_slopes.device == meta
    assert there.sinks is None and there.options == case.options and case.query.device == CPU
    assert moved({"a": torch.ones(1), "b": "triton"}, meta)["a"].device == meta
    graph = fastattn.Graph(torch.tensor([[0, 1], [1, 0]]), 2)
    assert moved(graph, ELSEWHERE) is graph


CASES = {
    "attention": (attention_cases, lambda c: c.make_case(L=9, mask="float", sinks=True, dropout_p=0.3)),
    "linear attention": (linear_attention_cases, lambda c: c.make_case(is_causal=True, initial=True)),
    "KV cache": (kv_cache_cases, lambda c: c.make_case(page_size=4, alibi="h", sinks=True)),
    "aggregation": (aggregation_cases, lambda c: c.make_case(weighted=True)),
    "graph attention": (graph_attention_cases, lambda c: c.make_case("gat_attention", dropout_p=0.3)),
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_cases_are_computed_elsewhere(family, monkeypatch):
    module, make = CASES[family]
    case = make(module)
    expected = module.call(case, "reference")
    moves = []
    monkeypatch.setattr(operator_checks, "moved", lambda value, to: moves.append(to) or moved(value, to))
    monkeypatch.setattr(operator_checks, "device", ELSEWHERE)
    results = module.call(case, "reference")
    assert ELSEWHERE in moves and moves[-1] == CPU and results.keys() == expected.keys()
    for name, result in results.items():
        assert np.array_equal(result.numpy(), expected[name].numpy(), equal_nan=True), name
    module.check(results, case)
