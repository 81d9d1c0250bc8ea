"""Triton kernels compiled for GPUs that are not there: `python -m fastattn.kernels` and what it finds."""

import csv
import importlib
import mmap
import re
import shutil
import sys
import warnings
from collections import Counter
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


RECORD = Path(__file__).parent.parent / "docs/triton_kernels.tsv"


def read_table(text) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def compiled(run_python, target, *families) -> list[dict[str, str]]:
    chosen = [word for family in families for word in ("--family", family)]
    done = run_python("-m", "fastattn.kernels", "--main", "--target", target, *chosen, TRITON_INTERPRET="0")
    return read_table(done.stdout)


def update(run_python, record, *chosen) -> tuple[int, int]:
    """The number of all configurations, and of those that were compiled."""
    done = run_python("-m", "fastattn.kernels", "--record", record, *chosen, TRITON_INTERPRET="0")
    return tuple(map(int, re.match(r"(\d+) configurations, (\d+) ", done.stderr).groups()))


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


def test_every_configuration(run_python, tmp_path):
    """As the record says; those that are no longer what they were when it was made are compiled here."""
    copy = Path(shutil.copy(RECORD, tmp_path))
    total, new = update(run_python, copy)
    if new:
        command = f"python -m fastattn.kernels --record docs/{RECORD.name}"
        message = f"{new} of {total} configurations had to be compiled, `{command}` would record them"
        warnings.warn(message, stacklevel=1)
    rows = read_table(copy.read_text())
    assert len(rows) == total
    for row in rows:
        assert int(row["shared bytes"]) <= LIMITS[row["target"]][1] << 10, row

    cases = r"attention, b?float16 (64|128) (causal|plain|window|boolean mask|packed)$"
    kernels = ("forward", "grad_query", "grad_key_value")
    main = [row for row in rows if re.match(cases, row["case"]) and row["kernel"] in kernels]
    assert len(main) == len(LIMITS) * 2 * 2 * 5 * len(kernels)
    for row in main:
        assert row["matrix"] == LIMITS[row["target"]][0] and row["128-bit loads"] == "yes", row
        # With a mask two registers do on sm_80, in a tile that 128 channels without one need as it is.
        assert int(row["spilled bytes"]) <= (8 if "mask" in row["case"] else 0), row

    cases = r"linear attention, (bfloat16|float16) (64|128) causal$"
    walks = [row for row in rows if re.match(cases, row["case"]) and row["kernel"].startswith("walk ")]
    assert Counter(row["target"] for row in walks) == dict.fromkeys(LIMITS, 16)
    for row in walks:
        assert row["target"] != "cuda:90" or row["matrix"] == "wgmma", row


def test_record_is_brought_up_to_date(run_python, tmp_path):
    """What is missing or was made from something else is compiled, and what is of nothing goes."""
    record, chosen = tmp_path / "record", ("--main", "--target", "cuda:90", "--family", "aggregation")
    _, new = update(run_python, record, *chosen)
    before = record.read_text()
    header, first, second, *others = before.splitlines(keepends=True)
    assert len(others) == new - 2 > 2
    record.write_text("".join([header, first[:-2] + "-\n", *others]))
    assert update(run_python, record, *chosen)[1] == 2
    assert record.read_text() == before


KERNEL = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)

@triton.jit
def inner(x):
    return x * SCALE

@triton.jit(do_not_specialize=["n"])
def outer(x, n, BLOCK: tl.constexpr):
    tl.store(x + n, inner(tl.load(x)))
"""
SAME = {
    "comment": ("    return", "    # why\n    return"),
    "docstring": ("    tl.store", '    """What it does."""\n    tl.store'),
    "line number": ("import triton\n", "\n\nimport triton\n"),
    "line break": ("inner(tl.load(x))", "inner(\n        tl.load(x)\n    )"),
}
OTHER = {
    "kernel": ("x + n", "x - n"),
    "function that it calls": ("x * SCALE", "SCALE * x"),
    "constant": ("2.0", "3.0"),
    "decorator": ('["n"]', '["x"]'),
    "type": ("BLOCK: tl.constexpr", "BLOCK"),
}


def test_fingerprints_of_code(run_python, tmp_path):
    """They know what a kernel calls, and not how it is written."""
    for name, change in {"base": ("", ""), **SAME, **OTHER}.items():
        path = tmp_path / f"fastattn_{name.replace(' ', '_')}.py"
        path.write_text(KERNEL.replace(*change))
    code = f"""
import importlib, pathlib, sys
from fastattn.kernels._offline import code_of
sys.path.append({str(tmp_path)!r})
for path in pathlib.Path({str(tmp_path)!r}).glob("*.py"):
    function = importlib.import_module(path.stem).outer.fn
    print(path.stem, code_of(function).replace(path.stem, ""), sep="\t")
"""
    done = run_python("-c", code, TRITON_INTERPRET="0")
    found = dict(line.split("\t") for line in done.stdout.splitlines())
    codes = {name: found[f"fastattn_{name.replace(' ', '_')}"] for name in ("base", *SAME, *OTHER)}
    assert all(codes[name] == codes["base"] for name in SAME)
    assert len({codes[name] for name in ("base", *OTHER)}) == 1 + len(OTHER)


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
    assert {row["kernel"].split()[0] for row in rows} >= GATHERING | {
        "join",
        "join_max",
        "join_sums",
        "delta",
    }
    for row in rows:
        assert row["target"] == target and int(row["spilled bytes"]) == 0, row
        if row["kernel"].split()[0] in GATHERING and "x 1, " not in row["tile, warps, stages"]:
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


def test_every_entry_of_the_launch_tables_is_in_a_configuration(run_python):
    code = """
from fastattn.kernels import _cases, _launch_tables as tables, _offline

class Entry(tuple):
    def __iter__(self):
        chosen.add(id(self))
        return super().__iter__()

chosen, entries = set(), {}
for name, table in vars(tables).items():
    if isinstance(table, dict) and name in tables.__all__:
        for architecture in table.keys() - {"interpreter"}:
            for key, config in table[architecture].items():
                table[architecture][key] = entries[name, architecture, key] = Entry(config)
found = _offline.configurations(_offline.TARGETS, _cases.EVERYTHING)
assert len(entries) > 50
missing = [entry for entry in entries if id(entries[entry]) not in chosen]
assert not missing, missing
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
from fastattn.kernels import _offline, linear_attention
from fastattn.kernels._common import record_launches
for name in _offline.TARGETS:
    with record_launches(_offline.Offline(name)):
        operand, _, precision = linear_attention._operand(torch.float16, torch.device("meta"))
    assert (str(operand), precision) == ("fp32", "ieee" if name.startswith("hip") else "tf32"), name
"""
    run_python("-c", code, TRITON_INTERPRET="0")
