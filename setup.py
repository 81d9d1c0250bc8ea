"""Builds the native part of fastattn with ninja: `_cpu.so` (operators on the LibTorch stable ABI, no Python API: one
binary for every later torch) and `_introspection` (pybind11, no torch). torch is never imported, only its headers are
used. What is missing on this machine is said in one line and the package installs without its native part.

Environment: FASTATTN_CUDA=auto|0|1, TORCH_CUDA_ARCH_LIST (both for CUDA sources), MAX_JOBS, DEBUG; CXX as everywhere.
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

ROOT = Path(__file__).resolve().parent
BUILD = Path("build", "native")  # ninja's folder: kept between installs, so that a second one compiles only changes
DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")
TORCH_TARGET = (2, 11)  # the oldest torch that the binary runs under

# Every file of csrc/cpu except ONCE is compiled for each of these, weakest first. The linker keeps the first of
# several equal inline functions, so in this order no function compiled for a newer processor can end up in the path
# of an older one.
ONCE = ("isa.cpp", "dispatch.cpp")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mfma -mf16c -mprefer-vector-width=512"
ISAS = {
    "x86_64": {
        "baseline": "",
        "avx2": "-mavx2 -mfma -mf16c",
        "avx512": AVX512,
        "avx512_bf16": f"{AVX512} -mavx512bf16",
        "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
    },
    "aarch64": {"neon": ""},
}.get(platform.machine(), {"baseline": ""})
# Traps and errno are given up because they forbid vectorising; the rest of IEEE arithmetic stays (no -ffast-math).
FLAGS = f"{'-Og -g' if DEBUG else '-O3 -DNDEBUG'} -std=c++20 -fPIC -fvisibility=hidden -fno-math-errno"
FLAGS += f" -fno-trapping-math -Wall -Wno-psabi -Wno-maybe-uninitialized -Icsrc/cpu -I{BUILD}"


def compiler():
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)


def ninja():
    beside_python = Path(sysconfig.get_path("scripts"), "ninja")
    return shutil.which("ninja") or (str(beside_python) if beside_python.exists() else None)


def torch():
    """(folder, version) of a torch with headers for TORCH_TARGET: this environment's, which a build environment
    that pip has isolated sees only by its path."""
    prefixes = [sys.prefix, sys.base_prefix]
    places = [*sys.path, sysconfig.get_path("platlib"), *site.getsitepackages(prefixes), site.getusersitepackages()]
    for folder in (Path(place, "torch") for place in places):
        if (folder / "version.py").exists() and (folder / "include/torch/csrc/stable/library.h").exists():
            version = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())[1]
            if tuple(map(int, version.split(".")[:2])) >= TORCH_TARGET:
                return folder, version
    return None


def accepts(flags):
    command = [*shlex.split(compiler()), *shlex.split(flags), "-x", "c++", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=b"int x;", capture_output=True, cwd=ROOT).returncode == 0


def missing(but_torch=False):
    """Why nothing native can be built here, in one line, or None."""
    if sys.platform != "linux":
        return f"native kernels are built on Linux, not on {sys.platform}"
    if compiler() is None:
        return f"no C++ compiler ({os.environ.get('CXX') or 'c++, g++, clang++'}: not found)"
    if not accepts(FLAGS):
        return f"{compiler()} does not accept -std=c++20"
    if ninja() is None:
        return "ninja is not installed"
    if not but_torch and torch() is None:
        return f"no torch >= {TORCH_TARGET[0]}.{TORCH_TARGET[1]} with headers in this environment"
    return None


def write(path, text):
    if not path.exists() or path.read_text() != text:  # an unchanged file must not make ninja rebuild
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plan():
    """Writes build.ninja and build_config.h; returns (libraries to copy, the summary line)."""
    folder, torch_version = torch()
    isas = {name: flags for name, flags in ISAS.items() if accepts(f"{FLAGS} {flags}")}
    left_out = [name for name in ISAS if name not in isas]
    python = sysconfig.get_path("include")
    cuda = os.environ.get("FASTATTN_CUDA", "auto")
    if cuda not in ("auto", "0", "1"):
        raise SystemExit(f"FASTATTN_CUDA must be auto, 0 or 1, not {cuda!r}")
    if cuda == "1":
        raise SystemExit("FASTATTN_CUDA=1: this version has no CUDA sources")

    objects = {"_cpu.so": [], "_introspection.so": []}
    edges = []

    def compile_(source, where, flags, *libraries):
        target = BUILD / where / f"{source.stem}.o"
        edges.append(f"build {target}: cc {source}\n  flags = {FLAGS} {flags}".replace("$", "$$"))
        for library in libraries:
            objects[library].append(str(target))

    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/cpu/*.cpp"))
    for name, flags in isas.items():
        for source in sources:
            if source.name not in ONCE:
                compile_(source, name, f"{flags} -DFASTATTN_ISA={name}", "_cpu.so")
    for source in sources:
        if source.name in ONCE:
            compile_(source, "once", "", "_cpu.so", *["_introspection.so"] * (source.name == "isa.cpp"))
    headers = f"-isystem {shlex.quote(f'{folder}/include')}"
    prefix = shlex.quote(f"-ffile-prefix-map={folder}/include/=")  # error messages name headers as #include does
    abi = f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
    for source in sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/bindings/*.cpp")):
        if source.name != "introspection.cpp":
            compile_(source, "bindings", f"{headers} {prefix} {abi}", "_cpu.so")
        elif Path(python, "Python.h").exists():
            compile_(source, sys.implementation.cache_tag, f"{headers} -isystem {python}", "_introspection.so")
        else:
            left_out.append("introspection (Python.h not found)")
            del objects["_introspection.so"]
    links = {"_cpu.so": f"-Wl,-z,defs -L{shlex.quote(f'{folder}/lib')} -ltorch_cpu", "_introspection.so": ""}
    for library, files in objects.items():
        edges.append(f"build {BUILD / library}: link {' '.join(files)}\n  libraries = {links[library]}")
    rules = f"""cxx = {compiler()}
