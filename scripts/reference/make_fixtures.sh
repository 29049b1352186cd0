#!/usr/bin/env bash
# Remakes the reference cases in tests/fixtures: tiny random checkpoints and what transformers
# computes from them. Needs the environment of requirements.txt (Python 3.11), given as its python.
#
# usage: scripts/reference/make_fixtures.sh PYTHON
set -euo pipefail
here=$(dirname "$0") out=$(dirname "$0")/../../tests/fixtures
make_case() { "$1" "$here/make_case.py" "$out/$2" --presets "$here/presets.json" --preset "$2" "${@:3}"; }
rm -rf "$out/small" "$out/packed" "$out/wide"
make_case "$1" small --seed 11 --lengths 1,2,5,17,37
make_case "$1" packed --seed 12 --lengths 3,17,37 --quant-from 4
make_case "$1" wide --seed 13 --lengths 17,37 --quant-from 1 --bfloat16  # shapes that the kernels take

# Drafters for `small`; they need the DeepSpec package of the DSpark authors on PYTHONPATH.
for head in vanilla gated rnn; do
  "$1" "$here/make_dspark_case.py" "$out/dspark/$head" --presets "$here/presets.json" \
    --preset small --seed 11 --head "$head" --rank 16 --drafter-only
  mv "$out/dspark/$head/drafter/"* "$out/dspark/$head" && rmdir "$out/dspark/$head/drafter"
done
