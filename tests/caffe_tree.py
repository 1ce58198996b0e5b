"""The bones of a Caffe's source tree, of the tests' own making: what install.py looks for, with its anchors."""

from __future__ import annotations

import os
from pathlib import Path

from caffe_patch import install

PROTO = """\
syntax = "proto2";
package caffe;

message BlobShape { repeated int64 dim = 1 [packed = true]; }
message BlobProto {
  optional BlobShape shape = 7;
  repeated float data = 5 [packed = true];
}
message LayerParameter {
  optional string name = 1;
  optional string type = 2;
  repeated string bottom = 3;
  repeated string top = 4;
  repeated BlobProto blobs = 7;
  optional BatchNormParameter batch_norm_param = 139;
}
message BatchNormParameter { optional bool use_global_stats = 1; }
"""
MAKEFILE = """\
LIBRARIES := m
LIBRARY_DIRS :=
ORIGIN := \\$$ORIGIN
# Complete build flags.
CXXFLAGS += $(COMMON_FLAGS)
LDFLAGS += $(foreach folder,$(LIBRARY_DIRS),-L$(folder)) $(foreach library,$(LIBRARIES),-l$(library))

flags:
\t@echo "$(CXXFLAGS) : $(LDFLAGS)"
"""
CMAKE = "cmake_minimum_required(VERSION 3.5)\nproject(Bones CXX)\ninclude(cmake/Dependencies.cmake)\n"


def write_bones(folder: Path) -> Path:
    """Write the files of a tree that this patch fits."""
    texts = {"include/caffe/layer.hpp": "// a layer\n", "src/caffe/proto/caffe.proto": PROTO}
    texts |= {"Makefile": MAKEFILE, "CMakeLists.txt": CMAKE, "src/caffe/layers/relu_layer.cpp": "// a layer\n"}
    for patch in patches():
        if patch.name not in install.BUILD_FILES:
            texts[patch.source] = with_anchors(texts.get(patch.source, "// from the bones\n"), patch)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "Makefile").chmod(0o754)
    return folder


def patches() -> list[install.Patch]:
    """The patches of the package."""
    folder = Path(install.HERE) / "patch"
    return [install.read_patch(str(path)) for path in sorted(folder.glob("*.patch"))]


def with_anchors(text: str, patch: install.Patch) -> str:
    """The text with a line for each anchor of a patch that is not there yet."""
    for number, edit in enumerate(patch.edits):
        before = patch._replace(edits=patch.edits[:number])
        if edit.old not in install.edited(before, text)[0]:
            added = edit.old
            for earlier in reversed(before.edits):
                added = added.replace(earlier.new, earlier.old) if earlier.kind == "all" else added
            text += f"{added}\n"
        if edit.kind == "cut" and edit.new not in text.partition(edit.old)[2]:
            text += f"{edit.new}\n"
    return text


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files below a folder: mode and content; folders have a name that ends with a slash."""
    found = {}
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        found |= {f"{below / name}/": (0, b"") for name in folders}
        for name in names:
            path = Path(place) / name
            found[str(below / name)] = (path.stat().st_mode, path.read_bytes())
    return found
