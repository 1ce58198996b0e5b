#!/bin/bash
# Quantizes ResNet-50 by ResNet50_sample.py with the files of pre_model. Run it in the folder resnet50:
#   bash scripts/run_resnet50_with_arq.sh -c your_caffe_dir [-g gpu_id]
# -c is accepted and not needed: no Caffe has to be installed. Without -g it runs on the CPU.
set -e
caffe_dir=""
device=(--cpu)
while getopts "c:g:" option; do
  case "$option" in
    c) caffe_dir="$OPTARG" ;;
    g) device=(--gpu "$OPTARG") ;;
    *) echo "usage: bash scripts/run_resnet50_with_arq.sh -c caffe_dir [-g gpu_id]" >&2; exit 2 ;;
  esac
done
exec "${PYTHON:-python3}" src/ResNet50_sample.py \
  --model_file pre_model/ResNet-50-deploy.prototxt \
  --weights_file pre_model/ResNet-50-model.caffemodel \
  --caffe_dir "$caffe_dir" "${device[@]}"
