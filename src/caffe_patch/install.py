"""Installs AMCT's quantization layers into the source tree of a Caffe, with Python 3.6 and a C++ compiler only.

    python3 install.py --caffe_dir CAFFE_DIR [--custom_proto CUSTOM_PROTO_FILE]
    python3 install.py --caffe_dir CAFFE_DIR --uninstall

What the tree will hold is made first, in memory; then it is written, and taken back if anything fails. The files that
are replaced are kept in CAFFE_DIR/.amct_patch, with a list of all that were written.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

if __package__:
    from caffe_patch.merge_proto import merge as proto
    from caffe_patch.source_tree import PatchError, Say, Stage, Tree
else:  # a file of a folder, on a machine without AMCT
    from merge_proto import merge as proto  # type: ignore[import-not-found, no-redef]
    from source_tree import PatchError, Say, Stage, Tree  # type: ignore[import-not-found, no-redef]

HERE = os.path.dirname(os.path.abspath(__file__))
__all__ = ["PatchError", "install", "main", "uninstall"]

PROTO = "src/caffe/proto/caffe.proto"
LIBRARY = "quant_lib/libquant.so"
BUILD_FILES = ("Makefile.patch", "CMakeLists.txt.patch")
#: The guide's patches, in its order.
LSTM_PATCHES = (
    "lstm_calibration_layer.cpp.patch",
    "lstm_calibration_layer.hpp.patch",
    "lstm_quant_layer.cpp.patch",
    "lstm_quant_layer.hpp.patch",
)
#: Without fused multiply-add: the numbers are those of AMCT's own engine, to the bit.
COMPILER_OPTIONS = ["-std=c++11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-Wl,-soname,libquant.so"]


def main(arguments: Optional[List[str]] = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Install AMCT's quantization layers into the source tree of a Caffe (CPU only).", add_help=False
    )
    parser.add_argument("-h", "--h", "--help", action="help", help="show this message")
    parser.add_argument("--caffe_dir", required=True, help="the source tree of your Caffe")
    parser.add_argument("--custom_proto", metavar="CUSTOM_PROTO_FILE", help="your .proto file with layers of your own")
    parser.add_argument("--uninstall", action="store_true", help="take everything back")
    given = parser.parse_args(arguments)
    try:
        if given.uninstall:
            uninstall(given.caffe_dir, _info)
        else:
            install(given.caffe_dir, given.custom_proto, _info)
    except PatchError as error:
        for problem in error.problems:
            print("[ERROR]" + problem, file=sys.stderr)
        return 1
    return 0


def _info(text: str) -> None:
    print("[INFO]" + text)


def install(caffe_dir: str, custom_proto: Optional[str], say: Say, base_proto: Optional[str] = None) -> None:
    """Install the patch.

    Args:
        caffe_dir: The source tree of a Caffe.
        custom_proto: A .proto file with the user's own layers.
        say: Called with each line that tells what was done.
        base_proto: The caffe.proto to merge with; by default the one in merge_proto/.

    Raises:
        PatchError: It could not be installed; the tree is as it was.
    """
    tree = Tree(caffe_dir)
    _check_tree(tree)
    tree.recover(say)
    copies = dict(_sources())
    for path in copies:
        if tree.read(path) is not None and not tree.is_ours(path) and tree.read(path) != copies[path]:
            raise PatchError(["{}: a file of this name is there, and not from this patch".format(tree.full(path))])
    patches = [read_patch(os.path.join(HERE, "patch", name)) for name in _patch_names()]
    patched = _patched(tree, patches)
    merged, notes = _merged_proto(tree, custom_proto, base_proto or os.path.join(HERE, "merge_proto", "caffe.proto"))
    copies[LIBRARY] = _build_library()
    stages = _stages(tree, copies, patched, merged, notes)
    changed = tree.write(stages, say)
    if not changed:
        say("Everything was installed already: nothing was changed.")


def uninstall(caffe_dir: str, say: Say) -> None:
    """Give a tree back the files that it had before.

    Raises:
        PatchError: The patch is not installed there, or the tree cannot be written.
    """
    tree = Tree(caffe_dir)
    if not tree.entries:
        raise PatchError(["{}: the patch is not installed there".format(tree.root)])
    tree.take_back(say)
    say("The patch is taken back: '{}' is as it was.".format(tree.root))


_NEEDED = ("include/caffe/layer.hpp", "src/caffe/layers", PROTO)


def _check_tree(tree: Tree) -> None:
    missing = [path for path in _NEEDED if not os.path.exists(tree.full(path))]
    if missing:
        raise PatchError(["{}: not the source tree of a Caffe: it has no {}".format(tree.root, ", ".join(missing))])
    config, cache = tree.read("Makefile.config"), tree.read("build/CMakeCache.txt")
    if config is not None and not re.search(rb"^[ \t]*CPU_ONLY[ \t]*[:?]?=[ \t]*1\b", config, re.MULTILINE):
        raise PatchError([_GPU.format("Makefile.config", "CPU_ONLY := 1")])
    if cache is not None and re.search(rb"^CPU_ONLY:BOOL=(OFF|0|FALSE|NO)\b", cache, re.MULTILINE | re.IGNORECASE):
        raise PatchError([_GPU.format("build/CMakeCache.txt", "-DCPU_ONLY=ON")])


_GPU = (
    "{}: this Caffe is built for a GPU; there is no libquant_gpu.so: the layers of this patch run on the CPU only. "
    "Set {}, which every machine can run"
)

# -- What is copied ----------------------------------------------------------------------------------------------------


def _sources() -> Iterator[Tuple[str, bytes]]:
    for folder, ending in (("include", ".hpp"), ("src", ".cpp")):
        for path in _files(folder, ending):
            yield path, _own(path)
    for path in [*_files("quant_lib", ".hpp"), *_files("quant_lib", ".cpp")]:
        yield path, _own(path)
    yield "include/caffe/util/quant.hpp", _own("quant_lib/quant.hpp")


def _files(folder: str, ending: str) -> List[str]:
    found = []
    for place, _, names in os.walk(os.path.join(HERE, folder)):
        below = os.path.relpath(place, HERE).replace(os.sep, "/")
        found += ["{}/{}".format(below, name) for name in names if name.endswith(ending)]
    return sorted(found)


def _own(path: str) -> bytes:
    with open(os.path.join(HERE, *path.split("/")), "rb") as file:
        return file.read()


def _build_library() -> bytes:
    """libquant.so, built by $CXX."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    folder = tempfile.mkdtemp()
    try:
        target = os.path.join(folder, "libquant.so")
        sources = [os.path.join(HERE, *path.split("/")) for path in _files("quant_lib", ".cpp")]
        command = compiler + COMPILER_OPTIONS + sources + ["-o", target]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        if done.returncode != 0:
            raise PatchError(["libquant.so could not be built; {} said:".format(compiler[0]), done.stdout.strip()])
        with open(target, "rb") as file:
            return file.read()
    except OSError as error:
        message = "libquant.so could not be built: {}. Install a C++ compiler (Debian: g++), or name yours: CXX=..."
        raise PatchError([message.format(error)]) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- Anchored edits ----------------------------------------------------------------------------------------------------

