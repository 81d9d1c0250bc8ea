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
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

os.chdir(Path(__file__).resolve().parent)  # paths are relative, so that none of this machine is compiled in
BUILD = Path("build/native")  # kept between installs: the next one compiles only what changed
OLDEST_TORCH = (2, 11)  # the binary runs under every torch from this one on
DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")

# Every file of csrc/cpu except ONCE is compiled for each of these, weakest first. The linker keeps the first
# of several equal inline functions, so in this order none that was compiled for a newer processor can end up
# in the path of an older one.
ONCE = ("isa", "dispatch")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mfma -mf16c -mprefer-vector-width=512"
X86_64 = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": AVX512,
    "avx512_bf16": f"{AVX512} -mavx512bf16",
    "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
}
ISAS = {"x86_64": X86_64, "aarch64": {"neon": ""}}.get(platform.machine(), {"baseline": ""})
# errno and traps forbid vectorising and are given up; the rest of IEEE arithmetic stays (no -ffast-math).
FLAGS = f"{'-Og -g' if DEBUG else '-O3 -DNDEBUG'} -std=c++20 -fPIC -fvisibility=hidden -fno-math-errno"
FLAGS += f" -fno-trapping-math -Wall -Wno-psabi -Wno-maybe-uninitialized -Icsrc/cpu -I{BUILD}"

candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
CXX = next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)
NINJA = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


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

NINJA_RULES = f"""builddir = {BUILD}
rule compile
  command = {CXX} -MMD -MF $out.d {FLAGS} $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {CXX} -shared $in -o $out $flags
"""


def plan():
    """The text of build.ninja, the libraries, the compiled instruction sets, and what was left out."""
    libraries = ["_cpu.so"]
    lines, left_out = [NINJA_RULES], [name for name, flags in ISAS.items() if not accepts(f"{FLAGS} {flags}")]
    isas = [name for name in ISAS if name not in left_out]

    def edge(rule, target, sources, flags):
        lines.append(f"build {BUILD / target}: {rule} {' '.join(map(str, sources))}\n  flags = {flags}")
        return BUILD / target

    def compile_(source, variant, flags=""):
        return edge("compile", f"{variant}/{source.stem}.o", [source], flags)

    cpu = sorted(Path("csrc/cpu").glob("*.cpp"))
    kernels = [source for source in cpu if source.stem not in ONCE]
    objects = [compile_(s, isa, f"{ISAS[isa]} -DFASTATTN_ISA={isa}") for isa in isas for s in kernels]
    once = {source.stem: compile_(source, "once") for source in cpu if source.stem in ONCE}
    headers = f"-isystem {shlex.quote(f'{TORCH}/include')}"
    stable = f"{headers} -DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
    stable += f" -ffile-prefix-map={shlex.quote(f'{TORCH}/include/=')}"
    bindings = [s for s in sorted(Path("csrc/bindings").glob("*.cpp")) if s.stem != "introspection"]
    objects += [*once.values(), *(compile_(source, "bindings", stable) for source in bindings)]
    edge("link", "_cpu.so", objects, f"-Wl,-z,defs -L{shlex.quote(f'{TORCH}/lib')} -ltorch_cpu")

    python = sysconfig.get_path("include")
    if Path(python, "Python.h").exists():
        libraries.append(f"_introspection{sysconfig.get_config_var('EXT_SUFFIX')}")
        flags = f"{headers} -isystem {shlex.quote(python)}"  # pybind11 comes with torch's headers
        module = compile_(Path("csrc/bindings/introspection.cpp"), sys.implementation.cache_tag, flags)
        edge("link", libraries[1], [once["isa"], module], "")
    else:
        left_out.append("introspection (no Python.h)")
    return "\n".join([*lines, ""]), libraries, isas, left_out


def write(path, text):
    if not path.exists() or path.read_text() != text:  # an unchanged file must not make ninja rebuild
        path.write_text(text)


class BuildNative(build_ext):
    def run(self):
        package = Path("." if self.inplace or self.editable_mode else self.build_lib, "fastattn")
        package.mkdir(parents=True, exist_ok=True)
        cuda = os.environ.get("FASTATTN_CUDA", "auto")
        if cuda not in ("auto", "0"):
            raise SystemExit(
                f"FASTATTN_CUDA={cuda}: " + ("no CUDA sources yet" if cuda == "1" else "auto, 0 or 1")
            )
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
        ninja_file, libraries, isas, left_out = plan()
        version = subprocess.run([*shlex.split(CXX), "--version"], capture_output=True, text=True).stdout
        info = {"compiler": version.split("\n")[0], "flags": FLAGS, "torch": TORCH_VERSION}
        info["oldest_torch"] = ".".join(map(str, OLDEST_TORCH))
        entries = ", ".join(f'{{"{key}", R"({value})"}}' for key, value in info.items())
        config = f"#pragma once\n#define FASTATTN_ISAS(X) {' '.join(f'X({isa})' for isa in isas)}\n"
        config += f"#define FASTATTN_BUILD_INFO {{{entries}}}\n"
        write(BUILD / "build_config.h", config)
        write(BUILD / "build.ninja", ninja_file)
        summary = f"CPU kernels for {', '.join(isas)}; no CUDA; {info['compiler']}; torch {TORCH_VERSION}"
        print(f"fastattn: {summary}; left out: {', '.join(left_out) or 'nothing'}", flush=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([NINJA, "-f", BUILD / "build.ninja", *jobs]).returncode:
            raise SystemExit("fastattn: the native kernels did not compile, see the compiler's message above")
        for library in libraries:
            shutil.copy(BUILD / library, package / f"{library}.new")
            (package / f"{library}.new").replace(
                package / library
            )  # a process that runs the old file keeps it


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
