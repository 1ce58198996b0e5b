"""quant.json: files of the save, files that were written on their own."""

from __future__ import annotations

import hashlib
import json

import pytest

from amct.atomic import FileGroup, write_text
from amct.errors import FileError, ParseError
from amct.model.quant_json import VERSION, QuantJson, add_related, read_quant_json, related_file, write_quant_json


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(folder, related):
    document = QuantJson(version=VERSION, model="net", layers={}, skipped=(), files={}, related=related)
    with FileGroup() as group:
        group.write_text(folder / "net_model.onnx", "model")
        write_quant_json(group, folder / "net_quant.json", document)
    return folder / "net_quant.json"


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "records").mkdir()
    write_text(tmp_path / "records" / "r.txt", "record")
    return tmp_path / "out", tmp_path / "records" / "r.txt"


def test_files_written_on_their_own_are_listed_with_their_hash(folders):
    out, record = folders
    path = save(out, {"record": related_file(record, out)})
    write_text(out / "net_report.html", "<html>")
    add_related(path, "report", out / "net_report.html")
    assert json.loads(path.read_text())["related"] == {
        "record": {"path": "../records/r.txt", "sha256": sha256(record)},
        "report": {"path": "net_report.html", "sha256": sha256(out / "net_report.html")},
    }
    assert sorted(read_quant_json(path).related) == ["record", "report"]


def test_a_changed_report_is_a_warning_and_a_changed_model_an_error(folders, caplog):
    out, _ = folders
    path = save(out, {})
    write_text(out / "net_report.html", "<html>")
    add_related(path, "report", out / "net_report.html")
    write_text(out / "net_report.html", "of another run")
    read_quant_json(path)
    assert 'the report "' in caplog.text
    assert 'has changed since "net_quant.json" was written' in caplog.text
    write_text(out / "net_model.onnx", "of another run")
    with pytest.raises(FileError, match="is not the file that"):
        read_quant_json(path)


def test_paths_that_lead_out_of_the_folder_are_not_followed(folders, caplog):
    out, record = folders
    path = save(out, {"record": related_file(record, out)})
    write_text(record, "changed")
    read_quant_json(path)
    assert caplog.text == ""


def test_a_record_that_the_save_replaces_is_a_file_of_the_save(folders):
    out, _ = folders
    write_text(out / "net_model.onnx", "read before the save")
    path = save(out, {"record": related_file(out / "net_model.onnx", out)})
    assert "related" not in json.loads(path.read_text())
    read_quant_json(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../records/r.txt", "/etc/passwd", "a/b"])
def test_names_of_files_that_are_paths_are_refused(folders, name):
    out, _ = folders
    path = save(out, {})
    content = json.loads(path.read_text())
    content["files"] = {name: {"format": "onnx", "sha256": "0"}}
    path.write_text(json.dumps(content))
    with pytest.raises(ParseError, match=r"net_quant\.json: files: expected names of files in its folder, got"):
        read_quant_json(path)
