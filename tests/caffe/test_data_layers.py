"""Data layers: the recorded cases of a real Caffe, transform_param, order, threads, and every mistake."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import threading
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
from caffe_cases import FOLDER
from PIL import Image

from amct.caffe import pycaffe as caffe
from amct.data.lmdb import write_lmdb
from amct.errors import AmctError, FileError, ModelError, ParseError
from amct.schema import message_class

IO = FOLDER / "io"
CASES = sorted(path.name for path in IO.iterdir())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_net(text, phase=caffe.TEST):
    Path("net.prototxt").write_text(text)
    return caffe.Net("net.prototxt", phase)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def pictures(count=6, shape=(3, 5, 7), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def data_layer(text="", transform="", tops='top: "data" top: "label"'):
    return (
        f'layer {{ name: "data" type: "Data" {tops} transform_param {{ {transform} }} '
        f'data_param {{ source: "db" backend: LMDB batch_size: 2 {text} }} }}'
    )


# ---------------------------------------------------------------------- what Caffe recorded


def test_the_corpus_is_complete():
    assert CASES == [
        "data_lmdb_float",
        "data_lmdb_meanfile_crop",
        "data_lmdb_plain",
        "hdf5data_two_files",
        "hdf5output",
    ]


@pytest.mark.parametrize("name", [name for name in CASES if name != "hdf5output"])
def test_batches_are_caffes(name, monkeypatch):
    monkeypatch.chdir(IO / name)
    data = np.load("data.npz")
    meta = json.loads(str(data["meta"]))
    net = caffe.Net("net.prototxt", caffe.TEST)
    assert {blob: list(net.blobs[blob].shape) for blob in meta["blob_shapes"]} == meta["blob_shapes"]
    for batch in range(len(data["out:data"])):
        result = net.forward()
        np.testing.assert_allclose(result["data"], data["out:data"][batch], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(result["label"], data["out:label"][batch])


def test_hdf5_output_is_caffes(folder):
    shutil.copytree(IO / "hdf5output", folder / "case")
    with h5py.File(folder / "case" / "out.h5") as file:
        recorded = {name: file[name][()] for name in file}
    Path("net.prototxt").write_text((folder / "case" / "net.prototxt").read_text())
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.blobs["a"].data[...] = recorded["data"].reshape(2, 3)
    net.blobs["b"].data[...] = recorded["label"].reshape(2)
    net.forward()
    with h5py.File("out.h5") as file:
        assert set(file) == set(recorded)
        for name, wanted in recorded.items():
            assert (file[name].dtype, file[name].shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(file[name][()], wanted)
    net.blobs["a"].data[...] = 9
    net.forward()
    with h5py.File("out.h5") as file:
        assert file["data"].shape == (4, 3, 1, 1)
        np.testing.assert_array_equal(file["data"][:2], recorded["data"])
        assert (file["data"][2:] == 9).all()


# ---------------------------------------------------------------------- transform_param


def expected(value, mean=0.0, scale=1.0):
    return (value.astype(np.float32) - np.float32(mean)) * np.float32(scale)


def test_mean_values_scale_and_the_middle_crop():
    values = pictures()
    write_lmdb("db", zip(values, range(6), strict=True))
    net = make_net(data_layer(transform="crop_size: 3 scale: 0.5 mean_value: 1 mean_value: 2 mean_value: 3"))
    result = net.forward()
    mean = np.array([1, 2, 3]).reshape(3, 1, 1)
    np.testing.assert_array_equal(result["data"], expected(values[:2, :, 1:4, 2:5], mean, 0.5))
    net = make_net(data_layer(transform="mean_value: 7"))
    np.testing.assert_array_equal(net.forward()["data"], expected(values[:2], 7))


def test_training_crops_anywhere_and_mirrors_half():
    values = pictures(1, (1, 6, 6))
    write_lmdb("db", [(values[0], 0)])
    caffe.set_random_seed(5)
    net = make_net(data_layer(transform="crop_size: 4 mirror: true"), caffe.TRAIN)
    windows = {}
    for top in range(3):
        for left in range(3):
            window = values[0][:, top : top + 4, left : left + 4].astype(np.float32)
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, :, ::-1].tobytes()] = (top, left, True)
    seen = [windows[picture.tobytes()] for _ in range(60) for picture in net.forward()["data"]]
    assert len(set(seen)) == 18
    # 120 fair coins: further than 30 from 60 once in 10^7 runs, and the seed is fixed
    assert 30 < sum(mirrored for _, _, mirrored in seen) < 90


def test_mirroring_goes_on_in_the_test_phase_but_not_cropping():
    values = pictures(1, (1, 5, 5))
    write_lmdb("db", [(values[0], 0)])
    caffe.set_random_seed(1)
    net = make_net(data_layer(transform="crop_size: 3 mirror: true"))
    middle = values[0][:, 1:4, 1:4].astype(np.float32)
    seen = {picture.tobytes() for _ in range(10) for picture in net.forward()["data"]}
    assert seen == {middle.tobytes(), np.ascontiguousarray(middle[:, :, ::-1]).tobytes()}


def test_a_mean_file_is_cropped_with_the_picture_and_not_mirrored():
    values = pictures(1, (2, 4, 4))
    mean = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
    Path("mean.binaryproto").write_bytes(caffe.io.array_to_blobproto(mean).SerializeToString())
    write_lmdb("db", [(values[0], 0)])
    caffe.set_random_seed(2)
    net = make_net(data_layer(transform='crop_size: 2 mirror: true mean_file: "mean.binaryproto"'), caffe.TRAIN)
    difference = expected(values[0], mean[0])
    windows = [difference[:, top : top + 2, left : left + 2] for top in range(3) for left in range(3)]
    allowed = {np.ascontiguousarray(w[:, :, ::step]).tobytes() for w in windows for step in (1, -1)}
    assert {picture.tobytes() for _ in range(20) for picture in net.forward()["data"]} <= allowed


def encoded(image, label=0):
    import io

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return message_class("caffe.Datum", schema="caffe")(encoded=True, label=label, data=stream.getvalue())


def write_datums(datums, path="db"):
    with lmdb.open(path) as environment, environment.begin(write=True) as transaction:
        for index, datum in enumerate(datums):
            transaction.put(b"%08d" % index, datum if isinstance(datum, bytes) else datum.SerializeToString())


def test_encoded_pictures_and_forced_channels():
    image = pictures(1, (4, 5, 3))[0]
    write_datums([encoded(image, 4), encoded(image, 5)])
    bgr = image[:, :, ::-1].transpose(2, 0, 1)
    result = make_net(data_layer()).forward()
    np.testing.assert_array_equal(result["data"], np.stack([bgr, bgr]))
    np.testing.assert_array_equal(result["label"], [4, 5])
    assert make_net(data_layer(transform="force_gray: true")).forward()["data"].shape == (2, 1, 4, 5)
    write_datums([encoded(image[:, :, 0])] * 2, "gray")
    gray = data_layer().replace('"db"', '"gray"')
    assert make_net(gray).forward()["data"].shape == (2, 1, 4, 5)
    colored = data_layer(transform="force_color: true").replace('"db"', '"gray"')
    np.testing.assert_array_equal(make_net(colored).forward()["data"], np.stack([[image[:, :, 0]] * 3] * 2))


def test_the_old_place_of_the_transformation():
    values = pictures(2)
    write_lmdb("db", zip(values, range(2), strict=True))
    net = make_net(data_layer("scale: 2 crop_size: 3").replace("transform_param {  }", ""))
    np.testing.assert_array_equal(net.forward()["data"], expected(values[:, :, 1:4, 2:5], scale=2))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("crop_size: 6", "crop_size 6 is larger than the picture, 5 x 7"),
        ("mean_value: 1 mean_value: 2", "Specify either 1 mean_value or as many as channels: 3; got 2"),
        ('mean_value: 1 mean_file: "m"', "Cannot specify mean_file and mean_value at the same time"),
        ("force_color: true force_gray: true", "cannot set both force_color and force_gray"),
        ('mean_file: "other.binaryproto"', r"the mean file has shape \(1, 2, 2\), the data \(3, 5, 7\)"),
        ('mean_file: "flat.npy"', r"must hold an image \(3 axes\), its shape is \(3,\)"),
    ],
)
def test_transformations_that_do_not_fit(transform, message):
    write_lmdb("db", zip(pictures(), range(6), strict=True))
    other = caffe.io.array_to_blobproto(np.zeros((1, 1, 2, 2)))
    Path("other.binaryproto").write_bytes(other.SerializeToString())
    np.save("flat.npy", np.zeros(3))
    with pytest.raises(ModelError, match=f'layer "data" .*{message}'):
        make_net(data_layer(transform=transform))


# ---------------------------------------------------------------------- Data


def test_two_nets_read_one_database_independently():
    values = pictures(3)
    write_lmdb("db", zip(values, range(3), strict=True))
    first, second = make_net(data_layer()), make_net(data_layer(tops='top: "data"'))
    assert [first.forward()["label"].tolist() for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    np.testing.assert_array_equal(second.forward()["data"], values[:2])
    assert second.outputs == ["data"]


def test_rand_skip_starts_somewhere():
    write_lmdb("db", zip(pictures(20), range(20), strict=True))
    starts = set()
    for seed in range(12):
        caffe.set_random_seed(seed)
        first, second = make_net(data_layer("rand_skip: 5")).forward()["label"]
        assert second == first + 1
        starts.add(int(first))
    assert starts <= set(range(5))
    assert len(starts) > 1


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (data_layer(), FileError, r"db: cannot open the LMDB: there is no such folder"),
        (data_layer().replace("batch_size: 2", ""), ModelError, r"data_param needs batch_size, at least 1"),
        (data_layer().replace('source: "db"', ""), ModelError, r"data_param needs source, the folder of the database"),
        (data_layer().replace("backend: LMDB", ""), ModelError, r"LevelDB .*not supported. Make an LMDB of it: run"),
    ],
)
def test_databases_that_are_not_there(layer, error, message):
    with pytest.raises(error, match=message):
        make_net(layer)


def test_an_lmdb_called_a_leveldb():
    write_lmdb("db", zip(pictures(), range(6), strict=True))
    with pytest.raises(
        ModelError, match=r'"db" is an LMDB, but backend is LEVELDB \(the default\): write backend: LMDB'
    ):
        make_net(data_layer().replace("backend: LMDB", ""))


def test_an_empty_database():
    lmdb.open("db").close()
    with pytest.raises(ParseError, match=r"the LMDB is empty"):
        make_net(data_layer())


def test_a_shape_that_changes_inside_a_batch():
    write_lmdb("db", [(pictures(1)[0], 0), (pictures(1, (3, 5, 8))[0], 0)])
    net = make_net(data_layer())
    message = r'layer "data" \(Data\): picture 1 of a batch has shape \(3, 5, 8\), the first one \(3, 5, 7\)'
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            net.forward()
    cropped = make_net(data_layer(transform="crop_size: 4"))
    assert cropped.forward()["data"].shape == (2, 3, 4, 4)


def test_a_shape_that_changes_between_batches_reaches_the_layers_above():
    write_lmdb("db", [(pictures(1)[0], 0), (pictures(1, (3, 6, 9))[0], 0)])
    above = (
        'layer { name: "p" type: "Pooling" bottom: "data" top: "p" pooling_param { pool: MAX global_pooling: true } }'
    )
    net = make_net(data_layer().replace("batch_size: 2", "batch_size: 1") + above)
    shapes = []
    for _ in range(3):
        net.forward()
        shapes.append(tuple(net.blobs["data"].shape))
        assert net.blobs["p"].data.shape == (1, 3, 1, 1)
        assert net.blobs["p"].data.max() == net.blobs["data"].data.max()
    assert shapes == [(1, 3, 5, 7), (1, 3, 6, 9), (1, 3, 5, 7)]
    net.reshape()
    assert tuple(net.blobs["data"].shape) == (1, 3, 5, 7)


def test_a_damaged_datum_is_named():
    good = caffe.io.array_to_datum(pictures(1)[0], 1).SerializeToString()
    write_datums([good, good, good[:20]])
    net = make_net(data_layer())
    net.forward()
    with pytest.raises(ParseError, match=r'db: entry "00000002": not a Datum, or damaged'):
        net.forward()


# ---------------------------------------------------------------------- threads


def test_threads_start_with_the_first_forward_and_end_with_the_net():
    write_lmdb("db", zip(pictures(), range(6), strict=True))
    before = threads()
    net = make_net(data_layer(transform="mirror: true"), caffe.TRAIN)
    assert threads() == before
    net.forward()
    assert len(threads()) == len(before) + 1
    del net
    gc.collect()
    assert threads() == before


def test_a_solver_leaves_no_thread_behind():
    write_lmdb("db", zip(pictures(), [0, 1, 2, 0, 1, 2], strict=True))
    Path("net.prototxt").write_text(
        data_layer()
        + 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }'
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
    )
    Path("solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" test_iter: 2 test_interval: 2 snapshot_prefix: "s"'
    )
    before = threads()
    solver = caffe.SGDSolver("solver.prototxt")
    solver.step(3)
    assert len(threads()) == len(before) + 2
    del solver
    gc.collect()
    assert threads() == before


def test_what_is_read_ahead_does_not_change_what_comes():
    values = pictures(7)
    write_lmdb("db", zip(values, range(7), strict=True))
    shallow, deep = make_net(data_layer("prefetch: 1")), make_net(data_layer("prefetch: 9"))
    for _ in range(9):
        ours, theirs = shallow.forward(), deep.forward()
        np.testing.assert_array_equal(ours["data"], theirs["data"])
        np.testing.assert_array_equal(ours["label"], theirs["label"])


def test_a_seed_repeats_shuffles_crops_and_mirrors():
    write_lmdb("db", zip(pictures(), range(6), strict=True))

    def run():
        caffe.set_random_seed(11)
        net = make_net(data_layer(transform="crop_size: 3 mirror: true"), caffe.TRAIN)
        return [net.forward()["data"].copy() for _ in range(6)]

    np.testing.assert_array_equal(run(), run())


# ---------------------------------------------------------------------- HDF5Data


def hdf5_layer(text="", tops='top: "data" top: "label"'):
    options = f'source: "list.txt" batch_size: 3 {text}'
    return f'layer {{ name: "data" type: "HDF5Data" {tops} hdf5_data_param {{ {options} }} }}'


def write_hdf5(name, rows, **extra):
    with h5py.File(name, "w") as file:
        file["data"] = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        file["label"] = np.arange(rows)
        for key, value in extra.items():
            del file[key]
            file[key] = value


def test_shuffling_gives_every_row_once_a_round():
    write_hdf5("a.h5", 5)
    write_hdf5("b.h5", 4, label=np.arange(10, 14))
    Path("list.txt").write_text("a.h5\nb.h5\n")
    caffe.set_random_seed(3)
    net = make_net(hdf5_layer("shuffle: true"))
    rounds = [np.concatenate([net.forward()["label"].copy() for _ in range(3)]).tolist() for _ in range(6)]
    for labels in rounds:
        assert sorted(labels) == [0, 1, 2, 3, 4, 10, 11, 12, 13]
        assert set(labels[:5]) == {0, 1, 2, 3, 4} or set(labels[:4]) == {10, 11, 12, 13}  # one file after the other
    assert len({tuple(labels) for labels in rounds}) > 1


def test_one_file_and_whole_numbers():
    write_hdf5("a.h5", 2, label=np.array([[4, 5], [6, 7]], np.int64))
    Path("list.txt").write_text("a.h5")
    result = make_net(hdf5_layer()).forward()
    assert result["label"].dtype == np.float32
    np.testing.assert_array_equal(result["label"], [[4, 5], [6, 7], [4, 5]])


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda: Path("list.txt").unlink(), FileError, "Failed to open source file: list.txt"),
        (
            lambda: Path("list.txt").write_text(" \n"),
            ModelError,
            r"Must have at least 1 HDF5 filename listed in list.txt",
        ),
        (
            lambda: Path("list.txt").write_text("none.h5"),
            FileError,
            r"Failed opening HDF5 file: none.h5: there is no such",
        ),
        (lambda: Path("a.h5").write_text("text"), ParseError, r"Failed opening HDF5 file: a.h5"),
        (lambda: shutil.copy("a.h5", "list.txt"), ParseError, r"not a text file; source must list HDF5 files"),
        (
            lambda: write_hdf5("a.h5", 3, label=np.arange(2)),
            ParseError,
            r"must have the same number of rows",
        ),
        (lambda: write_hdf5("a.h5", 0), ParseError, 'dataset "data" is empty'),
        (lambda: write_hdf5("a.h5", 1, label=np.array([b"a"])), ParseError, 'dataset "label" must hold numbers'),
        (
            lambda: write_hdf5("a.h5", 1, label=np.float32(3)),
            ParseError,
            r"at least one axis, it is float32 of shape \(\)",
        ),
    ],
)
def test_hdf5_files_that_do_not_fit(prepare, error, message):
    write_hdf5("a.h5", 3)
    Path("list.txt").write_text("a.h5")
    prepare()
    with pytest.raises(error, match=message):
        make_net(hdf5_layer())


def test_hdf5_layers_that_make_no_sense():
    write_hdf5("a.h5", 3)
    Path("list.txt").write_text("a.h5")
    with pytest.raises(ParseError, match=r'Failed to find HDF5 dataset "other" .* The file has: data, label'):
        make_net(hdf5_layer(tops='top: "other"'))
    with pytest.raises(ModelError, match=r"HDF5Data does not transform data: remove transform_param"):
        make_net(hdf5_layer().replace("hdf5_data_param", "transform_param { scale: 2 } hdf5_data_param"))
    with pytest.raises(ModelError, match=r"hdf5_data_param needs source .* and batch_size > 0"):
        make_net(hdf5_layer().replace("batch_size: 3", ""))


def test_files_of_different_rows():
    write_hdf5("a.h5", 3)
    write_hdf5("b.h5", 3, data=np.zeros((3, 4)))
    Path("list.txt").write_text("a.h5 b.h5")
    net = make_net(hdf5_layer())
    net.forward()
    with pytest.raises(ParseError, match=r"b.h5: its rows have shapes \[\(4,\), \(\)\], the previous file"):
        net.forward()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ModelError, "hdf5_output_param needs file_name"),
        ('file_name: "none/out.h5"', FileError, r"Failed to open HDF5 file none/out.h5: its folder does not exist"),
    ],
)
def test_hdf5_outputs_that_cannot_be_written(text, error, message):
    with pytest.raises(error, match=message):
        make_net(
            'layer { name: "in" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 } } }'
            f'layer {{ name: "out" type: "HDF5Output" bottom: "a" bottom: "b" hdf5_output_param {{ {text} }} }}'
        )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("shape { dim: 2 } shape { dim: 3 }", r"the same number of rows, got \(2,\) and \(3,\)"),
        ("shape { dim: 1 dim: 1 dim: 1 dim: 1 dim: 1 } shape { dim: 1 }", "writes blobs of 1 to 4 axes"),
    ],
)
def test_hdf5_outputs_of_blobs_that_do_not_fit(shapes, message):
    with pytest.raises(ModelError, match=message):
        make_net(
            f'layer {{ name: "in" type: "Input" top: "a" top: "b" input_param {{ {shapes} }} }}'
            'layer { name: "out" type: "HDF5Output" bottom: "a" bottom: "b" hdf5_output_param { file_name: "o.h5" } }'
        )


# ---------------------------------------------------------------------- ImageData


def image_layer(text="", transform=""):
    return (
        f'layer {{ name: "data" type: "ImageData" top: "data" top: "label" transform_param {{ {transform} }} '
        f'image_data_param {{ source: "list.txt" batch_size: 2 {text} }} }}'
    )


def write_images(count=4, shape=(5, 7, 3)):
    images = pictures(count, shape)
    Path("in").mkdir(exist_ok=True)
    for index, image in enumerate(images):
        Image.fromarray(image).save(f"in/picture {index}.png")
    Path("list.txt").write_text("".join(f"picture {index}.png {index * 10}\n" for index in range(count)))
    return images


def bgr(images):
    return images[:, :, :, ::-1].transpose(0, 3, 1, 2)


def test_pictures_in_order_with_labels():
    images = write_images()
    net = make_net(image_layer('root_folder: "in/"', "scale: 0.5 mean_value: 4"))
    for start, labels in ((0, [0, 10]), (2, [20, 30]), (0, [0, 10])):
        result = net.forward()
        np.testing.assert_array_equal(result["data"], expected(bgr(images[start : start + 2]), 4, 0.5))
        np.testing.assert_array_equal(result["label"], labels)


def test_pictures_resized_and_gray():
    write_images()
    net = make_net(image_layer('root_folder: "in/" new_height: 8 new_width: 6 is_color: false'))
    assert net.forward()["data"].shape == (2, 1, 8, 6)
    cropped = make_net(image_layer('root_folder: "in/" new_height: 10 new_width: 14', "crop_size: 4"))
    assert cropped.forward()["data"].shape == (2, 3, 4, 4)


def test_pictures_shuffled_and_skipped():
    write_images(8)
    caffe.set_random_seed(8)
    net = make_net(image_layer('root_folder: "in/" shuffle: true'))
    rounds = [tuple(np.concatenate([net.forward()["label"].copy() for _ in range(4)])) for _ in range(4)]
    assert {tuple(sorted(labels)) for labels in rounds} == {tuple(range(0, 80, 10))}
    assert len(set(rounds)) > 1
    caffe.set_random_seed(8)
    first = make_net(image_layer('root_folder: "in/" rand_skip: 3')).forward()["label"]
    assert first[0] in (0, 10, 20)
    assert first[1] == first[0] + 10


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", FileError, r"Could not load picture 0.png: the picture cannot be read"),
        (
            'root_folder: "in/" new_height: 3',
            ModelError,
            r"new_height and new_width to be set at the same time: got 3 and 0",
        ),
        ('root_folder: "in/" rand_skip: 50', ModelError, "Not enough points to skip: rand_skip 50, 4 pictures"),
        ('root_folder: "in/" batch_size: 0', ModelError, "batch_size must be at least 1, got 0"),
        ('source: "none.txt"', FileError, "the list of pictures cannot be read"),
        ('source: "empty.txt"', ParseError, r"File is empty: the list names no picture"),
        ('source: ""', ModelError, "image_data_param needs source"),
    ],
)
def test_pictures_that_cannot_be_read(text, error, message):
    write_images()
    Path("empty.txt").touch()
    layer = image_layer(text)
    if "source" in text:
        layer = layer.replace('source: "list.txt"', "", 1)
    if "batch_size: 0" in text:
        layer = layer.replace("batch_size: 2", "", 1)
    with pytest.raises(error, match=message):
        make_net(layer)


def test_a_picture_of_another_size_later():
    write_images()
    Image.fromarray(pictures(1, (9, 9, 3))[0]).save("in/picture 3.png")
    net = make_net(image_layer('root_folder: "in/"'))
    net.forward()
    with pytest.raises(ModelError, match=r"picture 1 of a batch has shape \(3, 9, 9\), the first one \(3, 5, 7\)"):
        net.forward()


# ---------------------------------------------------------------------- MemoryData

MEMORY = (
    'layer { name: "m" type: "MemoryData" top: "d" top: "l" '
    "memory_data_param { batch_size: 2 channels: 1 height: 2 width: 2 } }"
)


def test_arrays_go_round():
    net = make_net(MEMORY)
    assert tuple(net.blobs["l"].shape) == (2,)
    data, labels = np.arange(16, dtype=np.float32).reshape(4, 1, 2, 2), np.arange(4, dtype=np.float32)
    net.set_input_arrays(data, labels)
    seen = []
    for _ in range(3):
        result = net.forward()
        assert result["l"].shape == (2, 1, 1, 1)
        seen.append(result["l"].ravel().tolist())
        result["d"][...] = -1
    assert seen == [[0, 1], [2, 3], [0, 1]]
    np.testing.assert_array_equal(data.ravel(), np.arange(16))


DATA, LABELS = np.zeros((4, 1, 2, 2), np.float32), np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        (DATA[:3], LABELS[:3], "first dimensions of input arrays must be a multiple of batch size"),
        (DATA[:0], LABELS[:0], "first dimensions of input arrays must be a multiple of batch size"),
        (DATA.astype(float), LABELS, "data array must be float32, got float64"),
        (DATA, LABELS.astype(int), "label array must be float32"),
        (DATA[:, :, :, ::-1], LABELS, "data array must be C contiguous"),
        (DATA[0], LABELS, r"data array must be 4-d, got shape \(1, 2, 2\)"),
        (DATA, LABELS[:2], "data and labels must have the same first dimension: 4 and 2"),
        (np.zeros((4, 2, 2, 2), np.float32), LABELS, "data array has wrong number of channels: 2, the layer expects 1"),
        (np.zeros((4, 1, 3, 2), np.float32), LABELS, "data array has wrong height"),
        (np.zeros((4, 1, 2, 3), np.float32), LABELS, "data array has wrong width"),
    ],
)
def test_arrays_that_do_not_fit(data, labels, message):
    with pytest.raises(RuntimeError, match=message):
        make_net(MEMORY).set_input_arrays(data, labels)


def test_memory_data_needs_arrays_sizes_and_the_first_place():
    with pytest.raises(ModelError, match=r"call net.set_input_arrays\(data, labels\) first"):
        make_net(MEMORY).forward()
    with pytest.raises(ModelError, match=r"batch_size, channels, height, and width must be specified and positive"):
        make_net(MEMORY.replace("width: 2", ""))
    other = make_net('layer { name: "in" type: "Input" top: "a" input_param { shape { dim: 1 } } }')
    with pytest.raises(RuntimeError, match=r"may only be called if the first layer is a MemoryDataLayer"):
        other.set_input_arrays(DATA, LABELS)


def test_hdf5_output_replaces_no_file_of_another_kind():
    Path("profile").write_text("the user's own file")
    text = (
        'layer { name: "in" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 } shape { dim: 2 } } } '
        'layer { name: "out" type: "HDF5Output" bottom: "a" bottom: "b" hdf5_output_param { file_name: "profile" } }'
    )
    with pytest.raises(FileError, match='layer "out": profile exists and is no HDF5 file, so it is not replaced'):
        make_net(text)
    assert Path("profile").read_text() == "the user's own file"
    make_net(text.replace("profile", "out.h5")).forward()
    make_net(text.replace("profile", "out.h5")).forward()


def test_missing_packages_are_named(monkeypatch):
    """lmdb and h5py come with amct[caffe]; without them the message says so. Reading an LMDB needs no library."""
    import sys

    write_lmdb("db", zip(pictures(), range(6), strict=True))
    Path("list.txt").write_text("a.h5")
    monkeypatch.setitem(sys.modules, "lmdb", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(AmctError, match=r"needs the lmdb package, .* pip install amct\[caffe\]"):
        write_lmdb("other", zip(pictures(), range(6), strict=True))
    make_net(data_layer()).forward()
    with pytest.raises(AmctError, match=r"HDF5 files need the h5py package, .* pip install amct\[caffe\]"):
        make_net(hdf5_layer())


def test_reading_hdf5_is_quiet(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    write_hdf5("a.h5", 3)
    Path("list.txt").write_text("a.h5")
    make_net(hdf5_layer()).forward()
    assert not [record for record in caplog.records if "HDF5" in record.getMessage()]
