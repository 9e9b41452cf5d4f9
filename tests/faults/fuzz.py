"""Fuzzed input: recipes, overrides, cluster files, launch scripts, corpora, conversations, templates, configurations.

Every input may be accepted or refused; it must not end in a traceback, a crash or an endless loop. Inputs run in
batches of one process each, which says which input it is at, so that a crash or a hang is known by its input.
"""

# ruff: noqa: SIM905, RUF005
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from steelyard.checkpoint.formats.write import Target, convert
from tests import preloaded
from tests.checkpoint.models import SHAPES, Held, written
from tests.conftest import TINY
from tests.faults.outcome import INTERNAL, Tally
from tests.faults.targets import CLUSTER, _corpus, _workplace

BATCH = 20
LIMIT_SECONDS = 900  # Of a batch: dozens of times what it needs.
RUN_BATCH = """
import contextlib, io, json, os, sys
from pathlib import Path
from steelyard.cli import main
from steelyard.core import console
for number, (files, words) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    for name, text in files.items():
        Path(name).write_bytes(bytes.fromhex(text))
    err = io.StringIO()
    print(number, flush=True)
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, err.getvalue()[-2000:]]), flush=True)
"""
NUMBERS = [
    "9" * 19,
    "9" * 400,
    "9" * 5000,
    *"0 -1 1 2 3 7 64 1000000 0x7fffffffffffffff 1e308 1e999 -0.0 0.5".split(),
    *"nan inf -inf true false 2147483648 1_000".split(),
]
STRINGS = [
    '"' + "a" * 5000 + '"',
    '"\\u0000"',
    "'a'",
    "'../../etc'",
    "''",
    "'{x}'",
    "'\U0001f600'",
    "'cpu'",
    "'bf16'",
    '"$(true)"',
    "'a:b'",
    "'1-2-3'",
    "'''\n'''",
]
OTHERS = [
    "[]",
    "{}",
    "[[]]",
    "[1, 'a']",
    "{ a = 1 }",
    "1979-05-27",
    "[" * 3000 + "]" * 3000,
    "{a=" * 2000 + "1" + "}" * 2000,
]
KEYS = (
    """
    model.layers model.hidden model.heads model.vocab model.family data.train data.sequence_length data.split
    train.steps train.global_batch train.micro_batch train.device train.precision train.tokens optim.learning_rate
    optim.warmup_steps optim.name eval.every checkpoint.every parallel.tensor parallel.pipeline parallel.partition
    parallel.schedule parallel.virtual parallel.placement parallel.zero log.every seed extends name sparsity.pattern
    init_from a.b.c
""".split()
    + [".".join("k" * 3000)]
)
SCRIPT = """#!/bin/bash
X=2
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 \\
    --max-position-embeddings 16 --micro-batch-size $X --global-batch-size 8 --lr 1e-3 --train-iters 10 --bf16 \\
    --tensor-model-parallel-size 1 --split 99,1,0 --data-path tokens_text_document --vocab-size 512
"""
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TALKS = (json.dumps({"messages": TURNS}) + "\n") * 3
JINJA = [
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{% if true %}x{% endif %}",
    "{{ 'a' * 10**9 }}",
    "{{ messages }}",
    "text\n",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ [1] * 10**9 }}",
    "{{ raise_exception('no') }}",
    "{{ x.y.z }}",
    "{% set a = 'b' %}",
    "{{ 2 ** 10**8 }}",
    "{{",
    "%}",
    "{{ bos_token }}",
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}x{% endfor %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ '%1000000000d' % 1 }}",
    "{% include 'x' %}",
    "{{ 'a'.center(10**9) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{{ range(10**8) | list | length }}",
    "{{ (range(10**7) | join) * 1000 }}",
    "{{ '%s' | format(messages) }}",
    "{{ lipsum(n=100000) }}",
    "{{ messages | tojson(indent=10**8) }}",
]
FULL = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

