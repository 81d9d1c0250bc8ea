"""Triton kernels compiled for GPUs that are not there: `python -m fastattn.kernels` and what it finds."""

import importlib
import mmap
import re
import sys
from pathlib import Path

import kv_cache_cases
import pytest
import torch
from attention_cases import call, make_case
from operator_checks import assert_same, running

from fastattn import _triton, scaled_dot_product_attention, varlen_attention

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and _triton._missing is not None, reason=str(_triton._missing)
)  # on Linux it comes with what the tests require


def read_table(lines) -> list[dict[str, str]]:
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def compiled(run_python, target, *families) -> list[dict[str, str]]:
    chosen = [word for family in families for word in ("--family", family)]
    done = run_python("-m", "fastattn.kernels", "--main", "--target", target, *chosen, TRITON_INTERPRET="0")
    return read_table(done.stdout.splitlines())


# The matrix instruction, and the shared memory of a program in KB.
LIMITS = {
    "cuda:80": ("mma.sync", 163), "cuda:90": ("wgmma", 227), "cuda:100": ("tcgen05.mma", 227),
    "hip:gfx942": ("v_mfma", 64),
}  # fmt: skip


@pytest.mark.parametrize("target", LIMITS)
def test_softmax_attention_compiles(run_python, target):
    """Main cases: within shared memory, and in half precision on its matrix instruction, no spills, 128-bit
    loads."""
    rows = compiled(run_python, target, "attention")
    kernels = ["forward", "grad_query", "grad_key_value"]
    main = [row for row in rows if "float64" not in row["case"]]
    assert [row["kernel"] for row in main] == [*kernels, *kernels, "weights"]
    matrix, shared = LIMITS[target]
    for row in rows:
        assert int(row["shared bytes"]) <= shared << 10, row
    for row in main:
        assert int(row["spilled bytes"]) == 0, row
        assert row["matrix"] == matrix and row["128-bit loads"] == "yes", row


def test_documented_table():
    """The same cases for every target; softmax attention of 64 or 128 channels of 16 bits spills nothing."""
    text = (Path(__file__).parent.parent / "docs/triton.md").read_text()
    rows = read_table(re.search(r"^\| target (?:.*\n)(?:\|.*\n)*", text, re.MULTILINE)[0].splitlines())
    cases = {target: {row["case"] for row in rows if row["target"] == target} for target in LIMITS}
    main = r"attention, b?float16 (64|128) (?!everything)"
    for target, found in cases.items():
        assert found == cases["cuda:80"], target
    assert sum(re.match(main, case) is not None for case in cases["cuda:80"]) == 8
    for row in rows:
        if re.match(main, row["case"]) and row["kernel"] != "weights":
            assert row["spilled bytes"] == "0", row


@pytest.mark.parametrize("target", ("cuda:90", "hip:gfx942"))
def test_attention_over_a_cache_compiles(run_python, target):
    """Decoding, on the older matrix instruction because of its few rows, and a prompt."""
    rows = compiled(run_python, target, "attention over a cache")
    assert {row["kernel"] for row in rows} == {"append", "attend", "join"}
    for row in rows:
        assert int(row["spilled bytes"]) == 0 and row["128-bit loads"] == "yes", row
        assert row["kernel"] != "attend" or row["matrix"] in ("mma.sync", LIMITS[target][0]), row


# Those that read features; the others, and the joins of few parts, read numbers.
GATHERING = {"sum", "max", "dot", "forward", "grad_sources", "grad_gatv2_targets"}


@pytest.mark.parametrize("target", ("cuda:90", "hip:gfx942"))
def test_kernels_of_graphs_compile(run_python, target):
    """No spills, and loads of 128 bits by whoever gathers features."""
    rows = compiled(run_python, target, "aggregation", "graph attention")
    assert {row["kernel"] for row in rows} >= GATHERING | {"join", "join_max", "join_sums", "delta"}
    for row in rows:
        assert row["target"] == target and int(row["spilled bytes"]) == 0, row
        if row["kernel"] in GATHERING and "x 1, " not in row["tile, warps, stages"]:
            assert row["128-bit loads"] == "yes", row


