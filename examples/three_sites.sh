#!/usr/bin/env bash
# A server and three sites on this machine, over TLS: a run of FPL from start to model files.
# Usage: examples/three_sites.sh [FOLDER]   (a new folder; default: three-sites; needs the extra flower)
set -euo pipefail
dir=${1:-three-sites}
rounds=${ROUNDS:-3}
port=${PORT:-8000}

protofed deploy init "$dir" --task glyphs --sites scan-0,print-0,photo-0 --address "127.0.0.1:$port"

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
protofed deploy server --dir "$dir/server" >"$dir/server.log" 2>&1 &
for site in scan-0 print-0 photo-0; do
  protofed deploy site --dir "$dir/sites/$site" --site "$site" >"$dir/$site.log" 2>&1 &
done

# sites connect when they are ready; the first round waits for all of them
for _ in $(seq 120); do
  protofed deploy status --dir "$dir/server" >/dev/null 2>&1 && break
  sleep 1
done
protofed deploy start --dir "$dir/server" --method fpl --rounds "$rounds" --epochs 1 --wait

protofed deploy audit --dir "$dir/sites/photo-0"
ls "$dir"/server/runs/*/model.safetensors "$dir"/sites/*/models/*.safetensors