CONFIG = """{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 4,
"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 100, "rms_norm_eps": 1e-5,
"max_position_embeddings": 64, "rope_theta": 1e4, "rope_scaling": null, "tie_word_embeddings": false,
"torch_dtype": "float32", "hidden_act": "silu", "use_sliding_window": false}"""

TOKENIZE = "data tokenize --input fuzz.jsonl --tokenizer tokenizer --output-prefix out --overwrite --workers 1".split()
PLAN = "plan --model tiny.toml --cluster fuzz.toml --given --set train.global_batch=16".split()
PREVIEW = "sft preview --model model --data".split()

Input = tuple[dict[str, str], list[str]]


def _value(rng: random.Random, like: str = "") -> str:
    """A value, mostly of the kind of the one that it replaces."""
    if rng.random() < 0.7 and like:
        return rng.choice(STRINGS if like[0] in "'\"" else OTHERS if like[0] in "[{" else NUMBERS)
    return rng.choice(rng.choice([NUMBERS, STRINGS, OTHERS]))


def _garbled(text: str, rng: random.Random) -> bytes:
    """A text with a few bytes inserted, removed or replaced."""
    data = bytearray(text.encode())
    for _ in range(rng.randrange(1, 8)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0:
                data[place:place] = rng.choice([rng.randbytes(3), b'"', b"[", b"{", b"\\", b"\n", b"\0", "é".encode()])
            case 1:
                del data[place : place + rng.randrange(1, 20)]
            case _:
                data[place : place + 1] = rng.randbytes(1)
    return bytes(data)


def _settings(text: str, rng: random.Random) -> str:
    """A TOML file with some values replaced, removed or added."""
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2])):
        place = rng.randrange(len(lines))
        if " = " in lines[place]:
            key, _, value = lines[place].partition(" = ")
            lines[place] = f"{key} = {_value(rng, value)}"
        else:
            lines.insert(place + 1, f"{rng.choice(KEYS).split('.')[-1]} = {_value(rng)}")
    if rng.random() < 0.05:
        lines.append("[" + ".".join("ab"[n % 2] for n in range(rng.choice([50, 5000]))) + "]")
    return "\n".join(lines) + "\n"


def recipe(rng: random.Random) -> Input:
    content = _garbled(TINY, rng) if rng.random() < 0.4 else _settings(TINY, rng).encode()
    words = rng.choice(
        [["recipe", "check", "fuzz.toml"], ["recipe", "show", "fuzz.toml"], ["train", "fuzz.toml", "--dry-run"]]
    )
    return {"fuzz.toml": content.hex()}, words


def override(rng: random.Random) -> Input:
    words = [f"{rng.choice(KEYS)}={_value(rng)}" for _ in range(rng.randrange(1, 4))]
    return {}, rng.choice([["recipe", "show", "tiny.toml"], ["train", "--dry-run", "tiny.toml"]]) + words


def cluster(rng: random.Random) -> Input:
    content = _garbled(CLUSTER, rng) if rng.random() < 0.4 else _settings(CLUSTER, rng).encode()
    return {"fuzz.toml": content.hex()}, PLAN


def launch_script(rng: random.Random) -> Input:
    words = SCRIPT.split(" ")
    values = [*NUMBERS, "$X", "`true`", "$(", '"', "", "--unknown-flag", "--lr", "--fp16 --bf16", "99,1"]
    for _ in range(rng.randrange(1, 4)):
        words[rng.randrange(2, len(words))] = rng.choice(values)
    text = " ".join(words)
    content = _garbled(text, rng) if rng.random() < 0.3 else text.encode()
    return {"fuzz.sh": content.hex()}, ["recipe", "from-megatron", "fuzz.sh"]


def corpus(rng: random.Random) -> Input:
    rows = [
        {"text": "some text"},
        {"text": 1},
        {"text": None},
        {},
        [],
        "x",
        {"text": "\ud800"},
        {"text": "\0" * 50},
        {"text": ""},
    ]
    text = "".join(json.dumps(rng.choice(rows)) + "\n" for _ in range(5))
    deep = "[" * 100_000 + "\n" if rng.random() < 0.1 else ""
    content = _garbled(text + deep, rng) if rng.random() < 0.5 else (text + deep).encode()
    return {"fuzz.jsonl": content.hex()}, TOKENIZE + rng.choice([[], ["--on-bad-line", "skip"]])