Edit = NamedTuple("Edit", [("kind", str), ("old", str), ("new", str)])
Patch = NamedTuple("Patch", [("name", str), ("source", str), ("target", str), ("edits", List[Edit])])

_EDIT = re.compile(r"^<<<< (once|all|cut)\n(.*?)\n====\n(.*?)\n?^>>>>$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"^(source|target) (\S+)$", re.MULTILINE)


def _patch_names() -> List[str]:
    found = [name for name in sorted(os.listdir(os.path.join(HERE, "patch"))) if name.endswith(".patch")]
    first = [name for name in LSTM_PATCHES if name in found]
    last = [name for name in BUILD_FILES if name in found]
    return first + [name for name in found if name not in first + last] + last


def read_patch(path: str) -> Patch:
    """Read a patch: a ``source``, a ``target`` (the same: it is edited), and edits by text that must be there."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    places = dict(_PLACE.findall(text.partition("<<<<")[0]))
    edits = [Edit(*found) for found in _EDIT.findall(text)]
    return Patch(os.path.basename(path), places["source"], places["target"], edits)


def edited(patch: Patch, text: str) -> Tuple[str, List[str]]:
    """The text after the edits of a patch, and what was not as expected. What an edit adds is not added again."""
    problems = []
    for edit in patch.edits:
        if patch.source == patch.target and edit.old in edit.new and edit.new in text:
            continue
        count = text.count(edit.old)
        if count == 0 or (edit.kind == "once" and count > 1):
            wanted = "once" if edit.kind == "once" else "at least once"
            message = '{}: expected {}, found {} times: "{}"'
            problems.append(message.format(patch.source, wanted, count, edit.old.strip().replace("\n", "\\n")))
        elif edit.kind == "cut":
            start = text.index(edit.old)
            end = text.find(edit.new, start + len(edit.old))
            if end < 0:
                problems.append('{}: not found behind "{}": "{}"'.format(patch.source, edit.old, edit.new))
            else:
                text = text[:start] + text[end:]
        else:
            text = text.replace(edit.old, edit.new)
    return text, problems


def _patched(tree: Tree, patches: List[Patch]) -> Dict[str, Dict[str, bytes]]:
    """What each patch writes, by the patch's name."""
    texts: Dict[str, str] = {}
    results: Dict[str, Dict[str, bytes]] = {}
    problems: List[str] = []
    for patch in patches:
        content = tree.before(patch.source)
        if content is None:
            if patch.name not in BUILD_FILES:
                problems.append("{}: there is no such file".format(tree.full(patch.source)))
            continue
        text = texts.get(patch.source, content.decode("utf-8", "surrogateescape"))
        text, found = edited(patch, text)
        problems += found
        texts[patch.target] = text
        results[patch.name] = {patch.target: text.encode("utf-8", "surrogateescape")}
        if patch.target != patch.source and tree.read(patch.target) is not None and not tree.is_ours(patch.target):
            problems.append("{}: a file of this name is there, and not from this patch".format(patch.target))
    if not any(name in results for name in BUILD_FILES):
        problems.append("{}: neither Makefile nor CMakeLists.txt is there".format(tree.root))
    if problems:
        other = "This patch is for BVLC/caffe 1.0 (commit 9b891540); this tree is another version. Nothing was changed"
        raise PatchError([*problems, other])
    return results


# -- caffe.proto -------------------------------------------------------------------------------------------------------


def _merged_proto(tree: Tree, custom_proto: Optional[str], base_proto: str) -> Tuple[bytes, List[str]]:
    """The caffe.proto that the tree gets, and notes for the user."""
    before = tree.before(PROTO)
    assert before is not None, "_check_tree"
    try:
        base = proto.read_file(base_proto)
        base.package = base.package or "caffe"
        own = proto.read_file(os.path.join(HERE, "merge_proto", "amct_custom.proto"))
        custom = proto.read_file(custom_proto) if custom_proto else None
        theirs = proto.parse(before.decode("utf-8", "surrogateescape"), tree.full(PROTO))
        notes = proto.merge(base, own, custom)
    except (proto.ProtoError, UnicodeDecodeError, OSError) as error:
        raise PatchError([str(error)]) from error
    except proto.MergeError as error:
        raise PatchError(error.problems) from error
    kept, problems = [], []  # type: List[str], List[str]
    _keep_theirs(base, theirs, custom or proto.ProtoFile(""), kept, problems)
    if problems:
        raise PatchError([*problems, "This caffe.proto is of a fork that cannot be patched. Nothing was changed"])
    if kept:
        notes.append("caffe.proto keeps of this tree: " + ", ".join(kept))
    return proto.to_text(base).encode("utf-8"), notes


def _keep_theirs(
    base: proto.Message, theirs: proto.Message, custom: proto.ProtoFile, kept: List[str], problems: List[str]
) -> None:
    """Add what only the tree's caffe.proto has: its layers are compiled with it. The user's custom.proto goes first."""
    of_custom = [message.name for message in custom.messages if message.name != proto.LAYER]
    for enum in theirs.enums:
        known = next((each for each in base.enums if each.name == enum.name), None)
        if known is None:
            base.enums.append(enum)
            kept.append(enum.name)
        else:
            known.values.extend(value for value in enum.values if value[0] not in dict(known.values))
    for message in theirs.messages:
        other = base.message(message.name)
        if other is None:
            base.messages.append(message)
            kept.append(message.name)
        elif message.name not in of_custom:
            chosen = [field.name for field in custom.layer_fields] if message.name == proto.LAYER else []
            _keep_fields(other, message, chosen, kept, problems)
            _keep_theirs(other, message, custom, kept, problems)


def _keep_fields(
    base: proto.Message, theirs: proto.Message, chosen: List[str], kept: List[str], problems: List[str]
) -> None:
    numbers = {field.number: field for field in base.fields}
    for field in theirs.fields:
        if field.name in chosen:
            continue
        other = base.field(field.name) or numbers.get(field.number)
        name = "{}.{}".format(theirs.name, field.name)
        if other is None:
            base.fields.append(field)
            kept.append(name)
        elif (other.name, other.number, _kind(other)) != (field.name, field.number, _kind(field)):
            message = "{}: {} {} = {} of this tree clashes with the merged {} {} = {}"
            problems.append(message.format(PROTO, field.kind, name, field.number, other.kind, other.name, other.number))
        elif _default(other) != _default(field):
            other.options = field.options
            kept.append("the default of " + name)


def _kind(field: proto.Field) -> str:
    return field.kind.rpartition(".")[2]


def _default(field: proto.Field) -> str:
    text = field.options.get("default", "")
    try:
        return repr(float(text))
    except ValueError:
        return text.replace("'", '"')


# -- What is written, in the guide's order -----------------------------------------------------------------------------


def _stages(
    tree: Tree, copies: Dict[str, bytes], patched: Dict[str, Dict[str, bytes]], merged: bytes, notes: List[str]
) -> List[Stage]:
    what = "copy source files, header files and quant_lib to '{}'".format(tree.root)
    patches = [name for name in patched if name not in BUILD_FILES]
    stages = [Stage(["Begin to " + what], copies, ["Finish " + what]), Stage(["Begin to install patch."], {}, [])]
    stages += [Stage([], patched[name], ["Install patch '{}' successfully.".format(name)]) for name in patches]
    success = 'Merge and replace "{}" success.'
    stages.append(Stage(["Finish install patch.", *notes], {PROTO: merged}, [success.format("caffe.proto")]))
    for name in BUILD_FILES:
        if name in patched:
            stages.append(Stage([], patched[name], [success.format(next(iter(patched[name])))]))
    return stages


if __name__ == "__main__":
    sys.exit(main())
