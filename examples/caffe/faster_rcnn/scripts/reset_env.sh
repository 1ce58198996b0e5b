# Takes the folders of the sample out of PYTHONPATH, for the next one. It changes your shell, so source it:
#   source scripts/reset_env.sh
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
kept=""
IFS=: read -ra folders <<< "${PYTHONPATH:-}"
for folder in "${folders[@]}"; do
  case "$folder/" in
    "$root"/*) ;;
    *) kept="${kept:+$kept:}$folder" ;;
  esac
done
if [[ -n "$kept" ]]; then export PYTHONPATH="$kept"; else unset PYTHONPATH; fi
unset root kept folders folder
