"""install.py on the bones of a Caffe's tree: what it writes and says, that all or nothing is written and taken back."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from amct.cli import main
from caffe_patch import install, source_tree
from caffe_patch.merge_proto import merge
from caffe_tree import CMAKE, MAKEFILE, PROTO, patches, state, write_bones

FORKS = Path(__file__).parents[1] / "golden" / "caffe_proto"
BASE = Path(__file__).parents[2] / "src" / "amct" / "schema" / "caffe.proto"
SCENARIOS = {
    1: "message QuantParameter clashes with AMCT's own message QuantParameter: give yours another name",
    2: "quant_param = 208 clashes with AMCT's own field quant_param = 200000: give yours another name",
    3: "relu6_param = 206 has the number of caffe.proto's field norm_param = 206: give yours another number",
}


@pytest.fixture(scope="module")
def built():
    return install._build_library()


@pytest.fixture(autouse=True)
def built_once(built, request, monkeypatch):
    if "compiler" not in request.node.name:
        monkeypatch.setattr(install, "_build_library", lambda: built)


@pytest.fixture
def tree(tmp_path):
    return write_bones(tmp_path / "caffe")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "caffe_patch"
    assert main(["caffe", "patch", "export", str(folder)]) == 0
    return folder


def put_in(tree, custom=None, base=BASE):
    said = []
    install.install(str(tree), None if custom is None else str(custom), said.append, str(base))
    return said


def refused(tree, *parts, custom=None, base=BASE):
    before = state(tree)
    with pytest.raises(install.PatchError) as caught:
        put_in(tree, custom, base)
    assert state(tree) == before
    for part in parts:
        assert part in str(caught.value)
    return caught.value.problems


# ---------------------------------------------------------------------------------------------------- what is written


def test_the_lines_of_the_guide_in_its_order(tree):
    said = put_in(tree)
    others = [patch.name for patch in patches() if patch.name not in (*install.LSTM_PATCHES, *install.BUILD_FILES)]
    done = "Install patch '{}' successfully."
    assert said == [
        f"Begin to copy source files, header files and quant_lib to '{tree}'",
        f"Finish copy source files, header files and quant_lib to '{tree}'",
        "Begin to install patch.",
        done.format("lstm_calibration_layer.cpp.patch"),
        done.format("lstm_calibration_layer.hpp.patch"),
        done.format("lstm_quant_layer.cpp.patch"),
        done.format("lstm_quant_layer.hpp.patch"),
        *map(done.format, others),
        "Finish install patch.",
        'Merge and replace "caffe.proto" success.',
        'Merge and replace "Makefile" success.',
        'Merge and replace "CMakeLists.txt" success.',
    ]


def test_sources_headers_and_the_library_are_there(tree):
    put_in(tree)
    package = Path(install.HERE)
    for folder, ending in (("include", "*.hpp"), ("src", "*.cpp"), ("quant_lib", "*.cpp"), ("quant_lib", "*.hpp")):
        sources = list((package / folder).rglob(ending))
        assert sources
        for path in sources:
            assert (tree / path.relative_to(package)).read_bytes() == path.read_bytes()
    header = package / "quant_lib" / "quant.hpp"
    assert (tree / "include/caffe/util/quant.hpp").read_bytes() == header.read_bytes()
    assert (tree / "quant_lib/libquant.so").read_bytes().startswith(b"\x7fELF")


def test_twice_writes_nothing_more(tree):
    put_in(tree)
    before = state(tree)
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    assert put_in(tree)[-1] == "Everything was installed already: nothing was changed."
    assert state(tree) == before
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == times


def test_uninstall_takes_everything_back_byte_for_byte(tree):
    before = state(tree)
    put_in(tree)
    assert state(tree) != before
    install.uninstall(str(tree), print)
    assert state(tree) == before
    with pytest.raises(install.PatchError, match="the patch is not installed there"):
        install.uninstall(str(tree), print)


def test_a_later_patch_replaces_an_earlier_one(tree, tmp_path, monkeypatch):
    before = state(tree)
    later = tmp_path / "later"
    shutil.copytree(install.HERE, later)
    (later / "src/caffe/util").mkdir(parents=True, exist_ok=True)
    (later / "src/caffe/util/amct_new.cpp").write_text("// new\n")
    with monkeypatch.context() as patched:
        patched.setattr(install, "HERE", str(later))
        put_in(tree)
    assert (tree / "src/caffe/util/amct_new.cpp").exists()
    put_in(tree)
    assert not (tree / "src/caffe/util/amct_new.cpp").exists()
    install.uninstall(str(tree), print)
    assert state(tree) == before


def test_what_the_user_changed_later_is_kept(tree):
    before = state(tree)
    put_in(tree)
    proto = tree / "src/caffe/proto/caffe.proto"
    mine = "message LayerParameter {", "message LayerParameter {\n  optional RoiParameter roi_param = 3000;"
    proto.write_text(proto.read_text().replace(*mine) + "message RoiParameter { optional uint32 size = 1; }\n")
    makefile = tree / "Makefile"
    makefile.write_text(makefile.read_text().replace("flags:", "mine:"))
    changed = makefile.read_text()
    put_in(tree)
    merged = merge.read_file(str(proto))
    assert [field.number for field in merged.layer_fields if field.name == "roi_param"] == [3000]
    assert merged.message("RoiParameter") is not None
    assert makefile.read_text() == changed
    makefile.write_text(changed + "# more\n")
    said = []
    install.uninstall(str(tree), said.append)
    assert "'Makefile' was changed since: kept as 'Makefile.changed'" in said
    (tree / "Makefile.changed").unlink()
    assert state(tree) == before


def flags(tree, *given):
    made = subprocess.run(["make", "-s", "flags", *given], cwd=tree, capture_output=True, text=True, check=True)
    return made.stdout


def test_the_makefile_asks_for_cpp_11_unless_another_standard_is_asked_for(tree):
    put_in(tree)
    compiling, _, linking = flags(tree).partition(" : ")
    assert "-std=c++11" in compiling
    assert "-L./quant_lib" in linking
    assert "-lm -lquant" in linking
    assert f"-Wl,-rpath,{tree}/quant_lib" in linking
    assert "-std=c++11" not in flags(tree, "CXX=g++ -std=c++17")
    assert (tree / "Makefile").read_text().count("-std=c++11") == 1


def test_a_tree_with_one_way_to_build_is_enough(tree):
    (tree / "Makefile").unlink()
    assert 'Merge and replace "Makefile" success.' not in put_in(tree)
    text = (tree / "CMakeLists.txt").read_text()
    assert "libquant.so" in text
    assert text.startswith(CMAKE)


# ------------------------------------------------------------------------------------------------------- caffe.proto


def test_the_merged_proto_has_all_sides(tree, tmp_path):
    custom = tmp_path / "custom.proto"
    custom.write_text(
        "message LayerParameter { optional MineParameter mine_param = 3000; }\n"
        "message MineParameter { optional float slope = 1 [default = 0.25]; }\n"
    )
    proto = tree / "src/caffe/proto/caffe.proto"
    proto.write_text(PROTO.replace("type = 2;", "type = 2;\n  optional TheirParameter their_param = 4000;"))
    with proto.open("a") as file:
        file.write("message TheirParameter { enum Mode { A = 0; } optional Mode mode = 1 [default = A]; }\n")
    said = put_in(tree, custom)
    assert "caffe.proto keeps of this tree: LayerParameter.their_param, TheirParameter" in said
    merged = merge.read_file(str(proto))
    numbers = {field.name: field.number for field in merged.layer_fields}
    wanted = {"mine_param": 3000, "their_param": 4000, "ifmr_param": 200002, "norm_param": 206, "name": 1}
    assert wanted.items() <= numbers.items()
    blob = {field.name: (field.kind, field.number) for field in merged.message("BlobProto").fields}
    assert blob["int8_data"] == ("bytes", 10)
    assert blob["int32_data"] == ("int32", 11)
    names = {field.name for field in merged.message("BatchNormParameter").fields}
    assert {"use_global_stats", "update_iterations", "dump_dir"} <= names
    assert (tree / ".amct_patch/src/caffe/proto/caffe.proto").read_text().startswith(PROTO[:100])


@pytest.mark.parametrize("number", SCENARIOS)
def test_conflicts_of_the_guide(tree, number):
    refused(tree, SCENARIOS[number], custom=FORKS / f"scenario{number}.proto")


def test_the_fourth_conflict_of_the_guide_is_a_note(tree):
    said = put_in(tree, FORKS / "scenario4.proto")
    note = "message NormalizeParameter of the custom proto replaces the one in caffe.proto"
    assert said.index(note) < said.index('Merge and replace "caffe.proto" success.')


def test_a_required_field_is_refused(tree, tmp_path):
    custom = tmp_path / "custom.proto"
    custom.write_text("message LayerParameter { required MineParameter mine = 3000; }\nmessage MineParameter { }\n")
    refused(tree, "mine = 3000 is required", custom=custom)
    refused(tree, "No such file", custom=tmp_path / "missing.proto")
    custom.write_text("message LayerParameter { optional")
    refused(tree, f"{custom}:1:", custom=custom)


@pytest.mark.parametrize(
    ("field", "clash"),
    [
        ("optional OtherParameter other_param = 206;", "other_param = 206 of this tree clashes with the merged"),
        ("optional NormalizeParameter norm_param = 4000;", "norm_param = 4000 of this tree clashes with the merged"),
        ("optional QuantParameter quant_param = 150;", "quant_param = 150 of this tree clashes with the merged"),
    ],
)
def test_a_proto_of_a_fork_whose_numbers_mean_something_else(tree, field, clash):
    proto = tree / "src/caffe/proto/caffe.proto"
    proto.write_text(PROTO.replace("type = 2;", f"type = 2;\n  {field}"))
    refused(tree, clash, "of a fork that cannot be patched")


def test_a_fork_keeps_its_defaults(tree):
    proto = tree / "src/caffe/proto/caffe.proto"
    proto.write_text(PROTO + "message NormalizeParameter { optional float eps = 4 [default = 0.5]; }\n")
    assert "caffe.proto keeps of this tree: the default of NormalizeParameter.eps" in put_in(tree)
    assert "eps = 4 [default = 0.5]" in proto.read_text()


# --------------------------------------------------------------------------------------------- a tree that does not fit


def test_not_a_caffe_tree(tmp_path):
    (tmp_path / "src").mkdir()
    refused(tmp_path, "not the source tree of a Caffe", "include/caffe/layer.hpp", "src/caffe/proto/caffe.proto")
    with pytest.raises(install.PatchError, match="not the source tree"):
        put_in(tmp_path / "missing")


def test_another_version_names_every_anchor_that_is_missing(tree):
    (tree / "Makefile").write_text(MAKEFILE.replace("# Complete build flags.", "# Flags."))
    (tree / "CMakeLists.txt").write_text(CMAKE + CMAKE)
    problems = refused(tree, "this tree is another version")
    assert 'Makefile: expected once, found 0 times: "# Complete build flags."' in problems
    assert 'CMakeLists.txt: expected once, found 2 times: "include(cmake/Dependencies.cmake)"' in problems


def test_the_layers_that_are_patched_have_to_be_there(tree):
    sources = sorted({patch.source for patch in patches() if patch.name not in install.BUILD_FILES})
    for source in sources:
        (tree / source).unlink()
    problems = refused(tree, "this tree is another version")
    for source in sources:
        assert f"{tree / source}: there is no such file" in problems


def test_a_caffe_for_a_gpu_is_refused(tree):
    (tree / "Makefile.config").write_text("# CPU_ONLY := 1\nUSE_CUDNN := 1\n")
    refused(tree, "Makefile.config: this Caffe is built for a GPU; there is no libquant_gpu.so", "CPU_ONLY := 1")
    (tree / "Makefile.config").write_text("CPU_ONLY := 1\n")
    (tree / "build").mkdir()
    (tree / "build/CMakeCache.txt").write_text("CPU_ONLY:BOOL=OFF\n")
    refused(tree, "build/CMakeCache.txt", "-DCPU_ONLY=ON")
    (tree / "build/CMakeCache.txt").write_text("CPU_ONLY:BOOL=ON\n")
    put_in(tree)


def test_files_of_the_user_are_not_replaced(tree):
    (tree / "quant_lib").mkdir()
    (tree / "quant_lib/ifmr.cpp").write_text("// mine\n")
    refused(tree, "quant_lib/ifmr.cpp: a file of this name is there, and not from this patch")


def test_links_are_not_written_through(tree, tmp_path):
    (tree / "Makefile").replace(tmp_path / "Makefile")
    (tree / "Makefile").symlink_to(tmp_path / "Makefile")
    refused(tree, "Makefile: is a link")
    assert (tmp_path / "Makefile").read_text() == MAKEFILE


def test_a_compiler_that_is_missing_or_fails(tree, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(tree, "no-such-compiler", "Install a C++ compiler (Debian: g++), or name yours: CXX=...")
    monkeypatch.setenv("CXX", "g++ -fno-such-option")
    refused(tree, "libquant.so could not be built; g++ said:", "-fno-such-option")
    monkeypatch.setenv("CXX", "g++ -O0")
    put_in(tree)


# ------------------------------------------------------------------------------------------------------ all or nothing


class FailingWrites:
    """``_replace`` that raises at the call of a number, once."""

    def __init__(self, number, error, monkeypatch):
        self.left, self.error, self.real = number, error, source_tree._replace
        monkeypatch.setattr(source_tree, "_replace", self)

    def __call__(self, path, *rest):
        self.left -= 1
        if self.left == -1:
            raise self.error
        self.real(path, *rest)


@pytest.mark.parametrize("kind", [OSError(30, "Read-only file system"), KeyboardInterrupt()])
def test_a_failure_at_any_file_leaves_the_tree_as_it_was(tree, kind, monkeypatch):
    before, outcomes = state(tree), []
    for number in range(1000):
        with monkeypatch.context() as patched:
            failing = FailingWrites(number, kind, patched)
            try:
                put_in(tree)
            except (install.PatchError, KeyboardInterrupt) as error:
                outcomes.append(str(error))
                assert state(tree) == before
            else:
                assert failing.left >= 0
                break
    wanted = "" if isinstance(kind, KeyboardInterrupt) else "[Errno 30] Read-only file system; nothing was changed"
    assert set(outcomes) == {wanted}
    assert number > len(list(Path(install.HERE, "quant_lib").iterdir()))


def test_a_read_only_tree(exported, monkeypatch):
    with tempfile.TemporaryDirectory() as name:  # below a folder that everyone may enter
        tree = write_bones(Path(name) / "caffe")
        shutil.copytree(exported, Path(name) / "patch")
        monkeypatch.setattr(install, "HERE", str(Path(name) / "patch"))
        folders = [Path(name), *(path for path in Path(name).rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        base, user = Path(name) / "patch/merge_proto/caffe.proto", os.geteuid()
        os.seteuid(65534 if user == 0 else user)  # root may write everywhere
        try:
            refused(tree, "Permission denied", "nothing was changed", base=base)
        finally:
            os.seteuid(user)
            for folder in folders:
                folder.chmod(0o755)


def test_a_killed_install_is_taken_back_by_the_next(tree, monkeypatch):
    before = state(tree)
    with monkeypatch.context() as patched:
        FailingWrites(8, KeyboardInterrupt(), patched)
        patched.setattr(source_tree.Tree, "_roll_back", lambda *_: None)  # as if there had been no time
        with pytest.raises(KeyboardInterrupt):
            put_in(tree)
    assert state(tree) != before
    assert put_in(tree)[0] == "An install was interrupted here; it is taken back first."
    install.uninstall(str(tree), print)
    assert state(tree) == before


def test_a_damaged_list_of_files_is_told(tree):
    put_in(tree)
    (tree / ".amct_patch/installed.json").write_text("{")
    refused(tree, "installed.json: cannot be read")


# ------------------------------------------------------------------------------- the folder, the command, old Pythons


def run(folder, *words, cwd):
    """install.py as on a machine with nothing but Python: no site-packages, no PYTHONPATH."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(each) for each in (os.path.realpath(sys.executable), "-S", folder / "install.py", *words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_exported_folder_is_the_guides(exported):
    names = {path.name for path in exported.iterdir()}
    assert names == {"include", "src", "quant_lib", "merge_proto", "patch", "install.py", "source_tree.py"}
    assert {path.name for path in (exported / "merge_proto").iterdir()} == {
        "amct_custom.proto", "caffe.proto", "merge.py", "merge_proto.sh"
    }  # fmt: skip
    assert set(install.LSTM_PATCHES) <= {path.name for path in (exported / "patch").iterdir()}
    assert {path.suffix for path in (exported / "quant_lib").iterdir()} == {".cpp", ".hpp"}


