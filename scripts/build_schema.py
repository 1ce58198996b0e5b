"""Compile every ``*.proto`` of ``amct.schema`` into the one descriptor set that the package loads at run time.

Run it (``make schema``) after a ``.proto`` was added or changed, and commit both. A new file needs a line in the table
``FAMILIES`` of ``src/amct/schema/pool.py``. protoc comes from grpcio-tools; users need neither.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

from amct.schema.pool import DESCRIPTOR_SET, FAMILIES

FOLDER = Path(__file__).resolve().parent.parent / "src" / "amct" / "schema"


def build(folder: Path = FOLDER) -> FileDescriptorSet:
    """Compile all ``*.proto`` files of ``folder``; stop when one has no family or imports another family's file."""
    names = sorted(path.name for path in folder.glob("*.proto"))
    without_family = [name for name in names if name not in FAMILIES]
    if without_family:
        sys.exit(f"add {', '.join(without_family)} to the table FAMILIES of amct/schema/pool.py")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / DESCRIPTOR_SET
        includes = resources.files("grpc_tools") / "_proto"
        arguments = ["protoc", f"-I{folder}", f"-I{includes}", f"--descriptor_set_out={target}", *names]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed; its message is above")
        compiled = FileDescriptorSet.FromString(target.read_bytes())
    for file in compiled.file:
        foreign = [name for name in file.dependency if FAMILIES[name] != FAMILIES[file.name]]
        if foreign:
            sys.exit(f"{file.name} ({FAMILIES[file.name]}) imports {foreign[0]} of family {FAMILIES[foreign[0]]}")
    return compiled


def main() -> None:
    """Write the descriptor set beside the ``.proto`` files."""
    compiled = build()
    target = FOLDER / DESCRIPTOR_SET
    target.write_bytes(compiled.SerializeToString(deterministic=True))
    sys.stdout.write(f"{target.relative_to(FOLDER.parents[2])}: {len(compiled.file)} files\n")


if __name__ == "__main__":
    main()
