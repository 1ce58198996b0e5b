#!/bin/sh
# Merges caffe.proto with AMCT's messages and, if given, your custom.proto:
#   sh merge_proto.sh [--custom_proto custom.proto] [--caffe_proto caffe.proto] merged.proto
exec "${PYTHON:-python3}" "$(dirname "$0")/merge.py" "$@"