def test_export_writes_to_new_folders_only(exported, capsys):
    before = state(exported)
    assert main(["caffe", "patch", "export", str(exported)]) != 0
    assert "must be a new or an empty folder" in capsys.readouterr().err
    assert state(exported) == before


def test_folder_and_command_write_the_same(tree, exported, tmp_path, capsys):
    other = shutil.copytree(tree, tmp_path / "other")
    done = run(exported, "--caffe_dir", "caffe", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert main(["caffe", "patch", "install", "--caffe_dir", str(other)]) == 0
    said = capsys.readouterr().out.splitlines()
    shown = [line.replace(str(tree), str(other)) for line in done.stdout.splitlines()]
    assert shown == [f"[INFO]{line}" for line in said]
    assert state(tree) == state(other)
    assert main(["caffe", "patch", "install", "--caffe_dir", str(other), "--uninstall"]) == 0
    assert run(exported, "--caffe_dir", "caffe", "--uninstall", cwd=tmp_path).returncode == 0
    assert state(tree) == state(other) == state(write_bones(tmp_path / "new"))


def test_mistakes_are_one_line_each(exported, tmp_path, capsys):
    done = run(exported, "--caffe_dir", "nothing", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"[ERROR]{tmp_path}/nothing: not the source tree of a Caffe: it has no include")
    assert main(["caffe", "patch", "install", "--caffe_dir", str(tmp_path / "nothing")]) != 0
    assert "not the source tree of a Caffe" in capsys.readouterr().err


def test_help_as_the_guide_writes_it(exported, tmp_path):
    done = run(exported, "--h", cwd=tmp_path)
    assert done.returncode == 0
    for option in ("--caffe_dir", "--custom_proto", "--uninstall"):
        assert option in done.stdout


def test_python_3_6_reads_it_and_needs_nothing_else():
    folder = Path(install.HERE)
    for path in [folder / "install.py", folder / "source_tree.py", folder / "merge_proto" / "merge.py"]:
        parsed = ast.parse(path.read_text(), feature_version=(3, 6))
        newer = {"capture_output", "text", "dirs_exist_ok", "missing_ok"}  # arguments that 3.6 does not know
        for node in ast.walk(parsed):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                own = {"caffe_patch", "merge_proto", "source_tree"}
                assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | own
            if isinstance(node, ast.Call):
                assert not newer & {each.arg for each in node.keywords}
