"""What is damaged: every file format that Steelyard reads or writes, with the commands that read it.

A target builds a sound folder once. Its commands run on copies in which one file is mutated, and `behaviour` says what
they led to: anything but the behaviour on sound files is a silent change. A format without a checksum of its own cannot
notice every mutation; those are counted apart (`checksum = False`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.core.run import Run
from steelyard.tokens import checksums
from tests.conftest import TINY, write_tokens
from tests.faults.outcome import Result, run

LEARNED = ("step", "loss", "valid_loss", "grad_norm", "learning_rate")  # Of metrics: what no clock is in.
TEXT = [f"the {word} of a small {word} ends here, number {n}" for n in range(20) for word in ("model", "token", "line")]
READ_ALL = """
import hashlib, sys
from steelyard.tokens.indexed_dataset import IndexedTokens
digest = hashlib.sha256()
for document in IndexedTokens(sys.argv[1]).documents():
    digest.update(str(document.tolist()).encode())
print(digest.hexdigest())
"""
PRINT_METRICS = "from steelyard.core.run import Run; print(Run.open('run').metrics())"


@dataclass(frozen=True)
class Target:
    """A file format under test."""

    name: str
    build: Callable[[Path], None]
    files: Sequence[str]
    commands: Sequence[Sequence[str]]
    behaviour: Callable[[Path, Result], object]
    checksum: bool = True

    def damageable(self, folder: Path) -> list[Path]:
        """The files of a sound folder to mutate, relative to it."""
        found = [path for pattern in self.files for path in sorted(folder.glob(pattern)) if path.is_file()]
        assert found, f"{self.name}: no file matches {self.files}"
        return [path.relative_to(folder) for path in found]


def metrics(run_path: str) -> Callable[[Path, Result], object]:
    """The course of a run."""

    def read(folder: Path, _: Result) -> object:
        lines = (folder / run_path / "metrics.jsonl").read_text().splitlines()
        return [{key: json.loads(line).get(key) for key in LEARNED} for line in lines]

    return read


def files_written(*patterns: str) -> Callable[[Path, Result], object]:
    """The contents of files that a command wrote."""

    def read(folder: Path, _: Result) -> object:
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]

    return read


def printed(_: Path, result: Result) -> object:
    """What a command printed."""
    return result.out


def _do(folder: Path, *commands: Sequence[str]) -> None:
    result = run(folder, commands)
    assert result.code == 0, f"{commands}\n{result.err}"


def _workplace(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder / "tokens_text_document", documents=40)
    checksums.write(folder / "tokens_text_document")
    (folder / "tiny.toml").write_text(TINY)


SHORT = ("train.steps=8", "checkpoint.every=6", "eval.every=0", "log.every=1")
TRAIN = ("train", "tiny.toml", *SHORT, "--run", "run")


def _trained(folder: Path) -> None:
    """A run that was killed two steps before its end, with one checkpoint."""
    import shutil

    _workplace(folder)
    _do(folder, TRAIN)
    Run.open(folder / "run").update(state="running")
    steps = sorted(path for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith("step"))
    for path in steps[1:]:
        shutil.rmtree(path)


def _finished(folder: Path) -> None:
    _workplace(folder)
    _do(folder, TRAIN)


def _corpus(folder: Path) -> None:
    from steelyard.text import tokenizer as tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": line, "id": number}) + "\n" for number, line in enumerate(TEXT))
    (folder / "text.jsonl").write_text(rows)
    (folder / "text.jsonl.gz").write_bytes(gzip.compress(rows.encode(), mtime=0))
    tokenizers.train_byte_bpe(TEXT, 280).save(folder / "tokenizer")
    options = tokenizers.SentencePieceOptions(type="unigram", byte_fallback=False)
    tokenizers.train_sentencepiece(TEXT, 40, options).write(folder / "sp")


def _more_corpora(folder: Path) -> None:
    _corpus(folder)
    _do(folder, ("data", "convert", "text.jsonl", "text.parquet"), ("data", "convert", "text.jsonl", "text.jsonl.zst"))


def _tokenized(folder: Path) -> None:
    _corpus(folder)
    _do(folder, _tokenize("text.jsonl"))


def _tokenize(source: str, tokenizer: str = "tokenizer", prefix: str = "out") -> tuple[str, ...]:
    return (
        "data",
        "tokenize",
        "--input",
        source,
        "--tokenizer",
        tokenizer,
        "--output-prefix",
        prefix,
        "--workers",
        "1",
    )


def _model(folder: Path) -> None:
    from tests.checkpoint.models import written

    _corpus(folder)
    written(folder, "qwen2").rename(folder / "model")


def _foreign_model(folder: Path) -> None:
    """As others write one: without checksums."""
    _model(folder)
    (folder / "model" / "SHA256SUMS").unlink(missing_ok=True)


def _megatron(folder: Path) -> None:
    _model(folder)
    _do(folder, ("checkpoint", "convert", "model", "megatron", "--to", "megatron", "--tensor", "2"))


def _megatron_dist(folder: Path) -> None:
    _model(folder)
    _do(folder, ("checkpoint", "convert", "model", "dist", "--to", "megatron-dist"))


def _masked(folder: Path) -> None:
    _model(folder)
    _do(folder, ("prune", "model", "model.mask", "--method", "magnitude", "--save", "mask"))


def _compressed(folder: Path) -> None:
    _model(folder)
    _do(folder, ("prune", "model", "pruned", "--method", "magnitude"), ("export-sparse", "pruned", "sparse"))


def _study(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trial.sh").write_text("echo result=$1\n")
    (folder / "study.toml").write_text(
        'command = "sh trial.sh {x}"\n[space]\nx = [1, 2, 3]\n'
        "[[objectives]]\nname = 'result'\nregex = 'result=([0-9.]+)'\ngoal = 'minimize'\n[budget]\ntrials = 2\n"
    )
    _do(folder, ("tune", "study.toml", "--study", "study"))


def _gguf(folder: Path) -> None:
    """A Llama of one layer, in F32."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, ffn, vocab = 16, 32, 40
    settings = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": hidden,
        "llama.feed_forward_length": ffn, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.context_length": 64, "llama.vocab_size": vocab, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }  # fmt: skip
    sizes = {"token_embd.weight": (hidden, vocab), "output.weight": (hidden, vocab), "output_norm.weight": (hidden,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        sizes[f"blk.0.{name}.weight"] = (hidden, hidden)
    sizes |= {"blk.0.ffn_gate.weight": (hidden, ffn), "blk.0.ffn_up.weight": (hidden, ffn)}
    sizes |= {"blk.0.ffn_down.weight": (ffn, hidden), "blk.0.attn_norm.weight": (hidden,)}
    sizes |= {"blk.0.ffn_norm.weight": (hidden,)}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    written = b"GGUF" + struct.pack("<IQQ", 3, len(sizes), len(settings))
    for key, value in settings.items():
        kind = {str: 8, int: 4, float: 6}[type(value)]
        packed = text(value) if kind == 8 else struct.pack("<I" if kind == 4 else "<f", value)
        written += text(key) + struct.pack("<I", kind) + packed
    data = b""
    for number, (name, shape) in enumerate(sizes.items()):
        written += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        written += struct.pack("<IQ", 0, len(data))
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        data += b"".join(struct.pack("<f", ((n * 37 + number) % 101 - 50) / 100) for n in range(count))
        data += bytes(-len(data) % 32)
    (folder / "model.gguf").write_bytes(written + bytes(-len(written) % 32) + data)


SFT = (
    "sft", "--model", "model", "--data", "talks.jsonl", "finetune.template=chatml", "data.sequence_length=64",
    "train.steps=2", "train.device=cpu", "eval.every=0", "log.every=1",
)  # fmt: skip


def _conversations(folder: Path) -> None:
    """A model with a tokenizer, and conversations that were encoded once."""
    from tests.finetuning.conftest import talks, write_bases, write_jsonl

    folder.mkdir(parents=True, exist_ok=True)
    (write_bases(folder / "bases") / "llama").rename(folder / "model")
    write_jsonl(folder / "talks.jsonl", talks(20))
    _do(folder, (*SFT, "--run", "first"))


CLUSTER = '[[nodes]]\ntype = "a"\ncount = 2\ngpu = "a100-80"\ngpus = 2\n[[links]]\nbetween = ["*", "*"]\nGBps = 12.5\n'


def _recipe(folder: Path) -> None:
    _workplace(folder)
    (folder / "cluster.toml").write_text(CLUSTER)


CONVERT = ("checkpoint", "convert", "model", "converted", "--to", "steelyard")
CONVERTED = files_written("converted/**/*.safetensors", "converted/**/*.distcp", "converted/**/config.json")

TARGETS = [
    Target("checkpoint of a run", _trained, ["run/checkpoints/*/*", "run/checkpoints/*/.metadata"],
           [TRAIN], metrics("run")),
    Target("token files, verified", _tokenized, ["out_text_document.*"],
           [("data", "verify", "out_text_document"), ("-c", READ_ALL, "out_text_document")],
           lambda _, result: result.out.splitlines()[-1]),
    Target("token files, trained on", _workplace, ["tokens_text_document.*"], [TRAIN], metrics("run")),
    Target("index maps", _finished, ["**/*.npy"],
           [("train", "tiny.toml", *SHORT, "--run", "again")], metrics("again")),
    Target("mask file", _masked, ["model.mask"], [("mask", "apply", "model", "model.mask", "applied")],
           files_written("applied/*.safetensors")),
    Target("encoded conversations", _conversations, [".steelyard-*.npz"], [(*SFT, "--run", "again")], metrics("again")),
    Target("exported model", _model, ["model/*"], [("checkpoint", "verify", "model"), CONVERT], CONVERTED),
    Target("compressed model", _compressed, ["sparse/*"],
           [("checkpoint", "verify", "sparse"), ("checkpoint", "info", "sparse")], printed),
    Target("run folder", _finished, ["run/run.json", "run/recipe.toml"],
           [("run", "verify", "run"), ("checkpoint", "info", "run")], printed, checksum=False),
    Target("metrics of a run", _finished, ["run/metrics.jsonl"], [("report", "run"), ("-c", PRINT_METRICS)],
           lambda _, result: result.out.splitlines()[-1], checksum=False),
    Target("study", _study, ["study/*"], [("tune", "report", "study", "--json")], printed, checksum=False),
    Target("safetensors and config.json", _foreign_model, ["model/*"], [CONVERT], CONVERTED, checksum=False),
    Target("GGUF", _gguf, ["model.gguf"],
           [("checkpoint", "convert", "model.gguf", "converted", "--to", "hf")], CONVERTED, checksum=False),
    Target("Megatron checkpoint", _megatron, ["megatron/**/*"],
           [("checkpoint", "convert", "megatron", "converted", "--to", "hf")], CONVERTED, checksum=False),
    Target("Megatron distributed checkpoint", _megatron_dist, ["dist/**/*", "dist/**/.metadata"],
           [("checkpoint", "convert", "dist", "converted", "--to", "hf")], CONVERTED, checksum=False),
    Target("tokenizer.json", _corpus, ["tokenizer/tokenizer.json"], [_tokenize("text.jsonl")],
           files_written("out*.bin"), checksum=False),
    Target("SentencePiece model", _corpus, ["sp.model"], [_tokenize("text.jsonl", "sp.model")],
           files_written("out*.bin"), checksum=False),
    Target("jsonl", _corpus, ["text.jsonl"], [_tokenize("text.jsonl")], files_written("out*.bin"), checksum=False),
    Target("jsonl.gz", _corpus, ["text.jsonl.gz"], [_tokenize("text.jsonl.gz")], files_written("out*.bin")),
    Target("jsonl.zst", _more_corpora, ["text.jsonl.zst"], [_tokenize("text.jsonl.zst")], files_written("out*.bin")),
    Target("parquet", _more_corpora, ["text.parquet"], [_tokenize("text.parquet")], files_written("out*.bin")),
    Target("recipe", _recipe, ["tiny.toml"], [("recipe", "show", "tiny.toml")], printed, checksum=False),
    Target("cluster file", _recipe, ["cluster.toml"],
           [("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--json")], printed, checksum=False),
]  # fmt: skip