@pytest.mark.parametrize("target", ("cuda:90", "hip:gfx942"))
def test_linear_attention_compiles(run_python, target):
    """On matrix instructions, and on Hopper without spills; the kernel of its backward that only reads is not
    one of products."""
    rows = compiled(run_python, target, "linear attention")
    walks = {f"walk {role}" for role in ("out", "grad_query", "grad_value", "grad_key")}
    assert {row["kernel"] for row in rows} == walks | {"grad_den", "recurrence"}
    for row in rows:
        assert row["128-bit loads"] == "yes", row
        if row["kernel"] in walks:
            assert row["matrix"] == {"cuda:90": "wgmma", "hip:gfx942": "v_mfma"}[target], row
        if target == "cuda:90":
            assert int(row["shared bytes"]) <= 227 << 10 and int(row["spilled bytes"]) == 0, row


def test_what_is_compiled_is_every_tile_of_the_launch_tables(run_python):
    code = """
import torch, fastattn
from fastattn.kernels import __main__ as main, _common, _edges, _launch_tables as tables
from fastattn.kernels import aggregation, attention, graph_attention, kv_cache, linear_attention

def choose(table, device, dtype, width):
    config = tables.choose_config(table, device, dtype, width)
    chosen.add((names[id(table)], config))
    return config

for module in (attention, kv_cache, linear_attention):
    module.choose_config = choose
for module in (attention, kv_cache, linear_attention, aggregation, graph_attention, _edges):
    module.launch = lambda *args, **kwargs: None
names = {id(table): name for name, table in vars(tables).items() if isinstance(table, dict)}
for target in main.TARGETS.values():
    chosen = set()
    with _common.compile_only(main.Offline(target.gpu)):
        for case in main.EVERYTHING:
            main.FAMILIES[case.family](case)
        there = {
            (name, tables.choose_config(getattr(tables, name), torch.device("meta"), dtype, 2**n))
            for name in names.values() if name in tables.__all__
            for dtype in (torch.float16, torch.float32, torch.float64) for n in range(4, 10)
            if name != "WALK_TF32" or (dtype != torch.float64 and target.gpu.backend == "cuda")
        }
    assert len(there) > 20 and there <= chosen, there - chosen
"""
    run_python("-c", code, TRITON_INTERPRET="0")


def test_nothing_is_compiled_in_the_interpreter(run_python):
    done = run_python("-m", "fastattn.kernels", check=False, TRITON_INTERPRET="1")
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr


def packed_call() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(40, H, 12, generator=generator).requires_grad_() for H in (2, 1, 1))
    bounds = torch.tensor([0, 35, 35, 40], dtype=torch.int32)
    out = varlen_attention(query, key, value, bounds, bounds, is_causal=True, impl="triton")
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    return dict(zip(("out", "grad_query", "grad_key", "grad_value"), (out.detach(), *grads), strict=True))


def cached_call(lengths=(5, 40), **options) -> dict[str, torch.Tensor]:
    results = kv_cache_cases.call(kv_cache_cases.make_case(lengths, **options), "triton")
    return {name: results[name] for name in ("out", "lse")}


DESCRIBED = {
    # Keys and values forward and for queries' gradient, and queries for theirs.
    "dense": (6, lambda: call(
        make_case(1, 4, 2, 40, 70, 12, 20, torch.float32, window_size=(20, 3), padding=True), "triton"
    )),
    "packed": (6, packed_call),
    "cache": (2, cached_call),
    "pages": (2, lambda: cached_call(page_size=32)),
    "small pages": (0, lambda: cached_call((5, 9), page_size=8)),  # blocks lie in several of them
}  # fmt: skip


