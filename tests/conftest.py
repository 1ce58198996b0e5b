"""What all tests share: where the real models are, and quiet, repeatable libraries."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
ASSETS = Path(os.environ.get("AMCT_ASSETS", ROOT.parent / "shared" / "assets")).absolute()

settings.register_profile(
    "amct",
    deadline=None,  # the machine is shared: time is measured in benchmarks/, not here
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("amct")


def assets_folder() -> Path:
    """The folder of real models and images: AMCT_ASSETS, or shared/assets beside the project."""
    return ASSETS


def pytest_configure() -> None:
    """Programs started in the background by a shell ignore Ctrl-C, and so would the programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not assets_folder().is_dir():
        missing["assets"] = "the real models are not on this machine (set AMCT_ASSETS)"
    if shutil.which("chromium") is None:
        missing["browser"] = "the program chromium is not on this machine (Debian: apt-get install chromium)"
    if "AMCT_REAL_CAFFE" not in os.environ:
        missing["real_caffe"] = "no checkout of BVLC/caffe is named (docs/caffe-patch.md; set AMCT_REAL_CAFFE)"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Flows log into the working folder: let that be anywhere but in the project."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("working_folder"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same values from the global generators, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # importing it would cost every test run a second
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def assets() -> Path:
    return assets_folder()


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN
