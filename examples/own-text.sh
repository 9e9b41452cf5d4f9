#!/usr/bin/env bash
# Text to a model that writes: examples/own-text.sh TEXT.txt [section.key=value ...]
set -euo pipefail
text=$1
shift
here=$(dirname "$0")
steelyard tokenizer train --input "$text" --model-prefix own-text/tokenizer --vocab-size 4096 \
    --type byte-bpe
steelyard data tokenize --input "$text" --tokenizer own-text/tokenizer --output-prefix own-text/tokens --append-eod
steelyard train "$here/own-text.toml" "$@"
steelyard generate runs/own-text --prompt "The "
