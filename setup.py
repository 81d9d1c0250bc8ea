"""Builds the native part of fastattn with ninja: `_cpu.so`, the operators on the LibTorch stable ABI
without any Python API (one binary for every later torch), and `_introspection` (pybind11, no torch).
torch is not imported, only its headers are used. Where something is missing the package installs without
native part and says why.

Environment: FASTATTN_CUDA=auto|0|1, TORCH_CUDA_ARCH_LIST (for CUDA sources), MAX_JOBS, DEBUG; CXX as ever.
"""

import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without build isolation nobody looks at pyproject.toml
    raise SystemExit("fastattn: building needs setuptools >= 77") from None

os.chdir(Path(__file__).resolve().parent)  # paths are relative, so that none of this machine is compiled in
BUILD = Path("build/native")  # kept between installs: the next one compiles only what changed
OLDEST_TORCH = (2, 11)  # the binary runs under every torch from this one on
INTROSPECTION = f"_introspection{sysconfig.get_config_var('EXT_SUFFIX')}"

# csrc/cpu, except isa and dispatch, is compiled for each of these, weakest first. The linker keeps the first
# of several equal inline functions: in this order none for a newer processor ends up in the path of an older.
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mfma -mf16c -mprefer-vector-width=512"
X86_64 = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": AVX512,
    "avx512_bf16": f"{AVX512} -mavx512bf16",
    "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
}
ISAS = {"x86_64": X86_64, "aarch64": {"neon": ""}}.get(platform.machine(), {"baseline": ""})
# Sources that gain nothing from an instruction set over the ones before it: there is no such variant of them.
# Where bf16 has instructions of its own, attention and linear attention are compiled for it alone, and for
# what attention forms of bf16 parts.
WITHOUT = {
    "aggregation": ("avx512_bf16", "amx"),
    "graph": ("avx2", "avx512", "avx512_bf16", "amx"),
    "graph_attention": ("avx512_bf16", "amx"),
    "linear_attention": ("avx512_bf16",),
}
# errno and traps forbid vectorising and are given up; the rest of IEEE arithmetic stays (no -ffast-math).
# "Uninitialized" is what GCC 12 says of its own AVX-512 header.
FLAGS = "-O3 -DNDEBUG" if os.environ.get("DEBUG", "0") in ("", "0") else "-Og -g"
FLAGS += " -std=c++20 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math"
FLAGS += f" -Wall -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Icsrc/cpu -I{BUILD}"
# What -O3 does beyond this makes these hardly faster and takes up to half of the time to compile them.
LIGHT = "-O2 -fpeel-loops -fvect-cost-model=dynamic" if "-O3" in FLAGS else ""
LIGHTER = {
    "attention": ("baseline", "avx2", "avx512"),
    "graph_attention": ("baseline",),
    "linear_attention": ("baseline",),
}

# Between a call and its kernel, headers take the time to compile.
BRIEF = "-O1" if "-O3" in FLAGS else ""

candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
CXX = next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)
# The environment's own first: each version of ninja takes what another one built for out of date.
NINJA = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def find_torch():
    """(folder, version) of this environment's torch, by path: a build that pip isolates cannot import it."""
    prefixes = site.getsitepackages([sys.prefix, sys.base_prefix])
    for place in [*sys.path, sysconfig.get_path("platlib"), *prefixes, site.getusersitepackages()]:
        folder = Path(place, "torch").absolute()
        if (folder / "version.py").exists() and (folder / "include/torch/csrc/stable/library.h").exists():
            version = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())[1]
            if tuple(map(int, version.split(".")[:2])) >= OLDEST_TORCH:
                return folder, version
    return None, None


def accepts(flags):
    command = [*shlex.split(CXX), *flags.split(), "-x", "c++", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=b"int x;", capture_output=True).returncode == 0


def find_obstacle():
    """Why nothing native can be built here, torch aside, in one line; None if it can."""
    if sys.platform != "linux":
        return f"they are built on Linux, not on {sys.platform}"
    if CXX is None:
        return f"no C++ compiler ({', '.join(candidates)}: not found)"
    if not accepts(FLAGS):
        return f"{CXX} does not accept {FLAGS}"
    return None if NINJA else "ninja is not installed"


TORCH, TORCH_VERSION = find_torch()
OBSTACLE = find_obstacle()
MISSING = OBSTACLE or (None if TORCH else "no torch >= 2.11 with headers in this environment")
ONCE = [Path("csrc/cpu/isa.cpp"), Path("csrc/cpu/dispatch.cpp")]
KERNELS = sorted({*Path("csrc/cpu").glob("*.cpp")} - {*ONCE})


def variants(source, isas):
    return [isa for isa in isas if isa == isas[0] or isa not in WITHOUT.get(source.stem, ())]


