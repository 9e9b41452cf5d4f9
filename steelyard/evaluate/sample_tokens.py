"""Samples documents from a model into token files: text for distillation and pruning without the model's own data.

A pass decodes `rows` texts side by side, each from the start tokens up to `length` tokens, and cuts them into documents
at the end tokens. The tokens depend on the seed and the number of the pass, so a job that was killed continues after
its last complete pass, whose chunk is in `<prefix>.sample/`. Another device gives other tokens.

Tensor suffixes: R rows, L length, V vocabulary.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steelyard.checkpoint.formats import open_source
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.evaluate.decode_graph import Decoder
from steelyard.evaluate.generation import Sampling, Writer
from steelyard.model import Batch, Cache, LanguageModel
from steelyard.text.tokenizer import Tokenizer
from steelyard.tokens import encode_workers, merge
from steelyard.tokens import tokenize_job as jobs
from steelyard.tokens.indexed_dataset import token_dtype
from steelyard.tokens.inspect import summary


@dataclass(frozen=True)
class SampleJob(jobs.TokenJob):
    """What is sampled, and where to."""

    kind = "sample"
    prefix: str
    tokens: int
    """About this many are sampled."""
    length: int
    """Tokens per text, after the start tokens."""
    rows: int
    start: tuple[int, ...]
    """Tokens that each text follows. They are not written."""
    sampling: Sampling
    keys: tuple[str, ...] = ("text",)

    @property
    def passes(self) -> int:
        """How often the rows are decoded."""
        return -(-self.tokens // (self.rows * self.length))


def weights_of(checkpoint: str, mask: str | None, base: str | None) -> dict[str, Any]:
    """What the weights are read from, with sizes and times of change."""
    named = {"checkpoint": open_source(checkpoint).path, "mask": mask, "base": base}
    return {name: _state(Path(path)) for name, path in named.items() if path is not None}


def _state(path: Path) -> list[Any]:
    found = [each.stat() for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file()]
    return [
        str(path.resolve()),
        sum(each.st_size for each in found),
        max((each.st_mtime_ns for each in found), default=0),
    ]


def sample(job: SampleJob, writer: Writer, weights: dict[str, Any], overwrite: bool = False) -> dict[str, Any]:
    """Run or resume the job, unless it is finished; returns a summary of the files.

    `weights` says what they are read from: a job with others is not resumed.
    """
    _check(job, writer.context)
    device = next(writer.network.parameters()).device.type
    made_of = {
        name: value for name, value in asdict(job).items() if name not in ("prefix", "keys", "sampling")
    } | weights
    made_of |= asdict(job.sampling)
    others = {"tokenizer": writer.tokenizer.fingerprint, "device": device, "dtype": str(writer.network.dtype)}
    made_of = jobs.as_json(made_of | others)
    done = jobs.finished(job, made_of, overwrite)
    if done is not None:
        console.say(f"{job.prefix}: already finished, nothing to do")
        shutil.rmtree(job.folder, ignore_errors=True)
        return done | {"tokens_per_second": None}
    job.folder.mkdir(parents=True, exist_ok=True)
    with encode_workers.sole_owner(job.folder):
        jobs.begin(job, made_of, overwrite)
        try:
            speed = _sample_passes(job, writer)
        except Interrupted:
            command = "the same command without --overwrite" if overwrite else "the same command"
            raise Interrupted(f"complete passes are kept in {job.folder}; {command} continues") from None
        except torch.OutOfMemoryError:
            shutil.rmtree(job.folder)  # Passes of other rows would be other texts.
            raise RuntimeFailure(f"{job.rows} texts at once do not fit in memory", hint="lower --rows") from None
        if not any(_chunk(job, number).stat().st_size for number in range(job.passes)):
            shutil.rmtree(job.folder)
            raise UserError("the model generates only end tokens", hint="give what a text begins with, by --start")
        with merge.joining(job.output("text"), token_dtype(writer.tokenizer.vocab_size)) as joiner:
            for number in range(job.passes):
                joiner.append(_chunk(job, number))
        result = {"prefix": job.prefix, "files": {"text": summary(job.output("text"))}, "tokens_per_second": speed}
        files.write_json(job.record, {"made_of": made_of, "result": result})
        shutil.rmtree(job.folder)
    return result


def _check(job: SampleJob, context: int) -> None:
    left = context - len(job.start)
    if left < 1:
        raise UserError(
            f"the start has {len(job.start)} tokens, the model's context {context}", hint="give a shorter --start"
        )
    if job.length > left:
        raise UserError(
            f"texts of {job.length} tokens after {len(job.start)} do not fit the model's context of {context}",
            hint=f"--length {left}",
        )
    if job.sampling.temperature == 0 or job.sampling.top_k == 1:
        raise UserError(
            "every text would be the same", where="--temperature 0" if job.sampling.temperature == 0 else "--top-k 1",
            hint="leave it out to sample from the model's distribution",
        )  # fmt: skip


def _sample_passes(job: SampleJob, writer: Writer) -> float | None:
    """Sample the missing passes; returns the tokens per second, or None if none was missing."""
    each = job.rows * job.length
    missing = [number for number in range(job.passes) if not _chunk(job, number).exists()]
    begun, done = time.monotonic(), (job.passes - len(missing)) * each
    ends = writer.ends | {writer.tokenizer.end_of_document}
    with console.progress("sample", job.passes * each, "tokens", done=done) as progress:
        for number in missing:
            texts_RL = decode(writer.network, job, number, writer.tokenizer.vocab_size, progress.advance)
            _write(_chunk(job, number), texts_RL.cpu().numpy(), ends, writer.tokenizer)
    return round(len(missing) * each / (time.monotonic() - begun), 1) if missing else None


@torch.inference_mode()
def decode(
    network: LanguageModel,
    job: SampleJob,
    number: int,
    vocab: int,
    advance: Callable[[float], None] = lambda count: None,
) -> Tensor:
    """The texts (R, L) of one pass. No token is read from the device before the last one is chosen."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(job.sampling.seed * 1_000_003 + number)
    texts_RL = torch.empty(job.rows, job.length, dtype=torch.int64, device=device)
    cache = Cache(len(job.start) + job.length)
    decoder = Decoder(network, cache, job.rows)
    start_RS = torch.tensor([job.start] * job.rows, device=device)
    logits_RV = network(Batch(start_RS, logits_to_keep=1), cache=cache)[:, -1]
    for place in range(job.length):
        texts_RL[:, place] = choose(logits_RV[:, :vocab], job.sampling, generator)
        advance(job.rows)
        if place + 1 < job.length:
            logits_RV = decoder.logits(texts_RL[:, place : place + 1])
    return texts_RL


