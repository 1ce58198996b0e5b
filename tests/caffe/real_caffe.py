"""A real Caffe with the patch installed and built, and programs that run its nets and solvers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caffe_patch import install

SCHEMA = Path(__file__).parents[2] / "src" / "amct" / "schema" / "caffe.proto"


@dataclass
class RealCaffe:
    """A built checkout and the program ``run_caffe`` that uses it."""

    root: Path
    program: Path

    def forward(self, model, weights, passes, blobs=(), folder=None):
        """The values of blobs (by default the outputs) in each pass, the processor time, and what was logged.

        ``passes`` has for each pass the arrays of all inputs.
        """
        given, results = folder / "given.bin", folder / "results.bin"
        with given.open("wb") as file:
            file.write(np.int32(len(passes)).tobytes())
            for arrays in passes:
                for array in arrays:
                    file.write(np.array([array.ndim, *array.shape], np.int32).tobytes())
                    file.write(np.ascontiguousarray(array, np.float32).tobytes())
        done = self.run("forward", model, weights, given, results, *blobs)
        (seconds,) = (float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds "))
        names, found = _blobs(done.stdout), _values(results)
        assert len(found) == len(names) * len(passes)
        rows = [dict(zip(names, found[at : at + len(names)], strict=True)) for at in range(0, len(found), len(names))]
        return rows, seconds, done.stderr

    def solve(self, solver, start="", folder=None):
        """Train to the end; return the values of all parameters, and what was logged."""
        results = folder / "parameters.bin"
        done = self.run("solve", solver, results, *([start] if start else []))
        return list(zip(_blobs(done.stdout), _values(results), strict=True)), done.stderr

    def run(self, *words, check=True):
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        command = [self.program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert not check or done.returncode == 0, done.stderr[-3000:]
        return done


def _blobs(text):
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("blob ")]


def _values(path):
    content, found, offset = path.read_bytes(), [], 0
    while offset < len(content):
        count = int(np.frombuffer(content, np.int32, 1, offset)[0])
        found.append(np.frombuffer(content, np.float32, count, offset + 4))
        offset += 4 + 4 * count
    return found


def built(root: Path, folder: Path) -> RealCaffe:
    """Install the patch into a checkout that is configured already, build its library and the program."""
    install.install(str(root), None, print, str(SCHEMA))
    _done(["make", "-C", root, "lib"])
    program = folder / "run_caffe"
    library = root / "build" / "lib"
    options = ["-std=c++11", "-O2", "-DCPU_ONLY", f"-I{root}/include", f"-I{root}/build/src"]
    linked = [f"-L{library}", "-lcaffe", "-lglog", "-lgflags", "-lprotobuf", "-lboost_system", f"-Wl,-rpath,{library}"]
    source = Path(__file__).with_name("run_caffe.cpp")
    _done(["g++", *options, "-o", program, source, *linked, f"-Wl,-rpath-link,{root}/quant_lib"])
    return RealCaffe(root, program)


def _done(command):
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
