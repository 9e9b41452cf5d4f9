#!/usr/bin/env bash
# Four one-shot methods side by side: examples/prune.sh CKPT CALIBRATION.txt MEASURED.txt
set -euo pipefail
checkpoint=$1 calibration=$2 measured=$3
length=${LENGTH:-1024} samples=${SAMPLES:-128}
steelyard eval ppl "$checkpoint" --data "$measured" --sequence-length "$length"
for method in magnitude wanda hessian sparsegpt; do
    steelyard prune "$checkpoint" "pruned/$method" --method "$method" --pattern 2:4 \
        --calibration "$calibration" --samples "$samples" --sequence-length "$length"
    steelyard eval ppl "pruned/$method" --data "$measured" --sequence-length "$length"
done