@pytest.mark.parametrize("form", DESCRIBED)
def test_tensor_descriptors_change_no_bit(monkeypatch, form):
    count, run = DESCRIBED[form]
    with running("triton"):
        kernels = importlib.import_module("fastattn.kernels._common")
        used, describe = [], kernels.TensorDescriptor
        monkeypatch.setattr(kernels, "TensorDescriptor", lambda *args: used.append(args) or describe(*args))
        described = run()
        assert len(used) == count
        monkeypatch.setattr(kernels, "DESCRIPTORS", {})
        assert_same(run(), described)
        assert len(used) == count


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with a stride whose 16-fold leaves 32 bits; pages between its elements are never touched."""
    strides = [1] * tensor.dim()
    strides[dim] = 2**27 + 8
    elements = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1
    memory = mmap.mmap(-1, elements * tensor.itemsize)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("strided", ("query", "key", "grad_out", "grad_lse"))
def test_offsets_within_a_tile_that_32_bits_do_not_hold(strided):
    tensors = {name: torch.randn(1, 1, 17, 1, dtype=torch.float16) for name in ("query", "key", "grad_out")}
    tensors["grad_lse"] = torch.randn(1, 1, 17)

    def run(query, key, grad_out, grad_lse):
        inputs = [t.requires_grad_() for t in (query, key)]
        results = scaled_dot_product_attention(*inputs, key, return_lse=True, impl="triton")
        grads = torch.autograd.grad(results, inputs, (grad_out, grad_lse))
        return [t.detach() for t in (*results, *grads)]

    with running("triton"):
        expected = run(**tensors)
        far = far_apart(tensors[strided].detach(), 2)
        assert all(map(torch.equal, run(**tensors | {strided: far}), expected))


def test_offsets_within_a_tile_have_32_bits_where_these_do():
    """However long sequences are and however many: the wider ones take registers."""
    with running("triton"):
        needs_wide_offsets = importlib.import_module("fastattn.kernels._common").needs_wide_offsets
    long = torch.empty(2, 4, 2**20, 128, device="meta")
    assert not needs_wide_offsets(long, None)
    assert needs_wide_offsets(long, long.permute(0, 2, 1, 3))


def test_an_interpreter_within_an_interpreter():
    x = torch.randn(1, 1, 5, 4)
    with running("triton"):
        with running("triton"):
            expected = scaled_dot_product_attention(x, x, x, impl="triton")
        assert torch.equal(scaled_dot_product_attention(x, x, x, impl="triton"), expected)


@pytest.mark.parametrize(
    "setting",
    ("backends.cuda.matmul.fp32_precision", "backends.fp32_precision", "backends.cuda.matmul.allow_tf32"),
)
def test_tf32_is_used_where_torch_may(run_python, setting):
    """However it was allowed: torch refuses to read the older of its settings once a newer one was made."""
    allowed = "True" if "allow" in setting else '"tf32"'
    code = f"""
import torch, fastattn
from fastattn import _triton
from fastattn.kernels._common import precision
cpu = torch.device("cpu")
assert precision(torch.float32, cpu) == "ieee"
torch.{setting} = {allowed}
assert precision(torch.float32, cpu) == "tf32"
assert precision(torch.float16, cpu) == precision(torch.float64, cpu) == "ieee"
with _triton.interpreter():
    x = torch.ones(1, 1, 2, 4)
    assert torch.equal(fastattn.scaled_dot_product_attention(x, x, x, impl="triton"), x)
"""
    run_python("-c", code, TRITON_INTERPRET="1")


def test_float16_in_linear_attention_needs_the_range_of_float32(run_python):
    """TF32 has it and is fast; AMD's GPUs, also where torch is not built for them, form exact products."""
    code = """
import torch
from fastattn.kernels import __main__ as main, _common, linear_attention
for name, target in main.TARGETS.items():
    with _common.compile_only(main.Offline(target.gpu)):
        operand, _, precision = linear_attention._operand(torch.float16, torch.device("meta"))
    assert (str(operand), precision) == ("fp32", "ieee" if name.startswith("hip") else "tf32"), name
"""
    run_python("-c", code, TRITON_INTERPRET="0")
