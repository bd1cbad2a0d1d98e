#!/usr/bin/env bash
# One command for a machine with a CUDA device: the tests under tests/gpu, then the rollout bench. Needs no install:
# PYTHON (default python3) must have torch, transformers, pydantic, rich, tensorboard and pytest.
#   bench/gpu.sh [OUTPUT_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-bench/results}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=src HF_HUB_OFFLINE=1
mkdir -p "$OUT"
"$PYTHON" -m pytest -m gpu tests/gpu
if "$PYTHON" -c "import vllm" 2> /dev/null; then  # the same by vLLM: plain, n-gram, learned, look-ahead, ours beside it
    # four vLLMs on one device: by default each wants nearly all of it to be free
    timeout 600 "$PYTHON" -m tlt bench rollout bench/prompts.toml --engine.backend vllm --batches 1,4,16,64,128 \
        --look-ahead 1 --repeats 2 --model.device cuda --engine.vllm.gpu_memory_utilization 0.2 --json "$OUT/gpu_vllm.json"
fi
if [ -e .models/smollm2 ]; then  # make real
    timeout 300 "$PYTHON" bench/strategies.py recipes/smollm2.toml --batches 1 8 32 128 --model.dtype bfloat16 \
        --model.device cuda --json "$OUT/gpu_strategies.json"
fi
for dtype in float32 bfloat16; do
    timeout 240 "$PYTHON" -m tlt bench rollout bench/prompts.toml --batches 1,32 --repeats 2 \
        --model.dtype "$dtype" --model.device cuda --json "$OUT/gpu_rollout_$dtype.json"
done