rule cc
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx -shared $in -o $out $libraries
"""
    write(ROOT / BUILD / "build.ninja", "\n".join([f"builddir = {BUILD}", rules, *edges, ""]))

    version = subprocess.run([*shlex.split(compiler()), "--version"], capture_output=True, text=True).stdout
    info = {"compiler": version.splitlines()[0], "flags": FLAGS, "isas": " ".join(isas), "torch": torch_version}
    info |= {"oldest_torch": ".".join(map(str, TORCH_TARGET)), "debug": str(int(DEBUG)), "cuda": "0"}
    entries = "".join(f'    {{"{name}", R"({value})"}},\n' for name, value in info.items())
    config = f"#pragma once\n#define FASTATTN_ISAS(X) {' '.join(f'X({name})' for name in isas)}\n"
    config += f"namespace fastattn {{\ninline constexpr const char* build_info[][2] = {{\n{entries}}};\n}}\n"
    write(ROOT / BUILD / "build_config.h", config)
    summary = f"CPU kernels for {', '.join(isas)}; {info['compiler']}; headers of torch {torch_version}; no CUDA sources"
    return list(objects), summary + (f"; left out: {', '.join(left_out)}" if left_out else "")


class BuildNative(build_ext):
    def run(self):
        package = ROOT / "fastattn" if self.inplace or self.editable_mode else Path(self.build_lib, "fastattn")
        package.mkdir(parents=True, exist_ok=True)
        reason = missing()
        if reason:
            print(f"fastattn: WARNING: no native kernels, operators run on the reference: {reason}", file=sys.stderr)
            (package / "_native_missing.txt").write_text(reason + "\n")
            return
        libraries, summary = plan()
        print(f"fastattn: building {summary}", flush=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        import fcntl  # POSIX only, like everything from here on

        lock = open(ROOT / BUILD / "lock", "w")  # two installs at a time would spoil ninja's log
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run([ninja(), "-f", str(BUILD / "build.ninja"), *jobs], cwd=ROOT).returncode:
            raise SystemExit("fastattn: the native kernels did not compile, see the compiler's message above")
        for library in libraries:
            target = package / library.replace("_introspection.so", "_introspection" + sysconfig.get_config_var("EXT_SUFFIX"))
            fresh = target.with_suffix(".new")
            shutil.copy(ROOT / BUILD / library, fresh)
            fresh.replace(target)  # in one step: a process that has the old file mapped keeps it
        (package / "_native_missing.txt").unlink(missing_ok=True)


class Wheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = missing() is not None  # py3-none-any if nothing native is inside


setup(
    packages=[*find_packages(include=["fastattn", "fastattn.*"]), "fastattn.kernels"],
    package_dir={"fastattn.kernels": "kernels"},
    ext_modules=[Extension("fastattn._introspection", [])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    # Asked of build front ends only, and only where a torch would be used but cannot be seen.
    setup_requires=["torch>=2.11"] if "egg_info" in sys.argv and not missing(True) and torch() is None else [],
)
