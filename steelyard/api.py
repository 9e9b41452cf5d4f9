"""The public Python API: thin functions over those that the command line uses.

Import it as `import steelyard as sy`. Only functions that need torch import it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.run import Run

if TYPE_CHECKING:
    import torch

    from steelyard.checkpoint.formats import CheckpointSource
    from steelyard.core.recipe.model_section import ModelConfig
    from steelyard.model import LanguageModel
    from steelyard.observe.rules import Verdict
    from steelyard.planning.cluster import Cluster
    from steelyard.planning.results import SearchResult
    from steelyard.text.tokenizer import Tokenizer
    from steelyard.training.extension import Extension

PathLike = str | os.PathLike[str]
RecipeLike = Recipe | PathLike
SECONDS_SEARCHED = 5.0  # limit for the search in error logs, which may be very long


def build_model(recipe: RecipeLike, seed: int | None = None) -> LanguageModel:
    """Build the model of a recipe on the CPU with the initial weights of a training run.

    `seed` replaces the recipe's `train.seed`.
    """
    from steelyard import model

    recipe = _recipe(recipe)
    config, network = recipe.model, model.build(recipe.model)
    model.init_weights(network, recipe.train.seed if seed is None else seed, config.init_std, config.layers)
    return network


class LoadedModel:
    """A checkpoint in memory, with its tokenizer: it generates text and measures perplexity."""

    def __init__(
        self, source: CheckpointSource, network: LanguageModel, device: torch.device, tokenizer: str | None = None
    ) -> None:
        self.source, self.network, self.device = source, network, device
        self._tokenizer = tokenizer

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions: the `[model]` section of a recipe."""
        return self.source.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The given tokenizer, or the checkpoint's."""
        from steelyard.evaluate.load_model import tokenizer_for

        return tokenizer_for(self.source, self._tokenizer)

    def generate(
        self, prompt: str, max_tokens: int = 100, temperature: float = 0.8, top_k: int = 50, top_p: float = 1.0,
        seed: int = 0,
    ) -> str:  # fmt: skip
        """Return the prompt and its continuation; temperature 0 always takes the most likely token."""
        from steelyard.evaluate.generation import Sampling, Writer, ends_of
        from steelyard.evaluate.load_model import context_of

        writer = Writer(self.network, self.tokenizer, context_of(self.source), ends_of(self.source, self.tokenizer))
        return writer.text(prompt, Sampling(max_tokens, temperature, top_k, top_p, seed))

    def perplexity(self, text: str, sequence_length: int | None = None, stride: int | None = None) -> float:
        """Return the perplexity of a text, with the windows of `steelyard eval ppl` (docs/evaluate.md).

        By default a window is as long as the model's context, at most 4096 tokens, or the text if it is shorter.
        """
        import numpy as np

        from steelyard.evaluate import eval_tokens, windows
        from steelyard.evaluate.load_model import context_of
        from steelyard.evaluate.perplexity import LONGEST, summed_loss

        tokens = np.asarray(self.tokenizer.framed(text), dtype=np.int32)
        eval_tokens.check_ids(eval_tokens.TokenStream(tokens, {}), self.config.vocab)
        length = sequence_length or min(LONGEST, context_of(self.source), len(tokens))
        cut = windows.plan(len(tokens), length, stride, "hf")
        return math.exp(summed_loss(self.network, tokens, cut.windows, self.device).item() / cut.divisor)


def load_model(
    checkpoint: PathLike, tokenizer: str | None = None, device: str = "auto", dtype: str = "auto",
    mask: str | None = None,
) -> LoadedModel:  # fmt: skip
    """Load a checkpoint of any format for inference: a run, a Hugging Face folder or name, GGUF, Megatron.

    `mask` is a mask file that is applied to the weights.
    """
    from steelyard.evaluate.load_model import loaded
    from steelyard.sparsity import pruned_source
    from steelyard.training.device import device_for, dtype_for

    source = pruned_source.opened(os.fspath(checkpoint), mask, None)
    where = device_for(device)
    return LoadedModel(source, loaded(source, where, dtype_for(dtype, source, where)), where, tokenizer)