def conversation(rng: random.Random) -> Input:
    odd = [{"role": "x"}, {}, 1, {"role": None, "content": []}, {"role": "assistant"}, TURNS[1]]
    rows: list[object] = [{"messages": TURNS}]
    for _ in range(rng.randrange(1, 3)):
        turns = [*TURNS, *TURNS]
        turns[rng.randrange(len(turns))] = rng.choice([*odd, *TURNS])
        rows.append(rng.choice([{"messages": turns}, {"messages": TURNS, "x": 1}, {"messages": None}, []]))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    content = _garbled(text, rng) if rng.random() < 0.5 else text.encode()
    return {"fuzz.jsonl": content.hex()}, [*PREVIEW, "fuzz.jsonl", "finetune.template=chatml"] + rng.choice(
        [[], ["finetune.bad_rows=drop"]]
    )


def template(rng: random.Random) -> Input:
    body = "".join(rng.choice(JINJA) for _ in range(rng.randrange(3)))
    text = rng.choice([body + FULL, FULL.replace("{% gen", body + "{% gen", 1), FULL + body])
    return {"fuzz.jinja": text.encode().hex()}, [*PREVIEW, "talks.jsonl", "finetune.template=fuzz.jinja"]


def model_config(rng: random.Random) -> Input:
    """The configuration of a folder whose weights are sound."""
    values = [0, -1, 3, 10**18, 10**400, 1.5, None, "x", [], {}, True, 1e308, {"rope_type": "llama3"}, {"type": []}]
    config = json.loads(CONFIG)
    for _ in range(rng.randrange(1, 3)):
        config[rng.choice(list(config))] = rng.choice(values)
    text = json.dumps(config)
    content = _garbled(text, rng) if rng.random() < 0.3 else text.encode()
    return {"fuzzed/config.json": content.hex()}, ["checkpoint", "info", "fuzzed"]


def log(rng: random.Random) -> Input:
    return {"fuzz.log": rng.randbytes(rng.randrange(1, 3000)).hex()}, ["doctor", "explain", "fuzz.log"]


def command_line(rng: random.Random) -> Input:
    commands = [
        ["recipe", "show"],
        ["tokenizer", "info"],
        ["tokenizer", "extend", "--add", "9", "--out", "extended", "--text"],
        ["data", "info"],
        ["data", "verify"],
        ["checkpoint", "info"],
        ["checkpoint", "diff"],
        ["checkpoint", "extend", "--tokenizer", "tokenizer"],
        ["mask", "info"],
        ["list"],
        ["logs"],
        ["watch", "--once"],
        ["report"],
        ["tune", "report"],
        ["profile", "show"],
        ["generate", "--prompt", "x"],
        ["plan"],
        ["adapter", "merge"],
        ["data", "merge"],
    ]
    words = [
        "",
        "-",
        "--",
        "\0",
        "x" * 5000,
        "..",
        "/",
        "tiny.toml",
        "tokenizer",
        "--json",
        "--help",
        "--seed",
        "9" * 400,
        "/dev/null",
        ".",
        "tokens_text_document",
        "é",
        "a=b",
        "--output",
        "/proc/self/mem",
        "\ud800",
    ]
    return {}, rng.choice(commands) + [rng.choice(words) for _ in range(rng.randrange(4))]


KINDS: dict[str, Callable[[random.Random], Input]] = {
    "recipe": recipe,
    "override": override,
    "cluster file": cluster,
    "launch script": launch_script,
    "corpus": corpus,
    "conversation": conversation,
    "chat template": template,
    "config.json": model_config,
    "log": log,
    "command line": command_line,
}


def _files(**texts: str) -> dict[str, str]:
    return {name.replace("_", "."): text.encode().hex() for name, text in texts.items()}


