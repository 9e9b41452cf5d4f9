"""Generation at batch 1, compared with transformers.generate on the same weights, in one run.

    python benchmarks/generate.py SmolLM2-135M-Instruct.Q4_1.gguf

Greedy decoding of a fixed number of tokens, both with a KV cache; the tokens must be the same. The two alternate, so
that other load on the machine affects both, and the best turn counts. Rates per CPU second of this process are also
given, since other load affects them less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from peers import both

from steelyard.evaluate.generation import Sampling, tokens


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF or a Hugging Face folder")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ours, theirs = both(options.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    prompt = torch.randint(100, ours.config.vocab - 100, (1, options.prompt), device=device)
    sampling = Sampling(max_tokens=options.tokens, temperature=0)

    def write_ours() -> list[int]:
        return list(tokens(ours, prompt[0].tolist(), sampling, options.prompt + options.tokens, ()))

    def write_theirs() -> list[int]:
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=options.tokens,
            min_new_tokens=options.tokens, pad_token_id=0,
        )  # fmt: skip
        return list(found[0, options.prompt :].tolist())

    turns = [(timed(write_ours), timed(write_theirs)) for _ in range(options.turns)]
    sides = dict(zip(("steelyard", "transformers"), zip(*turns, strict=True), strict=True))
    for side, runs in sides.items():
        wall, own = (min(seconds[kind] for seconds, _ in runs) for kind in (0, 1))
        print(json.dumps({"what": side, "tokens_per_second": round(options.tokens / wall, 2),
                          "tokens_per_own_second": round(options.tokens / own, 2)}))  # fmt: skip
    [first], [second] = ({tuple(written) for _, written in runs} for runs in sides.values())
    print(json.dumps({"same_tokens": first == second, "threads": torch.get_num_threads(), "device": device.type}))


def timed(write: Callable[[], list[int]]) -> tuple[tuple[float, float], list[int]]:
    """Wall seconds and CPU seconds of this process, and the tokens."""
    clock, own = time.perf_counter(), time.process_time()
    written = write()
    return (time.perf_counter() - clock, time.process_time() - own), written


if __name__ == "__main__":
    main()
