"""The page holds the whole content, escaped, bounded, and asks for nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_examples import HOSTILE, activation, layer, small_report

from amct.errors import FileError
from amct.model.certificate import Certificate, Point
from amct.report.content import (
    InputContent,
    LayerContent,
    LayerNote,
    ReportContent,
    TrainedClips,
    TrainingContent,
)
from amct.report.curve import BOTTOM, LEFT, RIGHT, TOP, plots
from amct.report.network import Box, Network
from amct.report.page import bounded, loss_curve, page, worst_layers, write_page


class Reader(HTMLParser):
    """What a browser would see: the text of each element by tag, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        self.elements.append((f"/{tag}", {}, []))  # takes what follows

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]


def data_of(reader: Reader) -> dict:
    (found,) = [text for attributes, text in reader.all("script") if attributes.get("id") == "data"]
    return json.loads(found)


def test_the_data_of_every_layer_is_on_the_page():
    content = small_report()
    layers = data_of(Reader(page(content)))["layers"]
    assert [entry["name"] for entry in layers] == [layer.name for layer in content.layers]
    seen = content.layers[0].inputs[0].activation
    assert layers[0]["inputs"][0]["bars"] == {
        "low": seen.histogram.low,
        "high": seen.histogram.high,
        "counts": list(seen.histogram.counts),
        "below": 0,
        "above": 3,
    }
    assert layers[0]["inputs"][0]["clip"] == [0.0, 6.375]
    assert layers[0]["weights"]["min"] == list(content.layers[0].weights.minimum)
    assert layers[0]["weights"]["max"] == list(content.layers[0].weights.maximum)
    assert layers[4] == {"name": "pool", "inputs": [{}]}


def test_every_number_is_in_the_table():
    reader = Reader(page(small_report()))
    rows = [attributes for attributes, _ in reader.all("tr") if "data-index" in attributes]
    assert len(rows) == 6
    cells = [
        (attributes["data-value"], text.strip()) for attributes, text in reader.all("td") if "data-value" in attributes
    ]
    first = cells[:8]
    assert [key for key, _ in first] == ["1", "30.5", "0.999", "0.001", "0.002", "808", "0.025", "-128.0"]
    assert [text for _, text in first] == ["1", "30.5", "0.99900", "0.1", "0.2", "8/8", "0.025", "-128"]
    assert cells[17] == ("Infinity", "∞")
    assert cells[33:40] == [("", "–")] * 4 + [("800", "8/–")] + [("", "–")] * 2


def test_hostile_names_stay_text():
    text = page(small_report())
    reader = Reader(text)
    assert len(reader.all("script")) == 2
    assert reader.all("img") == []
    assert reader.all("i") == reader.all("b") == []
    assert [text for _, text in reader.all("option")][3].strip() == HOSTILE
    assert data_of(reader)["layers"][3]["name"] == HOSTILE
    assert "<title>Net &lt;b&gt;" in text


def test_the_page_asks_for_nothing_from_outside():
    text = page(small_report())
    assert re.findall(r"(?:https?:)?//[a-z0-9]", text.replace("https://", "http://")) == []
    assert "@import" not in text
    assert "url(" not in text
    sources = [
        value
        for _, attributes, _ in Reader(text).elements
        for key, value in attributes.items()
        if key in ("src", "href")
    ]
    assert sources == ["data:,"]


