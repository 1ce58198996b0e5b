"""The page in a real browser: it loads quietly, sorts, searches, and draws the chosen layer."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image
from report_examples import HOSTILE, large_report, small_report

from amct.report.network import Box, Network
from amct.report.page import write_page

pytestmark = pytest.mark.browser

NAMES = "Array.from(document.querySelectorAll('#table tbody tr:not([hidden]) .choose'), item => item.textContent)"
CHOSEN = "document.querySelector('#table tr.chosen .choose').textContent"


@pytest.fixture
def tab(browser, tmp_path):
    write_page(tmp_path / "report.html", small_report())
    browser.open(tmp_path / "report.html")
    return browser


def click(tab, selector):
    tab.run(f"document.querySelector({selector!r}).click()")


def sort_by(tab, title):
    tab.run(
        "Array.from(document.querySelectorAll('#table thead button'))"
        f".find(button => button.textContent === {title!r}).click()"
    )


def write(tab, text):
    tab.run(f"var box = document.getElementById('search'); box.value = {text!r}; box.dispatchEvent(new Event('input'))")


def test_the_page_loads_quietly_and_asks_for_itself_only(tab, tmp_path):
    assert tab.run("document.readyState") == "complete"
    assert tab.complaints() == []
    assert [url for url in tab.requests() if not url.startswith("data:")] == [(tmp_path / "report.html").as_uri()]


def test_the_browser_tells_of_a_complaint(tab):
    tab.run("console.error('wrong')")
    tab.run("setTimeout(() => { throw new Error('bad') }, 0)")
    tab.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
    tab.send("Runtime.evaluate", expression="new Promise(done => setTimeout(done, 50))", awaitPromise=True)
    told = "\n".join(tab.complaints())
    assert "wrong" in told
    assert "bad" in told
    assert "Content Security Policy" in told


def test_names_of_layers_cannot_run(tab):
    assert tab.run("window.harm") is None
    assert HOSTILE in tab.run(NAMES)


def test_sorting_by_a_number_puts_what_was_not_measured_last(tab):
    sort_by(tab, "SQNR dB")
    assert tab.run(NAMES) == [HOSTILE, "conv10", "fc", "conv1", "conv2", "pool"]
    sort_by(tab, "SQNR dB")
    assert tab.run(NAMES) == ["conv2", "conv1", "fc", "conv10", HOSTILE, "pool"]
    assert tab.run("document.querySelector('th[aria-sort]').textContent") == "SQNR dB"


def test_sorting_by_name_knows_that_ten_follows_two(tab):
    sort_by(tab, "layer")
    assert [name for name in tab.run(NAMES) if name.startswith("conv")] == ["conv1", "conv2", "conv10"]
    sort_by(tab, "#")
    assert tab.run(NAMES)[:3] == ["conv1", "conv10", "conv2"]


def test_search_finds_names_and_types(tab):
    write(tab, "CONV1")
    assert tab.run(NAMES) == ["conv1", "conv10"]
    assert tab.run("document.getElementById('found').textContent") == "2 of 6 layers"
    write(tab, "avgpool")
    assert tab.run(NAMES) == ["pool"]
    write(tab, "")
    assert len(tab.run(NAMES)) == 6


def test_the_worst_layer_is_chosen_at_first(tab):
    assert tab.run(CHOSEN) == HOSTILE


def test_choosing_a_layer_draws_its_histogram_clip_range_and_weights(tab):
    click(tab, '#table tbody tr[data-index="0"]')
    assert tab.run(CHOSEN) == "conv1"
    assert tab.run("document.getElementById('chosen').selectedOptions[0].textContent.trim()") == "conv1"
    assert tab.run("document.querySelectorAll('#activation rect').length") == 64
    assert tab.run("document.querySelectorAll('#weights line.range').length") == 8
    assert "30.5" in tab.run("document.getElementById('facts').textContent")
    # The picture goes from -0.5 to 7.5; the clip range 0 … 6.375 is drawn at the same measure.
    lines = "Array.from(document.querySelectorAll('#activation line.clip'), line => Number(line.getAttribute('x1')))"
    low, high = tab.run(lines)
    assert (high - low) / 552 == pytest.approx(6.375 / 8)
    assert (low - 74) / 552 == pytest.approx(0.5 / 8)
    # Bars of 1/8: 4 before 0, and those whose middle is above 6.375: 9 of 64.
    assert tab.run("document.querySelectorAll('#activation rect.outside').length") == 4 + 9
    assert "3 values lie beyond" in tab.run("document.getElementById('activation-note').textContent")


def test_bars_of_harmed_layers_and_the_list_choose_too(tab):
    click(tab, '.bars .choose[data-index="5"]')
    assert tab.run(CHOSEN) == "fc"
    tab.run("var list = document.getElementById('chosen'); list.value = '4'; list.dispatchEvent(new Event('change'))")
    assert tab.run(CHOSEN) == "pool"
    assert tab.run("document.getElementById('activation').textContent") == "not measured"
    assert tab.run("document.getElementById('weights').textContent") == "no weights"


def test_the_logarithmic_switch_changes_the_bars(tab):
    heights = "Array.from(document.querySelectorAll('#activation rect'), bar => Number(bar.getAttribute('height')))"
    before = tab.run(heights)
    click(tab, "#logarithmic")
    after = tab.run(heights)
    assert after[32] == pytest.approx(after[63] * 32 / 63)
    assert before[32] > after[32]


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_the_page_fits_the_width_of_the_screen(tab, width):
    picture = Image.open(io.BytesIO(tab.screenshot(width, 800, phone=width < 500))).convert("RGB")
    assert picture.size == (width, 800)
    assert len(picture.getcolors(1 << 24)) > 20  # something is drawn, in more than the colours of empty panels
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints() == []


def test_axes_have_titles_and_round_numbers(tab):
    click(tab, '#table tbody tr[data-index="0"]')
    texts = "Array.from(document.querySelectorAll('#%s text'), text => text.textContent)"
    activation, weights = tab.run(texts % "activation"), tab.run(texts % "weights")
    assert {"value of the input", "number of values (log)", "1", "10", "0", "2", "4", "6"} <= set(activation)
    assert {"output channel", "weight", "-5", "0", "5"} <= set(weights)
    assert tab.run("document.querySelector('#activation rect title').textContent") == "-0.5 … -0.375: 0 values"
    click(tab, "#logarithmic")
    assert {"number of values", "20", "40", "60"} <= set(tab.run(texts % "activation"))


PICKED = "document.getElementById('picked').textContent"


def test_a_box_of_the_network_shows_its_layer(tab):
    assert tab.run("document.querySelectorAll('.canvas .box').length") == 6
    assert tab.run("document.querySelectorAll('.canvas .lines path').length") == 6
    tab.run("document.querySelector('.box[data-index=\"5\"]').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert tab.run(CHOSEN) == "fc"
    assert tab.run(PICKED).startswith("fc · type Linear · SQNR dB 25.0")
    assert tab.run("document.querySelectorAll('.box.chosen').length") == 1
    tab.run("document.querySelector('.box[data-index=\"0\"]').focus()")
    tab.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    assert tab.run(CHOSEN) == "conv1"


def test_everything_is_reached_with_the_keyboard(tab):
    tab.run("document.activeElement.blur()")
    focused = "(e => e.id || e.dataset.zoom || e.className.baseVal || e.className || e.tagName)(document.activeElement)"
    reached = []
    for _ in range(80):
        tab.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(tab.run(focused))
    assert {"SUMMARY", "choose", "canvas", "1.4", "fit", "chosen", "search", "logarithmic"} <= set(reached)
    assert any(str(name).startswith("box ") for name in reached)


def test_zooming_keeps_the_middle_and_finds_the_chosen_layer(tab, tmp_path):
    write_page(tmp_path / "large.html", large_report(200))
    tab.open(tmp_path / "large.html")
    click(tab, '[data-zoom="fit"]')
    drawn = tab.run("document.querySelector('.canvas svg').getBoundingClientRect().height")
    room = tab.run("document.querySelector('.canvas').clientHeight")
    assert drawn <= room + 1
    click(tab, '#table tbody tr[data-index="150"]')
    click(tab, '[data-zoom="chosen"]')
    inside = (
        "(([box, view]) => box.top >= view.top && box.bottom <= view.bottom)"
        "(['.box.chosen', '.canvas'].map(part => document.querySelector(part).getBoundingClientRect()))"
    )
    assert tab.run(inside) is True
    assert tab.complaints() == []


@pytest.mark.parametrize(("branches", "width"), [(1, 1080), (40, 1080), (40, 390)])
def test_a_network_begins_as_wide_as_the_page(browser, tmp_path, branches, width):
    """No branch is hidden at first; a narrow network begins in its own size, at its input."""
    inner = [Box(name=f"b{place}", type="Conv", inputs=(0,)) for place in range(branches)]
    boxes = (Box(name="x", type="input"), *inner, Box(name="sum", type="Add", inputs=tuple(range(1, branches + 1))))
    write_page(tmp_path / "wide.html", replace(small_report(), network=Network(boxes=boxes)))
    browser.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    try:
        browser.open(tmp_path / "wide.html")
        drawn = browser.run("document.querySelector('.canvas svg').getBoundingClientRect().width")
        room = browser.run("document.querySelector('.canvas').clientWidth")
        natural = browser.run("document.querySelector('.canvas svg').viewBox.baseVal.width")
        assert drawn == pytest.approx(min(room, natural), abs=1)
        assert browser.run("document.querySelector('.canvas').scrollTop") == 0
        assert browser.complaints() == []
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")


def test_a_thousand_layers_are_drawn(browser, tmp_path):
    write_page(tmp_path / "large.html", large_report())
    browser.open(tmp_path / "large.html")
    browser.send("Runtime.evaluate", expression="new Promise(requestAnimationFrame)", awaitPromise=True)
    assert browser.run("document.querySelectorAll('.canvas .box').length") == 1001
    assert browser.run("document.querySelectorAll('*').length") < 30_000  # what a browser lays out in a blink
    assert (tmp_path / "large.html").stat().st_size < 4_000_000
    paint = browser.run("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"first paint of 1000 layers after {paint:.0f} ms")
    assert browser.complaints() == []


def test_the_printed_page_has_the_verdict_the_network_and_no_buttons(tab):
    tab.send("Emulation.setEmulatedMedia", media="print")
    try:
        visible = "getComputedStyle(document.querySelector('%s')).display"
        assert tab.run(visible % ".tools") == "none"
        assert tab.run(visible % "#verdict") != "none"
        size = tab.run("(b => [b.width, b.height])(document.querySelector('.canvas svg').getBoundingClientRect())")
        assert min(size) > 50
        document = tab.send("Page.printToPDF", printBackground=True)["data"]
        assert len(document) > 10_000
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")
