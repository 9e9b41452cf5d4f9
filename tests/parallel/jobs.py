"""What the ranks of the pool can be asked to do. Imported once, before they are forked."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard import model as models
from steelyard.checkpoint import folder
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, SteelyardError, UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.blocks import ExpertsBlock, Routing
from steelyard.finetuning import sft
from steelyard.model import loss as losses
from steelyard.model.experts import Experts
from steelyard.model.loss import linear_cross_entropy
from steelyard.parallel import expert_parallel, tensor_parallel
from steelyard.parallel.matrix_exchange import plan_rounds
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.tensor_parallel import VocabParallelHead
from steelyard.parallel.world import init_distributed
from steelyard.sparsity import sparsity_extension as sparsity
from steelyard.sparsity.finished_layers import FinishedLayers
from steelyard.sparsity.layerwise import LayerOnDevice
from steelyard.sparsity.prune import prune
from steelyard.sparsity.prune_request import PruneRequest
from steelyard.training import device as devices
from steelyard.training import engine, trainer
from steelyard.training.extension import Extension
from tests.finetuning.conftest import recipe_of
from tests.model.test_loss import VOCAB, drawn


def training(overrides: list[str], run: str, extension: Extension | None = None, resume: str = "auto") -> str:
    """Train the tiny recipe and return what the first rank said."""
    said: list[str] = []
    console.quiet = False
    console._print = lambda message, stream=None: said.append(message)  # type: ignore[method-assign]
    recipe = load_recipe("tiny.toml", overrides)
    trainer.run(recipe, Path(run), extension or sparsity.extension(recipe), resume)
    return "\n".join(said)


def gloo_threads() -> int:
    """How many threads of process groups this rank has."""
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def training_in_fp8(overrides: list[str], run: str) -> str:
    """The same in fp8 on a CPU, which computes the products from rounded values."""
    asked, devices.has_fp8 = devices.has_fp8, lambda is_cuda: True
    try:
        return training(["train.precision=fp8", *overrides], run)
    finally:
        devices.has_fp8 = asked


def training_with_gradient_dtypes(overrides: list[str], run: str) -> list[str]:
    """Train the tiny recipe; returns the dtypes of the gradients that the optimizer receives."""
    seen, step = set(), engine.Optimizer.step

    def watched(self: engine.Optimizer, *args: Any) -> None:
        seen.update(str(part.gradient.dtype) for part in self.param_shards if part.gradient is not None)
        step(self, *args)

    engine.Optimizer.step = watched  # type: ignore[method-assign]
    try:
        training(overrides, run)
    finally:
        engine.Optimizer.step = step  # type: ignore[method-assign]
    return sorted(seen)


def pruning(request: dict[str, Any]) -> dict[str, Any] | str:
    """Prune a checkpoint; returns the report or the error. `fails_at_layer`: rank 0 fails before it saves this one."""
    console.quiet = True
    fails_at, write = request.pop("fails_at_layer", None), FinishedLayers.write

    def failing(self: FinishedLayers, layer: LayerOnDevice) -> None:
        if layer.number == fails_at:
            raise OSError("the disk gave up")
        write(self, layer)

    FinishedLayers.write = failing  # type: ignore[method-assign]
    try:
        return prune(PruneRequest(**request))
    except (SteelyardError, OSError) as error:
        return str(error)
    finally:
        FinishedLayers.write = write  # type: ignore[method-assign]


def failing_training(overrides: list[str], run: str, extension: Extension | None = None) -> tuple[str, str, bool]:
    """Train the tiny recipe, which is to fail; returns the error, and whether the other ranks share it."""
    try:
        training(overrides, run, extension)
    except SteelyardError as error:
        return type(error).__name__, str(error), error.shared
    return "none", "", False


def interrupted_training(overrides: list[str], run: str, extension: Extension) -> str:
    """Train the tiny recipe, which is to be interrupted; returns what is saved."""
    try:
        training(overrides, run, extension)
    except Interrupted as interruption:
        return interruption.saved
    return "not interrupted"


def training_whose_last_save_is_damaged(overrides: list[str], run: str, damaged_rank: int) -> tuple[str, str, bool]:
    """As `failing_training`; one rank's file of the last step changes on disk before it is read back."""
    mismatched = folder._mismatched

    def damage(path: Path, mine: dict[str, str]) -> list[str]:
        own = [name for name in mine if name.endswith(".distcp")]
        if int(os.environ["RANK"]) == damaged_rank and path.name.endswith("4"):
            content = bytearray((path / own[0]).read_bytes())
            content[len(content) // 2] ^= 1
            (path / own[0]).write_bytes(content)
        return mismatched(path, mine)

    folder._mismatched = damage
    try:
        return failing_training(overrides, run)
    finally:
        folder._mismatched = mismatched


def training_by_another_recipe(overrides: list[list[str]], run: str) -> str:
    """Each rank trains by overrides of its own; returns what is said against it."""
    console.quiet = True
    try:
        trainer.run(load_recipe("tiny.toml", overrides[int(os.environ["RANK"])]), Path(run))
    except UserError as error:
        return f"{error} {error.shared}"
    return "trained"


def tuned(base: str, overrides: list[str], run: str, data: str) -> None:
    """Tune on the conversations at hand."""
    console.quiet = True
    prepared = sft.prepare(recipe_of(base, *overrides, data=data))
    sft.run(prepared, Path(run))


def tuned_by_starts(base: str, overrides: list[str], run: str, data: str) -> None:
    """The same with conversations named by where they begin, as on a GPU; on a CPU a dense mask is made of that."""
    asked, engine.has_varlen_attention = engine.has_varlen_attention, lambda *_: True
    try:
        tuned(base, overrides, run, data)
    finally:
        engine.has_varlen_attention = asked


def failing(rank: int) -> None:
    """One rank raises, the others wait."""
    if os.environ["RANK"] == str(rank):
        raise ValueError("one rank fails")
    hanging()


def crashing_once(mark: Path) -> str:
    if os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return "done"


def hanging() -> None:
    """A rank that is never done."""
    time.sleep(999)


def loss_over_the_vocabulary(rows_at_once: int) -> dict[str, Any]:
    """The fused loss with the head's rows on several ranks, and its gradients: this rank's rows, the whole stream."""
    x, weight, labels, weights = drawn()
    with init_distributed("cpu", 0.5) as world:
        axis = MeshAxis(world.rank, world.size, dist.group.WORLD)
        mine = weight.detach().chunk(world.size)[world.rank].clone().requires_grad_()
        vocabulary = VocabParallelHead(axis, len(mine), by_sequence=False)
        losses.CHUNK_BYTES = 4 * len(mine) * rows_at_once
        found = linear_cross_entropy(vocabulary.enter(x), mine, labels, weights, VOCAB, vocabulary)
        found.backward()
        losses.CHUNK_BYTES = 1 << 30
    return {"loss": found.detach(), "x": x.grad, "weight": mine.grad}


def experts_with_a_load(weights_X: list[float], device: str = "cpu") -> dict[str, Any]:
    """Experts on all ranks, whose router prefers some: outputs and gradients, and those of one process on all rows."""
    size = len(weights_X)
    block = ExpertsBlock(8, 4, "silu", Routing(size, 2))
    with init_distributed(device, 0.5 if device == "cpu" else 2) as world:
        whole, mine, ones = Experts(block), Experts(block), torch.ones(world.size * 2, 6, 8)
        x = torch.randn(ones.shape, generator=torch.Generator().manual_seed(3)) + ones
        for name, parameter in whole.named_parameters():
            parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
        whole.router.weight.data.copy_(torch.tensor(weights_X)[:, None].expand(size, 8) + whole.router.weight.data / 50)
        mine.load_state_dict(whole.state_dict())
        whole, mine, x = whole.to(device), mine.to(device), x.to(device)
        rows, axis = slice(2 * world.rank, 2 * world.rank + 2), MeshAxis(world.rank, world.size, dist.group.WORLD)
        holder = torch.nn.ModuleDict({"mlp": mine})
        expert_parallel.split(holder, axis)  # type: ignore[arg-type]
        expected, routed = whole(x)
        expected.square().sum().backward()
        found, _ = mine(x[rows])
        found.square().sum().backward()
        router = mine.router.weight.grad.clone()
        dist.all_reduce(router)
    first = world.rank * size // world.size
    experts = slice(first, first + size // world.size)
    pairs = {"output": (found, expected[rows]), "router": (router, whole.router.weight.grad)}
    for name, parameter in mine.experts.named_parameters():
        pairs[name] = parameter.grad, whole.experts.get_parameter(name).grad[experts]
    worst = {
        name: ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() if a is not None else float("inf")
        for name, (a, b) in pairs.items()
    }
    return {"worst": worst, "counts": routed.stats[:size].tolist()}


def training_in(folder: Path, overrides: list[str], run: str) -> None:
    """A whole life of one process that trains, until it is done or killed."""
    os.chdir(folder)
    torch.set_num_threads(1)
    training(overrides, run)


def gradients_of_a_compiled_model() -> dict[str, float]:
    """Relative differences of gradients between a model of compiled layers and a plain one, cut over the ranks."""
    shape = load_recipe("tiny.toml", []).model
    tokens, labels = torch.randint(0, shape.vocab, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, torch.Tensor]] = []
    with init_distributed("cpu", 0.5) as world:
        for is_compiled in (False, True):
            model = models.build(shape)
            models.init_weights(model, 0, 0.2, shape.layers)
            tensor_parallel.split(model, MeshAxis(world.rank, world.size, dist.group.WORLD), by_sequence=False)
            for layer in model.layers.values() if is_compiled else ():
                layer.compile(backend="aot_eager")
            model(models.Batch(tokens, labels)).sum().backward()
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, compiled = found
    return {name: ((compiled[name] - plain[name]).norm() / plain[name].norm()).item() for name in plain}


def exchanged_matrices(limit: int) -> dict[str, Any]:
    """Exchange matrices sharded in every way over the ranks, and double them on their owners."""
    with init_distributed("cpu", 0.5) as world:
        rank, size = world.rank, world.size
        generator = torch.Generator().manual_seed(0)
        shards, wholes = [], []
        for shape, how in [
            ((7, 12), "rows"), ((12, 7), "rows"), ((1, 8), "rows"), ((8, 12), "columns"), ((8, 12), "copies"),
            ((6, 4, 8), "rows"), ((4, 8, 8), "columns"), ((5, 4, 8), "copies"), ((8, 8), "halves"),
        ]:  # fmt: skip
            whole = torch.randn(shape, generator=generator)
            shard, offset = _shard(whole, how, rank, size)
            parameter = torch.nn.Parameter(shard.clone())
            shards.append(ParamShard(f"{shape}", parameter, parameter.detach(), shape, offset, 1, *[False] * 5))
            wholes.append(whole)
        owned, worst = [], 0.0
        rounds = plan_rounds(
            shards, MeshAxis(rank, size, dist.group.WORLD), lambda rows, columns: rows * columns, limit
        )
        for each in rounds:
            pieces = [shards[piece.param].tensor.view(-1)[piece.start : piece.stop] for piece in each.held]
            sent = [values for piece, values in zip(each.held, pieces, strict=True) if piece.is_sent]
            stacks = each.gather(torch.cat(sent) if sent else torch.empty(0))
            for stack in stacks:
                owned += [_number_of(matrix, wholes) for matrix in stack]
            for values, result in zip(
                pieces, each.scatter([2 * stack for stack in stacks], torch.empty(0)), strict=True
            ):
                worst = max(worst, (result - 2 * values).abs().max().item())
        return {"owned": owned, "worst": worst, "rounds": len(rounds), "matrices": sum(_matrices(w) for w in wholes)}


def _shard(whole: torch.Tensor, how: str, rank: int, size: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A rank's part: rows as FSDP shards them, columns as tensor parallelism does, or in two copies of halves."""
    offset = [0] * whole.ndim
    if how == "columns":
        width = whole.shape[-1] // size
        offset[-1] = rank * width
        return whole[..., offset[-1] : offset[-1] + width].contiguous(), tuple(offset)
    pieces = {"rows": size, "copies": 1, "halves": size // 2}[how]
    rows = -(-len(whole) // pieces)
    offset[0] = min(len(whole), rank % pieces * rows)
    return whole[offset[0] : offset[0] + rows].contiguous(), tuple(offset)


def _matrices(whole: torch.Tensor) -> int:
    return len(whole) if whole.ndim == 3 else 1


def _number_of(matrix: torch.Tensor, wholes: list[torch.Tensor]) -> int:
    """The number of a matrix among all of them; fails if it is none of them, bit for bit."""
    every = [each for whole in wholes for each in (whole if whole.ndim == 3 else whole[None])]
    return next(number for number, each in enumerate(every) if torch.equal(each, matrix))