def test_only_our_script_may_run():
    reader = Reader(page(small_report()))
    (policy,) = [a["content"] for a, _ in reader.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    (script,) = [text for attributes, text in reader.all("script") if "id" not in attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy


def test_notes_files_config_and_versions_are_told():
    text = page(small_report())
    for told in (
        "folded into &#34;conv1&#34;",
        "LayerNorm is not quantizable &lt;i&gt;",
        "batch_num: 2 &lt;script&gt;",
        "net_qdq_model.onnx",
        "123 kB",
        "amct 0.1.0",
        "2026-01-02 03:04 UTC",
        "measured on 3 batches",
    ):
        assert told in text, told


def test_the_worst_layers_come_first_and_have_the_longest_bars():
    layers = small_report().layers
    worst = worst_layers(layers, [layer.sqnr for layer in layers], count=3)
    assert [bar.index for bar in worst] == [3, 1, 5]
    assert worst[0].length == 100
    # 20 dB are a tenth in amplitude.
    assert worst[1].error == pytest.approx(10 ** (-21.25 / 20))
    assert worst[1].length == pytest.approx(100 * 10 ** ((9.5 - 21.25) / 20))


def test_layers_without_error_or_without_measurement_are_not_harmed():
    assert worst_layers((layer("a", 1.0), layer("b", 1.0)), (math.inf, None)) == []
    (dead,) = worst_layers((layer("a", 1.0),), (-math.inf,))
    assert (dead.error, dead.length) == (1.0, 100.0)


def test_a_report_of_nothing_is_a_page_too():
    assert "0 layers quantized" in page(ReportContent(model="Empty", measured_on="nothing"))


def test_a_big_model_stays_below_ten_megabytes():
    big = layer("backbone.stage4.block17.attention.projection", 23.456789, channels=2048)
    ragged = replace(
        big.weights,
        minimum=tuple(-0.0123456789 * (place + 1) for place in range(2048)),
        maximum=tuple(0.0987654321 * (place + 1) for place in range(2048)),
    )
    counts = tuple(123_456_789 + place for place in range(64))
    seen = replace(activation(), histogram=replace(activation().histogram, counts=counts))
    content = ReportContent(
        model="Big",
        measured_on="1 batch",
        layers=(replace(big, weights=ragged, inputs=(replace(big.inputs[0], activation=seen),)),) * 2000,
        skipped=(LayerNote(layer="x" * 500, text="y" * 5000),) * 20_000,
        config="z" * 10_000_000,
    )
    assert len(page(content).encode()) < 10_000_000
    kept = bounded(content)
    assert max(kept.layers[0].weights.maximum) == max(ragged.maximum)
    assert kept.skipped[-1].text == "18000 of 20000 entries are not shown"
    assert len(kept.config) == 200_000


def test_too_many_layers_are_cut_and_the_page_says_so():
    content = ReportContent(
        model="Big",
        measured_on="1 batch",
        layers=(LayerContent(name="a", type="Linear", inputs=(InputContent(bits=8),)),) * 3001,
    )
    assert "1 of 3001 layers are not shown" in page(content)


def test_the_file_is_written_whole(tmp_path):
    target = tmp_path / "new" / "report.html"
    write_page(target, small_report())
    assert target.read_text(encoding="utf-8") == page(small_report())
    assert [entry.name for entry in target.parent.iterdir()] == ["report.html"]


def test_a_folder_in_the_way_is_an_error(tmp_path):
    with pytest.raises(FileError, match="it is a folder"):
        write_page(tmp_path, small_report())


def test_a_layer_with_a_very_long_name_is_found_in_the_network():
    name = "encoder." * 60
    boxes = (Box(name="x", type="input"), Box(name=name, type="Conv", inputs=(0,), layer=name, integer=True))
    reader = Reader(page(replace(small_report(), layers=(layer(name, 12.0),), network=Network(boxes=boxes))))
    (drawn,) = (attributes for attributes, _ in reader.all("g") if "data-index" in attributes)
    assert drawn["class"] == "box integer q1"
    assert drawn["data-index"] == "0"


def test_a_network_that_is_too_large_to_be_drawn_says_so():
    boxes = tuple(Box(name=f"b{place}", type="Conv", inputs=(place - 1,) if place else ()) for place in range(4001))
    text = page(replace(small_report(), network=Network(boxes=boxes)))
    assert "It has 4001 operations, too many to be drawn" in text
    assert "<svg viewBox" not in text.partition("<figure>")[0]


def test_training_shows_the_loss_curve_and_where_clips_moved():
    clips = (
        TrainedClips(layer=HOSTILE, before=(-1.0, 2.0), after=(-0.5, 1.5)),
        TrainedClips(layer="fc", before=None, after=(0.0, 3.25)),
    )
    training = TrainingContent(losses=(2.0, math.nan, 1.0, 0.5), clips=clips)
    text = page(replace(small_report(), training=training))
    assert "<polyline" in text
    assert "-0.5 … 1.5" in text
    assert "0 … 3.25" in text
    assert HOSTILE not in text
    assert "polyline" not in page(replace(small_report(), training=TrainingContent(losses=(1.0,))))
    assert 'id="training"' not in page(small_report())


def test_a_long_loss_curve_is_drawn_through_means():
    points = loss_curve(tuple(float(step) for step in range(10_000))).split()
    assert len(points) <= 320
    assert points[0].startswith("0.0,")
    assert points[-1].startswith("640.0,")


def test_the_plots_of_a_search_put_every_point_where_its_numbers_are():
    certificate = Certificate(
        goal="a drop of at most 1 points", limit=0.01, loss=0.005, bound=None, confidence=0.95, error=0.05, samples=10,
        searched=10, seed=0,
    )  # fmt: skip
    made = [
        Point(number=number, choices={"a": "int8"}, cost=cost, noise=0.0, loss=loss, samples=10, met=loss <= 0.01,
              chosen=number == 2, unit="bit operations", bytes=cost / 8, milliseconds=None if number == 3 else 1.0)
        for number, cost, loss in ((1, 1000.0, 0.03), (2, 2000.0, 0.005), (3, 4000.0, 0.0))
    ]  # fmt: skip
    size, operations, time = plots(made, certificate)
    assert [len(each.dots) for each in (size, operations, time)] == [3, 3, 2]
    assert size.dots[-1].number == 2  # the result is drawn last
    places = {dot.number: (dot.x, dot.y) for dot in size.dots}
    # equal distances in bytes and in points are equal distances on the page; less loss is higher
    assert (places[3][0] - places[2][0]) / (places[2][0] - places[1][0]) == pytest.approx(2)
    assert (places[1][1] - places[2][1]) / (places[2][1] - places[3][1]) == pytest.approx(5)
    assert places[3][1] < places[2][1] < size.goal < places[1][1]
    for plot in (size, operations, time):
        assert all(LEFT <= dot.x <= RIGHT and TOP <= dot.y <= BOTTOM for dot in plot.dots)
        assert all(2 <= len(ticks) <= 7 for ticks in (plot.columns, plot.rows)), plot
    assert plots((), certificate) == plots(made, None) == []
