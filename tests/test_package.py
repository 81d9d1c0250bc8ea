"""The package as a whole: install, import, libraries, instruction sets, checks of the registered ops."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn import _native

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fastattn.__file__).parent
LIBRARY = PACKAGE / "_cpu.so"
# Interpreters with other versions of torch, separated as in PATH, that the same binary must load under.
PYTHONS = [sys.executable, *filter(None, os.environ.get("FASTATTN_TEST_PYTHONS", "").split(os.pathsep))]

CALL = """
import torch, fastattn
q = torch.randn(1, 2, 5, 8, requires_grad=True)
out = fastattn.scaled_dot_product_attention(q, q, q, is_causal=True{options})
out.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
assert torch.allclose(out, expected, atol=1e-6)
"""


def copy_package(to: Path, native: bool) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "_native_missing.txt", *([] if native else ["*.so"]))
    shutil.copytree(PACKAGE, to / "fastattn", ignore=ignored)
    return to


def copy_sources(to: Path) -> Path:
    """The files that a build reads, without what earlier builds left."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_native_missing.txt")
    for folder in ("fastattn", "csrc", "kernels"):
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, to)
    return to


# ---- import


def test_native_kernels_are_built_where_there_is_a_compiler():
    compilers = [shutil.which(name) for name in ("c++", "g++", "clang++")]
    assert _native.missing() is None or not any(compilers), _native.missing()


def test_works_without_the_native_library_and_says_why_in_one_line(tmp_path, run_python):
    path = copy_package(tmp_path, native=False)
    done = run_python("-W", "always", "-c", CALL.format(options=""), path=path, cwd=path)
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert (
        len(warnings) == 1
        and "operators run on the reference: the CPU library has not been built" in warnings[0]
    )

    (path / "fastattn" / "_native_missing.txt").write_text("no C++ compiler\n")
    done = run_python("-c", CALL.format(options=", impl='cpu'"), path=path, cwd=path, check=False)
    assert "NotImplementedError: impl='cpu' cannot run this call: no C++ compiler" in done.stderr
    done = run_python("-m", "fastattn", path=path, cwd=path)
    assert re.search(r"implementation cpu +not available: no C\+\+ compiler\n", done.stdout)
    assert re.search(r"implementation reference +available\n", done.stdout)


def test_a_library_that_does_not_load_is_a_reason_and_no_crash(tmp_path, run_python):
    path = copy_package(tmp_path, native=False)
    (path / "fastattn" / "_cpu.so").write_bytes(b"not a library")
    done = run_python("-c", CALL.format(options=""), path=path, cwd=path)
    assert "_cpu.so does not load: " in done.stderr


def test_import_is_light(run_python):
    names = ("triton", "fastattn.kernels.attention", "matplotlib", "transformers", "numpy", "fastattn.nn")
    names = (*names, "torch._dynamo", "sympy")
    code = f"import sys, fastattn; print([name for name in {names} if name in sys.modules])"
    before = run_python("-c", code.replace(", fastattn", ", torch")).stdout
    assert run_python("-c", code).stdout == before


# ---- python -m fastattn, instruction sets


def test_report(run_python):
    lines = run_python("-m", "fastattn").stdout.splitlines()
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert rows["fastattn"] == fastattn.__version__ and rows["torch"] == torch.__version__
    assert {"python", "cpu", "instruction set"} <= rows.keys() and any(
        name.startswith("gpu") for name in rows
    )
    for name in ("cpu", "triton", "cuda", "torch", "reference"):
        assert re.match(r"available$|not available: .+", rows[f"implementation {name}"])
    if _native.missing() is None:
        assert rows["instruction set"].startswith(f"{_native.isa()}; compiled: ")
        assert "for torch >= 2.11" in rows["built with"]


def test_environment_caps_the_instruction_set(isa, run_python):
    code = "from fastattn import _native; print(_native.isa())" + CALL.format(options=", impl='cpu'")
    assert run_python("-c", code, FASTATTN_CPU_ISA=isa).stdout.strip() == isa


def test_unknown_instruction_set_is_refused_by_name(run_python):
    message = "FASTATTN_CPU_ISA=sse9 names no instruction set; valid are "
    for options in ("", ", impl='cpu'"):
        done = run_python("-c", CALL.format(options=options), FASTATTN_CPU_ISA="sse9", check=False)
        assert f"ValueError: {message}" in done.stderr
    done = run_python("-m", "fastattn", FASTATTN_CPU_ISA="sse9", check=False)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    code = "import fastattn, torch; q = torch.zeros(1, 1, 1, 1); torch.ops.fastattn.attention_forward"
    code += "(q, q, q, *[None] * 5, 1.0, 0.0, -1, -1, False, 0.0)"
    assert f"ValueError: {message}" in run_python("-c", code, FASTATTN_CPU_ISA="sse9", check=False).stderr


