"""What the tests of the patch compile, once for all of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from make_messages import messages_of
from quant_library import PATCH, SMALL, QuantLibrary
from small_net import SmallCaffe

from caffe_patch.merge_proto import merge


@pytest.fixture(scope="session")
def compile_cpp():
    """A function that compiles C++ with g++ and returns the file it made."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("these tests compile C++: install the package g++")

    def compiled(target, sources, *options):
        command = [compiler, "-std=c++11", "-Wall", "-Wextra", "-Werror", *options, "-o", target, *sources]
        done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    return compiled


@pytest.fixture(scope="session")
def quant_lib_path(compile_cpp, tmp_path_factory):
    """libquant.so, with the options of install.py."""
    target = tmp_path_factory.mktemp("quant_lib") / "libquant.so"
    options = ["-O3", "-ffp-contract=off", "-fPIC", "-shared"]
    return compile_cpp(target, sorted((PATCH / "quant_lib").glob("*.cpp")), *options)


@pytest.fixture(scope="session")
def library(quant_lib_path):
    """The library, called with NumPy arrays."""
    return QuantLibrary(quant_lib_path)


@pytest.fixture(scope="session")
def small_caffe(compile_cpp, tmp_path_factory):
    """The layers of the patch, compiled with the small Caffe of these tests."""
    folder = tmp_path_factory.mktemp("small_caffe")
    target = folder / "libsmall.so"
    return SmallCaffe(compile_cpp(target, *small_sources(folder), "-O0", "-fPIC", "-shared"))


def small_sources(folder):
    """The sources, then the options, of the layers with the small Caffe; made headers are written to a folder."""
    base = merge.read_file(str(SMALL / "caffe.proto"))
    merge.merge(base, merge.read_file(str(PATCH / "merge_proto" / "amct_custom.proto")))
    for path, text in (
        ("proto/caffe.pb.h", messages_of(base)),
        ("util/quant.hpp", (PATCH / "quant_lib" / "quant.hpp").read_text()),
    ):
        (folder / "caffe" / path).parent.mkdir(parents=True)
        (folder / "caffe" / path).write_text(text)
    sources = [*SMALL.glob("*.cpp"), *(PATCH / "src").glob("**/*.cpp"), *(PATCH / "quant_lib").glob("*.cpp")]
    warnings = ["-Wno-sign-compare", "-Wno-unused-parameter"]  # as Caffe compiles
    return sources, *warnings, *(f"-I{each}" for each in (folder, SMALL, PATCH / "include", PATCH / "quant_lib"))


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """Errors only on the screen, and files in a folder of the test."""
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)