def convert(
    checkpoint: PathLike, destination: PathLike, to: str = "hf", dtype: str | None = None, tensor: int = 1,
    pipeline: int = 1, tokenizer: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write a checkpoint as `hf`, `megatron`, `megatron-dist` or `steelyard`; returns path, format, dtype and bytes.

    `tensor` and `pipeline` are the ranks of a `megatron` checkpoint.
    """
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
    from steelyard.checkpoint.formats.write import DTYPES, Target
    from steelyard.checkpoint.formats.write import convert as write

    _choose("to", to, ("hf", "megatron", "megatron-dist", "steelyard"))
    if dtype is not None:
        _choose("dtype", dtype, DTYPES)
    target = Target(to, MegatronLayout(tensor, pipeline), DTYPES[dtype] if dtype else None, tokenizer=tokenizer)
    return write(open_source(os.fspath(checkpoint)), Path(destination), target)


def prune(
    checkpoint: PathLike, destination: PathLike, method: str = "wanda", pattern: str = "2:4",
    calibration: PathLike | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Prune a checkpoint in one shot into a Hugging Face folder, or a mask file (`save="mask"`); returns the report.

    `options` are the other fields of `steelyard.sparsity.prune_request.PruneRequest`, such as `samples`.
    """
    from steelyard.sparsity import prune as pruning
    from steelyard.sparsity.prune_request import PruneRequest

    shown = None if calibration is None else os.fspath(calibration)
    request = PruneRequest(os.fspath(checkpoint), Path(destination), method, pattern, calibration=shown, **options)
    return pruning.prune(request)


def plan(
    recipe: RecipeLike, cluster: Cluster | PathLike, objective: str = "time", top: int = 10,
    software: str = "steelyard", calibration: bool = True,
) -> SearchResult:  # fmt: skip
    """Search the layouts of a recipe on a cluster; `plans` of the result is sorted, best first.

    `objective` is `time`, `cost`, `energy`, or `pareto` for the Pareto front of time and price. `software` is the
    training program, as in `steelyard plan --software`. `calibration` uses that which is stored beside a cluster file.
    """
    from steelyard.planning import cluster as clusters
    from steelyard.planning import site_calibration
    from steelyard.planning.search import search
    from steelyard.planning.software import KNOWN

    _choose("objective", objective, ("time", "cost", "energy", "pareto"))
    _choose("software", software, KNOWN)
    program = KNOWN[software]
    machines = cluster if isinstance(cluster, clusters.Cluster) else clusters.load(os.fspath(cluster))
    if calibration and not isinstance(cluster, clusters.Cluster):
        machines = site_calibration.applied(machines, Path(cluster), program.name)
    machines.check_objective(objective)
    return search(_recipe(recipe), machines, objective, top, software=program)


class OpenedRun:
    """A run folder. Properties read its files at every access."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"OpenedRun({str(self.path)!r}, state={self.state!r})"

    @property
    def path(self) -> Path:
        """The run folder, which `load_model` also accepts."""
        return self._run.path

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed` and so on."""
        return self._run.state

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._run.recipe()

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The records of `metrics.jsonl` as columns of equal length; missing values are None."""
        records = self._run.metrics()
        names = dict.fromkeys(name for record in records for name in record)
        return {name: [record.get(name) for record in records] for name in names}

    @property
    def verdict(self) -> Verdict:
        """The most severe verdict of `steelyard watch`: kind, level, message and what to do."""
        from steelyard.observe.run_state import RunState
        from steelyard.observe.verdict import judge

        return judge(RunState(self.path).refresh().search(SECONDS_SEARCHED))[0]

    def report(self, path: PathLike | None = None) -> Path:
        """Write the report as one HTML file, by default `report.html` in the run folder. Returns its path."""
        from steelyard.observe import report

        return report.write(self._run, None if path is None else Path(path))


def open_run(path: PathLike) -> OpenedRun:
    """Open a run folder, finished or not."""
    return OpenedRun(Run.open(Path(path)))


def train(
    recipe: RecipeLike, run: PathLike | None = None, extension: Extension | None = None, resume: str = "auto"
) -> OpenedRun:
    """Train a recipe in this process, or resume an unfinished run of it; `run` is the run folder.

    Without `extension` the recipe's `[sparsity]` applies, as in `steelyard train`.
    """
    from steelyard.sparsity import sparsity_extension
    from steelyard.training import trainer

    recipe = _recipe(recipe)
    extension = extension or sparsity_extension.extension(recipe)
    return OpenedRun(trainer.run(recipe, None if run is None else Path(run), extension, resume))


def finetune(
    recipe: RecipeLike, run: PathLike | None = None, destination: PathLike | None = None, resume: str = "auto"
) -> OpenedRun:
    """Fine-tune a recipe with `[finetune]` in this process, and export a finished run for transformers.

    The export goes to `destination`, or to `hf` in the run folder.
    """
    from steelyard.finetuning import sft

    prepared = sft.prepare(_recipe(recipe))
    done = sft.run(prepared, None if run is None else Path(run), resume)
    if done.state == "finished":
        sft.export(prepared, done, None if destination is None else Path(destination))
    return OpenedRun(done)


def _recipe(recipe: RecipeLike) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(os.fspath(recipe))


def _choose(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"{name} is {value!r}", hint=f"choose one of {', '.join(known)}")