# ---- the binary


@pytest.mark.parametrize("python", PYTHONS)
def test_one_binary_for_every_torch(python, tmp_path, run_python):
    path = copy_package(tmp_path, native=True)
    run_python("-c", CALL.format(options=", impl='cpu'"), python=python, path=path, cwd=path)


def test_uses_only_the_stable_abi_of_torch():
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].partition("@")[0] for line in undefined.stdout.splitlines()}
    shims = {name for name in names if re.match(r"(aoti_)?torch_", name)}
    assert shims
    foreign = {name for name in names - shims if re.search(r"2at|3c10|5torch|caffe|Py", name)}
    assert not foreign
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", needed))
    assert libraries <= {
        "libtorch_cpu",
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


def test_weaker_instruction_sets_are_linked_first():
    """The linker keeps the first of several equal inline functions: one that every machine can run."""
    symbols = subprocess.run(["nm", "-C", LIBRARY], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^([0-9a-f]+) . fastattn::(\w+)::attention_kernels$", symbols, flags=re.MULTILINE)
    assert [name for _, name in sorted(found)] == list(_native.isas())


def test_every_operator_has_a_variant_for_the_weakest_instruction_set():
    symbols = subprocess.run(["nm", "-C", LIBRARY], capture_output=True, text=True, check=True).stdout
    variants = {}
    for isa, name in re.findall(r" . fastattn::(\w+)::(\w+)_kernels$", symbols, flags=re.MULTILINE):
        variants.setdefault(name, set()).add(isa)
    sources = {source.stem for source in (ROOT / "csrc" / "cpu").glob("*.cpp")} - {"isa", "dispatch"}
    assert variants.keys() == sources
    weakest = next(iter(_native.isas()))
    assert all(weakest in isas for isas in variants.values()), variants
    assert variants["graph"] == {weakest}, "a sort needs no vectors"


def test_no_path_of_the_build_machine_is_compiled_in():
    assert str(ROOT).encode() not in LIBRARY.read_bytes()
    assert b"site-packages" not in LIBRARY.read_bytes()


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_kernels_include_no_torch(folder):
    for file in (ROOT / "csrc" / folder).glob("*"):
        assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10|Python|pybind)", file.read_text()), file


# ---- install


def test_install_without_a_compiler(tmp_path, run_python):
    source = copy_sources(tmp_path / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-v",
        "-w",
    ]
    environment = os.environ | {"CXX": "/nonexistent/c++"}
    done = subprocess.run([*command, tmp_path, source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reason = "no C++ compiler (/nonexistent/c++: not found)"
    assert (done.stdout + done.stderr).count(f"operators run on the reference: {reason}") == 1

    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    assert not list(installed.rglob("*.so"))
    done = run_python(
        "-c", CALL.format(options="") + "import fastattn.kernels", path=installed, cwd=installed
    )
    assert done.stderr.count(reason) == 1


FAKE_COMPILER = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
if any(flag in arguments for flag in {refused}):
    sys.exit("unrecognized command-line option")
if "-o" in arguments:
    pathlib.Path({log!r}).open("a").write(" ".join(arguments) + chr(10))
    output = pathlib.Path(arguments[arguments.index("-o") + 1])
    if output.parent.is_dir() and str(output) != "/dev/null":
        output.write_text("")
        pathlib.Path(str(output) + ".d").write_text(f"{{output}}:")
"""


def build(source: Path, compiler: Path, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = os.environ | {"CXX": str(compiler)} | environment
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)


@pytest.fixture
def fake_compiler(tmp_path):
    """Writes a compiler that refuses some flags, logs its command lines and makes empty files."""

    def make(*refused) -> tuple[Path, Path]:
        compiler, log = tmp_path / "fake-c++", tmp_path / "log"
        compiler.write_text(FAKE_COMPILER.format(python=sys.executable, refused=refused, log=str(log)))
        compiler.chmod(0o755)
        return compiler, log

    return make


def test_build_leaves_out_what_the_compiler_cannot_and_says_so(tmp_path, fake_compiler):
    source = copy_sources(tmp_path / "source")
    compiler, log = fake_compiler("-mamx-bf16", "-mavx512f", "-fvect-cost-model=dynamic")
    done = build(source, compiler)
    assert done.returncode == 0, done.stdout + done.stderr
    [summary] = [line for line in done.stdout.splitlines() if line.startswith("fastattn: ")]
    if os.uname().machine == "x86_64":
        assert (
            "CPU kernels for baseline, avx2;" in summary and "left out: avx512, avx512_bf16, amx" in summary
        )
        [link] = [line for line in log.read_text().splitlines() if "_cpu.so" in line]
        assert link.index("baseline/attention.o") < link.index("avx2/attention.o") < link.index("once/isa.o")
    assert (source / "fastattn" / "_cpu.so").exists()
    compiled = [line for line in log.read_text().splitlines() if "-c csrc" in line]
    assert compiled and not any("-fvect-cost-model" in line for line in compiled)

    log.unlink()
    assert build(source, compiler).returncode == 0
    assert "-c csrc" not in log.read_text(), "an unchanged tree was compiled again"

    done = build(source, tmp_path / "nowhere")
    assert done.returncode == 0 and "no C++ compiler" in done.stdout
    assert not list((source / "fastattn").glob("*.so")), "a library of another build was left behind"


@pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "csrc" / "cpu").glob("*.cpp")))
def test_clang_takes_the_sources(name):
    options = ["-std=c++20", "-fsyntax-only", "-w", "-DFASTATTN_ISA=baseline", "-Icsrc/cpu", "-Ibuild/native"]
    command = ["clang++", *options, f"csrc/cpu/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_build_refuses_cuda_without_sources_and_unknown_values(tmp_path, fake_compiler):
    source = copy_sources(tmp_path / "source")
    compiler, _ = fake_compiler()
    for value in ("1", "yes"):
        done = build(source, compiler, FASTATTN_CUDA=value)
        assert done.returncode != 0 and f"FASTATTN_CUDA={value}: " in done.stderr


def test_a_compiler_too_old_for_the_language_is_no_compiler(tmp_path, fake_compiler):
    source = copy_sources(tmp_path / "source")
    compiler, _ = fake_compiler("-std=c++20")
    done = build(source, compiler)
    assert done.returncode == 0 and "does not accept" in done.stdout


# ---- the registered ops trust nobody with memory

OPTIONS = {
    "scale": 1.0,
    "softcap": 0.0,
    "window_left": -1,
    "window_right": -1,
    "lower_right": False,
    "dropout_p": 0.0,
}
TENSORS = {
    "attn_mask": None,
    "key_padding_mask": None,
    "alibi_slopes": None,
    "sinks": None,
    "dropout_seed": None,
}


def forward_arguments(**changes) -> dict:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    return {"query": query, "key": key, "value": value} | TENSORS | OPTIONS | changes


def backward_arguments(**changes) -> dict:
    arguments = forward_arguments()
    out, lse = torch.ops.fastattn.attention_forward(**arguments)
    gradients = {"grad_out": torch.randn_like(out), "grad_lse": torch.randn_like(lse), "out": out, "lse": lse}
    wanted = {"mask_grad": False, "alibi_grad": False, "sinks_grad": False}
    return gradients | arguments | wanted | changes


def weights_arguments(**changes) -> dict:
    arguments = backward_arguments()
    names = ("query", "key", "lse", *TENSORS, *OPTIONS)
    return {name: arguments[name] for name in names} | {"average_heads": True} | changes


def forward_with_weights_arguments(**changes) -> dict:
    return forward_arguments() | {"average_heads": True} | changes


WRONG = {
    "query": [torch.randn(4, 5, 8), torch.randn(2, 3, 5, 8), torch.zeros(2, 4, 5, 8, dtype=torch.int32)],
    "key": [
        torch.randn(2, 2, 6, 7),
        torch.randn(1, 2, 6, 8),
        torch.randn(2, 2, 6, 8).double(),
        torch.randn(6, 8),
    ],
    "value": [torch.randn(2, 2, 5, 3), torch.randn(2, 1, 6, 3), torch.randn(2, 2, 6, 3).half()],
    "attn_mask": [
        torch.randn(2, 4, 5, 7),
        torch.randn(1, 2, 4, 5, 6),
        torch.randn(5, 7),
        torch.zeros(2, 4, 5, 6, dtype=torch.uint8),
    ],
    "key_padding_mask": [torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 6)],
    "alibi_slopes": [torch.ones(3), torch.ones(4, 2), torch.ones(4).double()],
    "sinks": [torch.ones(3), torch.ones(2, 4), torch.ones(4).half()],
    "softcap": [-1.0, float("nan")],
    "window_left": [-2],
    "dropout_p": [-0.1, 1.1, 0.5],
    "grad_out": [torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 3).double()],
    "grad_lse": [torch.randn(2, 4, 6), torch.randn(2, 4, 5).half()],
    "out": [torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 3).bfloat16()],
    "lse": [torch.randn(2, 4, 4), torch.randn(2, 4, 5).double()],
    "mask_grad": [True],
    "alibi_grad": [True],
    "sinks_grad": [True],
}
OPS = {
    "forward": forward_arguments,
    "backward": backward_arguments,
    "weights": weights_arguments,
    "forward_with_weights": forward_with_weights_arguments,
}


@pytest.mark.parametrize("op", OPS)
def test_registered_ops_refuse_what_does_not_fit(op):
    call, arguments = getattr(torch.ops.fastattn, f"attention_{op}"), OPS[op]()
    call(**arguments)
    tried = 0
    for name in arguments.keys() & WRONG.keys():
        for value in WRONG[name]:
            with pytest.raises(RuntimeError, match="must|needs"):
                call(**arguments | {name: value})
            tried += 1
    assert tried > 10
    with pytest.raises(RuntimeError, match="dropout_seed must be"):
        call(**arguments | {"dropout_p": 0.5, "dropout_seed": torch.zeros(2, dtype=torch.int64)})


def test_layouts_of_outputs():
    arguments = backward_arguments()
    assert arguments["out"].transpose(1, 2).is_contiguous() and arguments["lse"].is_contiguous()
    permuted = {
        name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key")
    }
    gradients = torch.ops.fastattn.attention_backward(**arguments | permuted)
    assert [g.stride() for g in gradients[:2]] == [t.stride() for t in permuted.values()]
    assert [tuple(g.shape) for g in gradients[3:]] == [(0,), (0,), (0,)]
    expected = torch.ops.fastattn.attention_backward(**arguments)
    awkward = {
        name: arguments[name].transpose(-1, -2).contiguous().transpose(-1, -2) for name in ("out", "lse")
    }
    for have, want in zip(
        torch.ops.fastattn.attention_backward(**arguments | awkward), expected, strict=True
    ):
        assert torch.equal(have, want)


def test_gradients_of_sinks_and_slopes_take_their_shape_and_dtype():
    for slopes, sinks in itertools.product(
        (torch.rand(4), torch.rand(2, 4)), (torch.rand(4), torch.rand(4).bfloat16())
    ):
        dtype = sinks.dtype
        tensors = {name: forward_arguments()[name].to(dtype) for name in ("query", "key", "value")}
        arguments = forward_arguments(**tensors, alibi_slopes=slopes, sinks=sinks)
        out, lse = torch.ops.fastattn.attention_forward(**arguments)
        wanted = {"mask_grad": False, "alibi_grad": True, "sinks_grad": True}
        gradients = torch.ops.fastattn.attention_backward(out, None, out=out, lse=lse, **arguments, **wanted)
        assert [(g.shape, g.dtype) for g in gradients[4:]] == [(t.shape, t.dtype) for t in (slopes, sinks)]


def test_calls_from_several_threads_at_once():
    arguments = forward_arguments(query=torch.randn(2, 4, 200, 8))
    expected = torch.ops.fastattn.attention_forward(**arguments)[0]
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: torch.ops.fastattn.attention_forward(**arguments)[0], range(32)):
            assert torch.equal(out, expected)


def test_memory_that_cannot_be_had_is_an_error_and_no_crash(run_python):
    code = """
import torch, fastattn
q = torch.zeros(1, 1, 1, 1).expand(1 << 20, 1 << 10, 1 << 10, 64)
try:
    torch.ops.fastattn.attention_forward(q, q, q, *[None] * 5, 1.0, 0.0, -1, -1, False, 0.0)
except (RuntimeError, MemoryError) as error:
    print("refused")
"""
    assert run_python("-c", code).stdout.strip() == "refused"


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_a_kernel_cannot_have_is_a_memory_error(threads, run_python):
    code = f"""
import resource, torch, fastattn
torch.set_num_threads({threads})
def call(length, head_dim):
    q = torch.ones(1, 4, length, head_dim)
    limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    try:
        torch.ops.fastattn.attention_forward(q, q, q[..., :1], *[None] * 5, 1.0, 0.0, -1, -1, False, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
try:
    call(128, 20000)
except MemoryError:
    print("refused")
call(4, 4)
"""
    assert run_python("-c", code).stdout.strip() == "refused"


# ---- explain


@pytest.mark.parametrize(
    "arguments, message", [({}, "query"), ({"query": 1, "key": 1, "value": 1, "bogus": 1}, "bogus")]
)
def test_explain_names_the_argument_that_the_operator_does_not_take_or_lacks(arguments, message):
    with pytest.raises(TypeError, match=message) as error:
        fastattn.explain(fastattn.scaled_dot_product_attention, **arguments)
    assert "_choice" not in str(error.value) and "_prepare" not in str(error.value)


# ---- documentation


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{file.name}" for file in ROOT.glob("docs/*.md"))])
def test_examples_of_the_documentation_run(page, run_python):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    run_python("-c", "\n".join(blocks))
