"""The benchmark over many networks: what it measures and what its table says; the networks themselves are not run."""

from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def quantized(name, **values):
    row = {"name": name, "outcome": "quantized", "quantized": 3, "left": 1, "job_seconds": 2.0}
    return row | {"simulation_sqnr": 30.0, "file_sqnr": 30.0, "float_ms": 4.0, "ours_ms": 2.0} | values


ROWS = [
    quantized("a/fast", peer_sqnr=20.0, peer_ms=4.0),
    quantized("a/worse", file_sqnr=28.0),
    quantized("a/worse_warned", file_sqnr=28.0, warnings=["net_qdq_model.onnx is 2.0 dB worse than the simulation"]),
    quantized("a/slower", ours_ms=8.0, peer_sqnr=40.0, peer_ms=2.0),
    {"name": "a/refused", "outcome": "refused", "error": "ModelError: a | in a name\nmore"},
    {"name": "a/failed", "outcome": "failed", "error": "save: the process ended with -11"},
    {"name": "a/absent", "outcome": "not installed"},
]


def test_summary_counts_what_succeeds_parts_and_slows_down():
    from zoo_networks.table import summary

    figures = dict(line.strip("| ").split(" | ")[:2] for line in summary(ROWS) if line.startswith("| "))
    assert figures["networks tried"] == "6"
    assert figures["quantized, or a clear error that names the cause"] == "5 (83.3%)"
    assert figures["of these quantized"] == "4"
    assert figures["file more than 1 dB worse than the simulation, with a warning"] == "1"
    assert figures["file slower than the float file, with a warning"] == "0"
    assert figures["median speed over float, 4 networks above 1 ms"] == "2.00"
    assert figures["networks on which our file has the higher SQNR"] == "1 of 2"
    assert figures["not installed"] == "1"


def test_every_network_is_one_row_of_the_table():
    from zoo_networks.table import table

    header, _, *lines = table(ROWS)
    assert [line.split("`")[1] for line in lines] == [row["name"] for row in ROWS]
    assert len({line.replace("\\|", "").count("|") for line in [header, *lines]}) == 1
    assert "worse, warned" in lines[2]
    assert lines[3].endswith("| slower |")
    assert "ModelError: a \\| in a name |" in lines[4]


def test_rows_that_were_not_measured_again_stay_and_say_so(tmp_path):
    from zoo_networks.table import MARK, write_page

    page = tmp_path / "zoo.md"
    page.write_text(f"# Head\n{MARK}| `a/fast` | old |\n| `a/old` | 3 of 4 |  |\n| `a/older` | 1 of 2 | worse |\n")
    for _ in range(2):  # the mark is not repeated
        write_page(page, ROWS)
    text = page.read_text()
    assert text.startswith("# Head\n")
    assert "| `a/fast` | old |" not in text
    assert "| `a/old` | 3 of 4 | of an earlier version |" in text
    assert "| `a/older` | 1 of 2 | worse; of an earlier version |" in text
    assert "2 rows are of an earlier version" in text


def test_sqnr_counts_every_float_output_alike():
    from zoo_networks.measuring import sqnr

    exact = [[np.array([10.0, 0.0]), np.array([1.0]), np.array([3])]]
    rounded = [[np.array([10.0, 1.0]), np.array([1.1]), np.array([4])]]
    assert sqnr(exact, rounded) == pytest.approx(20.0)  # 1 of 100 and 0.01 of 1; the integer does not count
    assert sqnr(exact, exact) == 200
    assert sqnr(exact, [[np.array([np.nan, 0.0]), *exact[0][1:]]]) == -200
    assert sqnr(exact, [[np.zeros(3), *exact[0][1:]]]) is None  # as many rows as detections
    with pytest.raises(ValueError, match="became"):
        sqnr(exact, [exact[0][1:]])


def test_the_zoo_has_eighty_torch_networks_with_names_of_their_own():
    from zoo_networks.registry import all_networks

    networks = all_networks()
    groups = [network.group for network in networks]
    assert sum(group in {"own", "torchvision", "timm", "transformers", "trained"} for group in groups) >= 80
    assert groups.count("onnx") >= 13
    assert len({network.name for network in networks}) == len(networks)


def test_every_remedy_is_a_gain_a_refusal_or_an_error_of_its_own(tmp_path):
    import json
    from types import SimpleNamespace

    from zoo_networks.remedies import REMEDIES, measure_remedies, remedy_table

    from amct.errors import ConfigError

    exact = np.arange(1, 9, dtype=np.float32)
    output = SimpleNamespace(graph=SimpleNamespace(output=[SimpleNamespace(name="y")]))

    class Subject:
        calibration = test = (0,)

        def quantize(self, config=None, **options):
            if options.get("adaround") == "fast":
                raise RuntimeError("raw")
            if options.get("equalize"):
                raise ConfigError("not for this network")
            scale = 0.1 if config is None else 0.01
            return SimpleNamespace(noise=scale, prepared=SimpleNamespace(float_model=lambda _: output))

        def file_reference(self, *_):
            return [exact]

        def simulated_outputs(self, quantized, *_):
            return [exact * (1 + quantized.noise)]

    measure_remedies(SimpleNamespace(name="a/net", build=lambda _: Subject()), tmp_path)
    row = json.loads((tmp_path / "row.json").read_text())
    assert set(row["remedies"]) == set(REMEDIES)
    assert row["remedies"]["DMQ"]["gain"] == pytest.approx(20, abs=0.01)
    assert row["remedies"]["equalization"] == {"refused": "ConfigError: not for this network"}
    assert row["remedies"]["AdaRound, fast"]["error"] == "RuntimeError: raw"
    text = "\n".join(remedy_table([row, {"name": "a/other", "outcome": "failed"}]))
    assert "| DMQ | 1 | +20.0 | +20.0 | +20.0 | 1 | 0 | 0 |" in text
    assert "| equalization | 0 |  |  |  | 0 | 1 | 0 |" in text
    assert "| AdaRound, fast | 0 |  |  |  | 0 | 0 | 1 |" in text