SOUND: dict[str, Input] = {
    "recipe": (_files(fuzz_toml=TINY), ["train", "fuzz.toml", "--dry-run"]),
    "override": ({}, ["train", "--dry-run", "tiny.toml", "train.steps=3"]),
    "cluster file": (_files(fuzz_toml=CLUSTER), PLAN),
    "launch script": (_files(fuzz_sh=SCRIPT), ["recipe", "from-megatron", "fuzz.sh"]),
    "corpus": (_files(fuzz_jsonl='{"text": "some text"}\n'), TOKENIZE),
    "conversation": (_files(fuzz_jsonl=TALKS), [*PREVIEW, "fuzz.jsonl", "finetune.template=chatml"]),
    "chat template": (_files(fuzz_jinja=FULL), [*PREVIEW, "talks.jsonl", "finetune.template=fuzz.jinja"]),
    "config.json": ({"fuzzed/config.json": CONFIG.encode().hex()}, ["checkpoint", "info", "fuzzed"]),
    "log": (_files(fuzz_log="torch.OutOfMemoryError: CUDA out of memory."), ["doctor", "explain", "fuzz.log"]),
    "command line": ({}, ["recipe", "show", "tiny.toml"]),
}
"""An undamaged input of every kind. Were one refused, its kind would test nothing."""


def _build(folder: Path) -> None:
    _workplace(folder)
    _corpus(folder)
    written(folder, "qwen2").rename(folder / "fuzzed")
    (folder / "fuzzed" / "SHA256SUMS").unlink(missing_ok=True)
    convert(Held(SHAPES["qwen2"].model_copy(update={"vocab": 512})), folder / "model", Target("hf"))
    for file in (folder / "tokenizer").iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    (folder / "talks.jsonl").write_text(TALKS)
    for name, given in SOUND.items():
        [[code, err]] = _run_batch(folder, [given], Tally())
        assert code == 0, f"{name}: an undamaged input is refused: {err}"


def _run_batch(folder: Path, inputs: list[Input], tally: Tally) -> list[tuple[int | str | None, str]]:
    """Run inputs one after the other in one process; after a crash or a hang, the rest in another.

    Returns the exit code and the messages of those that ended.
    """
    ends = []
    while inputs:
        (folder / "batch.json").write_text(json.dumps(inputs))
        process = preloaded.Popen(
            [sys.executable, "-P", "-c", RUN_BATCH, "batch.json"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        ended = "traceback"
        try:
            out, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            ended = "hang"
        results = [json.loads(line) for line in out.decode().splitlines() if line.startswith("[")]
        for given, (code, err) in zip(inputs, results, strict=False):
            bad = code not in (0, 1, 2) or INTERNAL.search(err) or (code and not err.strip())
            tally.add(
                "traceback" if bad else "detected" if code else "accepted",
                f"{_shown(given)}: {code} {err.strip()[-300:]}",
            )
        if len(results) < len(inputs):
            tally.add(ended, f"{_shown(inputs[len(results)])}: the process ended with {process.returncode}")
        ends += results
        inputs = inputs[len(results) + 1 :]
    return ends


def _shown(given: Input) -> str:
    files, words = given
    return f"{[word[:60] for word in words]} " + " ".join(
        f"{name}={bytes.fromhex(text)[:300]!r}" for name, text in files.items()
    )


def fuzz(count: int, seed: int, skip: Collection[str] = ()) -> Iterator[tuple[str, Tally]]:
    """`count` inputs, spread evenly over the kinds; what became of each kind, as it is known."""
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        folder = Path(made)
        _build(folder)
        for number, (name, make) in enumerate(KINDS.items()):
            if name in skip:
                continue
            share = count // len(KINDS) + (number < count % len(KINDS))
            rng, tally = random.Random(f"{seed} {name}"), Tally()
            inputs = [make(rng) for _ in range(share)]
            for start in range(0, share, BATCH):
                _run_batch(folder, inputs[start : start + BATCH], tally)
            yield name, tally
