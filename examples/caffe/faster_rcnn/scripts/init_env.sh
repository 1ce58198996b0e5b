#!/bin/bash
# Prepares the folder src for the sample, offline. Run it in the folder faster_rcnn:
#   bash scripts/init_env.sh CPU|GPU caffe_dir [python [include_dir]] [with_benchmark]
# The arguments are the guide's: nothing is built, so caffe_dir and include_dir are accepted and not needed.
# with_benchmark asks for VOC2007, whose labels give the mAP. What is missing is named; nothing is downloaded.
set -e
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage="usage: bash scripts/init_env.sh CPU|GPU caffe_dir [python [include_dir]] [with_benchmark]"
[[ "$1" == CPU || "$1" == GPU ]] || { echo "$usage" >&2; exit 2; }
device="$1"
benchmark=""
python="${PYTHON:-python3}"
paths=()
for argument in "${@:3}"; do
  if [[ "$argument" == with_benchmark ]]; then benchmark=with_benchmark; else paths+=("$argument"); fi
done
python="${paths[0]:-$python}"
command -v "$python" > /dev/null || { echo "$python: there is no such Python. $usage" >&2; exit 2; }
"$python" -c "import amct_caffe" || { echo "$python has no amct_caffe: install this toolkit for it" >&2; exit 1; }
if [[ "$device" == GPU ]]; then
  "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" ||
    { echo "GPU: torch sees no CUDA device here; use CPU" >&2; exit 1; }
fi
PYTHON="$python" bash "$here/download_and_assemble.sh" $benchmark
PYTHON="$python" bash "$here/modified_files.sh"
echo "[AMCT][INFO]The environment is ready: cd src; $python faster_rcnn_sample.py … --${device,,}"
