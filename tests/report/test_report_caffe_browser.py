"""The report of a Caffe net in a real browser: it loads quietly, sorts, and shows each input of a layer."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.browser

NAMES = "Array.from(document.querySelectorAll('#table tbody tr:not([hidden]) .choose'), item => item.textContent)"
BARS = "Array.from(document.querySelectorAll('#activation rect title'), title => title.textContent)"


@pytest.fixture(scope="module")
def page(golden, tmp_path_factory):
    """The report of a small residual net, and what stands in it."""
    import amct.caffe as amct

    folder = tmp_path_factory.mktemp("caffe_report")
    nets = golden / "caffe" / "nets"
    data = np.random.default_rng(0).normal(size=(2, 4, 3, 32, 32)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMCT_LOG_LEVEL", "error")
        patch.chdir(folder)
        quantized = amct.quantize(nets / "mini_resnet.prototxt", nets / "mini_resnet.caffemodel", list(data))
        path = quantized.report("report.html", list(data), files=quantized.save("out/net"))
    return folder / path, quantized, list(data)


@pytest.fixture
def tab(browser, page):
    browser.open(page[0])
    return browser


def choose(tab, layer):
    tab.run(
        "Array.from(document.querySelectorAll('#table .choose'))"
        f".find(button => button.textContent === {layer!r}).click()"
    )


def test_it_loads_quietly_with_every_layer(tab, page):
    assert tab.complaints() == []
    assert [url for url in tab.requests() if not url.startswith("data:")] == [page[0].as_uri()]
    assert tab.run(NAMES) == list(page[1].layers)
    assert tab.run("document.querySelector('h1').textContent") == "mini_resnet"


def test_sorting_by_sqnr_is_the_order_of_harm(tab, page):
    tab.run(
        "Array.from(document.querySelectorAll('#table thead button'))"
        ".find(button => button.textContent === 'SQNR dB').click()"
    )
    harmed = sorted(page[1].compare(page[2]), key=lambda layer: layer.sqnr)
    assert tab.run(NAMES) == [layer.layer for layer in harmed]


def test_choosing_a_sum_offers_both_inputs(tab):
    choose(tab, "res3a")
    assert not tab.run("document.getElementById('input').hidden")
    assert tab.run("Array.from(document.getElementById('input').options, item => item.textContent)") == [
        "input 1 of 2",
        "input 2 of 2",
    ]
    first = tab.run(BARS)
    tab.run("var list = document.getElementById('input'); list.value = '1'; list.dispatchEvent(new Event('change'))")
    second = tab.run(BARS)
    assert len(first) == len(second) == 64
    assert first != second
    tab.run("document.getElementById('logarithmic').click()")  # draws the same input again
    assert tab.run(BARS) == second
    assert tab.run("document.getElementById('weights').textContent") == "no weights"
    choose(tab, "conv1")
    assert tab.run("document.getElementById('input').hidden")
    assert tab.run("document.querySelectorAll('#weights line.range').length") == 8
    assert tab.complaints() == []


def test_factors_of_all_inputs_stand_in_the_table(tab, page):
    factors = page[1].record["res3a"].record_d
    row = "Array.from(document.querySelectorAll('#table tbody tr')).find(row => row.cells[1].textContent === 'res3a')"
    assert tab.run(f"{row}.cells[8].innerText").split() == [f"{each.scale:.4g}" for each in factors]
    assert tab.run(f"{row}.cells[9].innerText").split() == [str(each.offset) for each in factors]


def test_it_fits_a_phone_and_prints(tab):
    choose(tab, "res3a")
    picture = Image.open(io.BytesIO(tab.screenshot(390, 800, phone=True))).convert("RGB")
    assert len(picture.getcolors(1 << 24)) > 20
    assert tab.run("document.documentElement.scrollWidth") <= 390
    printed = base64.b64decode(tab.send("Page.printToPDF", printBackground=False)["data"])
    assert printed.startswith(b"%PDF")
    assert 2 <= printed.count(b"/Type /Page\n") <= 5
    assert tab.complaints() == []
