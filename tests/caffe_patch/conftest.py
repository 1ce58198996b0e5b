"""What the tests of the patch compile, once for all of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from quant_library import PATCH, QuantLibrary


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