def plan(isas, introspection):
    """The text of build.ninja."""
    light = LIGHT if accepts(f"{FLAGS} {LIGHT}") else ""  # GCC's names
    lines = [f"builddir = {BUILD}", "rule compile", "  depfile = $out.d", "  deps = gcc"]
    lines += [f"  command = {CXX} -MMD -MF $out.d {FLAGS} $flags -c $in -o $out"]
    lines += ["rule link", f"  command = {CXX} -shared $in -o $out $flags"]

    def edge(rule, target, sources, flags):
        lines.extend([f"build {BUILD / target}: {rule} {' '.join(map(str, sources))}", f"  flags = {flags}"])
        return BUILD / target

    def compile_all(folder, sources, flags=""):
        def compile_one(source):
            options = f"{flags} {light}" if folder in LIGHTER.get(source.stem, ()) else flags
            return edge("compile", f"{folder}/{source.stem}.o", [source], options)

        return [compile_one(source) for source in sources]

    headers = f"-isystem {shlex.quote(f'{TORCH}/include')}"  # pybind11 is among them
    stable = f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
    stable += f" -ffile-prefix-map={shlex.quote(f'{TORCH}/include/=')}"
    module = Path("csrc/bindings/introspection.cpp")
    bindings = sorted({*Path("csrc/bindings").glob("*.cpp")} - {module})

    objects = []
    for isa in isas:
        sources = [source for source in KERNELS if isa in variants(source, isas)]
        objects += compile_all(isa, sources, f"{ISAS[isa]} -DFASTATTN_ISA={isa}")
    objects += (isa_object := compile_all("once", ONCE))
    objects += compile_all("bindings", bindings, f"{headers} {stable} {BRIEF}")
    edge("link", "_cpu.so", objects, f"-Wl,-z,defs -L{shlex.quote(f'{TORCH}/lib')} -ltorch_cpu")
    if introspection:
        python = f"{headers} -isystem {shlex.quote(sysconfig.get_path('include'))} {BRIEF}"
        objects = compile_all(sys.implementation.cache_tag, [module], python)
        edge("link", INTROSPECTION, [isa_object[0], *objects], "")
    return "\n".join([*lines, ""])


class BuildNative(build_ext):
    def run(self):
        package = Path("." if self.inplace or self.editable_mode else self.build_lib, "fastattn")
        package.mkdir(parents=True, exist_ok=True)
        if (cuda := os.environ.get("FASTATTN_CUDA", "auto")) not in ("auto", "0"):
            raise SystemExit(f"FASTATTN_CUDA={cuda}: must be auto or 0, there are no CUDA sources yet")
        if MISSING:
            print(f"fastattn: WARNING: no native kernels, operators run on the reference: {MISSING}")
            for stale in package.glob("*.so"):
                stale.unlink()
            (package / "_native_missing.txt").write_text(MISSING + "\n")
            return

        import fcntl  # not on Windows

        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at a time would spoil ninja's log
            self.build(package)
        (package / "_native_missing.txt").unlink(missing_ok=True)

    def build(self, package):
        isas = [isa for isa, flags in ISAS.items() if accepts(f"{FLAGS} {flags}")]
        introspection = Path(sysconfig.get_path("include"), "Python.h").exists()
        left_out = [isa for isa in ISAS if isa not in isas]
        left_out += [] if introspection else ["introspection (no Python.h)"]
        version = subprocess.run([*shlex.split(CXX), "--version"], capture_output=True, text=True).stdout
        info = {"compiler": version.split("\n")[0], "flags": FLAGS, "torch": TORCH_VERSION}
        info["oldest_torch"] = ".".join(map(str, OLDEST_TORCH))
        entries = ", ".join(f'{{"{key}", R"({value})"}}' for key, value in info.items())
        config = f"#pragma once\n#define FASTATTN_ISAS(X) {' '.join(f'X({isa})' for isa in isas)}\n"
        for source in KERNELS:
            listed = " ".join(f"X({source.stem}, {isa})" for isa in variants(source, isas))
            config += f"#define FASTATTN_VARIANTS_{source.stem}(X) {listed}\n"
        config += f"#define FASTATTN_BUILD_INFO {{{entries}}}\n"
        header = BUILD / "build_config.h"
        if not header.exists() or header.read_text() != config:  # ninja goes by its age
            header.write_text(config)
        (BUILD / "build.ninja").write_text(plan(isas, introspection))
        summary = f"CPU kernels for {', '.join(isas)}; no CUDA; {info['compiler']}; torch {TORCH_VERSION}"
        print(f"fastattn: {summary}; left out: {', '.join(left_out) or 'nothing'}", flush=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([NINJA, "-f", BUILD / "build.ninja", *jobs]).returncode:
            raise SystemExit("fastattn: the native kernels did not compile, see the compiler's message above")
        for library in ["_cpu.so", *[INTROSPECTION] * introspection]:
            fresh = package / f"{library}.new"
            shutil.copy(BUILD / library, fresh)
            fresh.replace(package / library)  # a process that runs the old file keeps it


class Wheel(bdist_wheel):
    def get_tag(self):  # the introspection module is for one version of Python
        return ("py3", "none", "any") if MISSING else super().get_tag()


setup(
    packages=[*find_packages(include=["fastattn", "fastattn.*"]), "fastattn.kernels"],
    package_dir={"fastattn.kernels": "kernels"},
    ext_modules=[Extension("fastattn._introspection", [])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    # Front ends ask what a build needs: a torch, where there is a compiler but no torch to be seen.
    setup_requires=["torch>=2.11"] if "egg_info" in sys.argv and not OBSTACLE and not TORCH else [],
)
