#!/bin/bash
# Makes the Python files of src/py-faster-rcnn/lib run in Python 3; nothing to do without that folder.
set -e
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
library="$root/src/py-faster-rcnn/lib"
if [[ -d "$library" ]]; then
  "${PYTHON:-python3}" "$root/scripts/file_operator.py" "$library"
else
  echo "[AMCT][INFO]The Python layers of src/rpn are used; there is no src/py-faster-rcnn."
fi
