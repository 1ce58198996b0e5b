"""One browser for all tests of pages."""

from __future__ import annotations

import pytest
from headless_chromium import Chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()
