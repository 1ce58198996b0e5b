#!/bin/bash
# Puts what you downloaded into the folders where the sample looks for it. It downloads nothing itself.
#   bash scripts/download_and_assemble.sh [with_benchmark]
# Looked for in the folder "downloads" beside src (or where DOWNLOADS says), and in src itself:
#   faster_rcnn_test.pt, VGG16_faster_rcnn_final.caffemodel   of py-faster-rcnn (rbgirshick), the net VGG16, end to end
#   any pictures (.jpg, .png), or VOCdevkit (VOC2007's test set, needed with with_benchmark)
#   py-faster-rcnn                                            optional: its own Python layers are used if it is there
set -e
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
downloads="${DOWNLOADS:-$root/downloads}"
mkdir -p "$root/src/pre_model" "$root/src/datasets"
place() {  # file or folder of the downloads, folder of src: copied unless it is there
  [[ ! -e "$downloads/$1" || -e "$2/$1" ]] || cp -r "$downloads/$1" "$2/"
}
place faster_rcnn_test.pt "$root/src/pre_model"
place VGG16_faster_rcnn_final.caffemodel "$root/src/pre_model"
place VOCdevkit "$root/src/datasets"
place py-faster-rcnn "$root/src"
shopt -s nullglob nocaseglob
for picture in "$downloads"/*.{jpg,jpeg,png,bmp}; do place "$(basename "$picture")" "$root/src/datasets"; done
missing=()
for file in faster_rcnn_test.pt VGG16_faster_rcnn_final.caffemodel; do
  [[ -f "$root/src/pre_model/$file" ]] || missing+=("pre_model/$file")
done
pictures=("$root"/src/datasets/*.{jpg,jpeg,png,bmp})
if [[ "$1" == with_benchmark ]]; then
  [[ -d "$root/src/datasets/VOCdevkit/VOC2007" ]] || missing+=("datasets/VOCdevkit/VOC2007")
elif [[ ${#pictures[@]} -eq 0 && ! -d "$root/src/datasets/VOCdevkit/VOC2007" ]]; then
  missing+=("datasets: pictures, or VOCdevkit/VOC2007")
fi
if [[ ${#missing[@]} -gt 0 ]]; then
  printf 'missing in %s: %s\n' "$root/src" "${missing[@]}" >&2
  echo "Put them there, or into $downloads, and start again." >&2
  exit 1
fi
echo "[AMCT][INFO]Models and pictures are in place."
