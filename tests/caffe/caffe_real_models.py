"""Published Caffe models in tests: the guide's flow on their files, with what is checked of every one."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image
from ptq_caffe_flow import OFF_BY_DEFAULT, Flow, prototxt
from ptq_caffe_layers import check_every_layer

import amct_caffe as amct
from amct.caffe import equalize_model
from amct.caffe import pycaffe as caffe
from amct.config.layers import CAFFE_TYPES
from amct.record import read_caffe_record

ON_BY_DEFAULT = set(CAFFE_TYPES) - set(OFF_BY_DEFAULT)


class RealFlow(Flow):
    """A flow on given data; the prototxt gets the batch size of the data."""

    def calibrated(self, batches, **options):
        self.configure(batch_num=len(batches), **options)
        graph = self.prepare()
        net = self.net(*self.modified, keep_blobs=False)
        for each in batches:
            run(net, each)
        amct.save_model(graph, "Both", str(self.prefix))
        self.check_coverage()
        self.check_layers(batches[0][:1])
        return graph

    def equalized(self, batches):
        """The flow of the equalized model, in the same folder; the original stays as it is."""
        files = self.folder / "equalized.prototxt", self.folder / "equalized.caffemodel"
        changed = equalize_model(self.model, self.weights, batches, *files)
        print(f"{self.model.name}: channels of {len(changed)} layers equalized")
        assert changed
        return RealFlow(self.folder, *files)

    def net(self, model, weights, **options):
        return caffe.Net(str(model), caffe.TEST, weights=str(weights), **options)

    def fill(self, net, batches):
        return np.concatenate([run(net, each)[net.outputs[-1]] for each in batches])

    def outputs(self, kind, batches):
        files = (self.model, self.weights) if kind == "float" else self.result_files(kind)
        return self.fill(self.net(*files, keep_blobs=False), batches)

    def check_coverage(self):
        """The quantized layers are all that can be and are on by default: by the table, by the config, by the files."""
        original = self.original()  # of the types that are on, fusion removes none; the engine adds Split layers
        written = [name for name in original.layer_names if not name.endswith("_split")]
        possible = {name for name in written if original.layer_dict[name].type in ON_BY_DEFAULT}
        config = json.loads(self.config.read_text())
        enabled = {key for key, value in config.items() if isinstance(value, dict) and value.get("quant_enable")}
        record = set(read_caffe_record(self.out("quant_param_record.txt")))
        layers = prototxt(self.result_files("deploy")[0]).layer
        fused = json.loads(self.out("quant.json").read_text())
        reasons = {each["layer"]: each["reason"] for each in fused["skipped"]}
        coordinates = {name for name, reason in reasons.items() if "coordinates or indices" in reason}
        assert all(original.layer_dict[name].type in {"Concat", "Flatten", "Reshape"} for name in coordinates)
        possible -= coordinates
        print(f"{self.model.name}: {len(record)} of {len(possible)} layers that can be and are on are quantized")
        assert record == enabled == possible
        assert {layer.quant_param.object_layer for layer in layers if layer.type == "Quant"} == record
        assert {name for name, each in fused["layers"].items() if each["quantized"]} == record

    def check_layers(self, batch):
        """Deploy against fake-quant, layer by layer, from the same inputs."""
        fake, deploy = (self.net(*self.result_files(kind)) for kind in ("fake_quant", "deploy"))
        run(fake, batch)
        run(deploy, batch)
        checked = check_every_layer(fake, deploy, self.result_files("deploy")[0])
        print(f"{self.model.name}: deploy equals fake-quant in {dict(checked)}")
        assert sum(checked.values()) == len(read_caffe_record(self.out("quant_param_record.txt")))


def run(net, batch):
    blob = net.blobs[net.inputs[0]]
    if blob.shape != batch.shape:
        blob.reshape(*batch.shape)
    blob.data[...] = batch
    return {name: value.copy() for name, value in net.forward().items()}


def flow_of(assets, folder, tmp_path, model, weights):
    return RealFlow(tmp_path, assets / folder / model, assets / folder / weights)


def photo(assets, name, size):
    return np.asarray(Image.open(assets / "face_images" / name).convert("RGB").resize(size), np.float32)