def choose(logits_RV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Sample a token for each row on the device of the logits."""
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    logits_RV = logits_RV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_RV.shape[1]:
        least_R1 = logits_RV.topk(sampling.top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, float("-inf"))
    if sampling.top_p < 1:
        sorted_RV = logits_RV.sort(descending=True).values
        chances_RV = sorted_RV.softmax(-1)
        # A token stays while the sum of those before it is below top_p, the most likely one always.
        kept_RV = chances_RV.cumsum(-1) - chances_RV < max(sampling.top_p, torch.finfo(torch.float32).tiny)
        least_R1 = sorted_RV.masked_fill(~kept_RV, float("inf")).amin(-1, keepdim=True)
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, float("-inf"))
    # The largest of logits with Gumbel noise is a sample of their softmax.
    return (logits_RV - torch.empty_like(logits_RV).exponential_(generator=generator).log()).argmax(-1)


def documents(text_L: npt.NDArray[Any], ends: Collection[int], end_of_document: int) -> list[Sequence[int]]:
    """The documents of a text, each with the end-of-document token at its end. The last one may have been cut off."""
    found: list[Sequence[int]] = []
    begin = 0
    for end in [*np.flatnonzero(np.isin(text_L, list(ends))), len(text_L)]:
        if end > begin:
            found.append([*text_L[begin:end].tolist(), end_of_document])
        begin = int(end) + 1
    return found


def _write(path: Path, texts_RL: npt.NDArray[Any], ends: Collection[int], tokenizer: Tokenizer) -> None:
    """Write a chunk: the length of each document, then the tokens, whose file marks it as complete."""
    found = [each for text_L in texts_RL for each in documents(text_L, ends, tokenizer.end_of_document)]
    with files.atomic_file(path.with_suffix(".lengths"), "wb") as file:
        file.write(np.array([len(each) for each in found], dtype=np.int32).tobytes())
    with files.atomic_file(path, "wb") as file:
        file.write(np.array([id_ for each in found for id_ in each], token_dtype(tokenizer.vocab_size)).tobytes())


def _chunk(job: SampleJob, number: int) -> Path:
    return job.folder / f"{number:06d}.tokens"
