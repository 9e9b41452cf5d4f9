"""Passes replayed as a CUDA graph give what ordinary passes give."""

import numpy as np
import pytest
import torch
import torch._inductor

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.finetuning.lora_extension import LoraExtension
from steelyard.model import Batch
from steelyard.parallel import mesh
from steelyard.parallel.parallelize import compile_options
from steelyard.sparsity import sparsity_extension
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.step_graph import StepGraph

MODEL = "model={family='llama', layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=97, tied=false}"
SIZES = ["data.sequence_length=32", "train.micro_batch=2", "train.precision=bf16", "train.compile=true"]
STEPS = 9
KINDS = {
    "all weights": [],
    "experts": [
        "model={family='qwen3-moe', layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, expert_ffn=32, "
        "experts=8, experts_per_token=2, vocab=97}"
    ],
    "nf4": ["finetune.data=['none']", "finetune.adapter.rank=4", "finetune.base_precision=nf4"],
    "masks": ['sparsity.method="learned"', 'sparsity.base="random"'],
    "joint": ["sparsity={method='joint', mask_every=2, distill=0}", 'train.init_from="random"', "train.steps=9"],
    "masks, distilled": ['sparsity.method="learned"', 'sparsity.base="random"', "sparsity.distill=1.0"],
}


def curve(kind: str, *overrides: str) -> list[tuple[float, float]]:
    recipe = load_recipe("quickstart", [MODEL, *SIZES, *KINDS[kind], *overrides])
    extension = LoraExtension(recipe) if recipe.finetune else sparsity_extension.extension(recipe) or Extension()
    engine = Engine(recipe, mesh.alone(), torch.device("cuda"), extension, None)
    engine.initialise()
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for part in engine.param_shards:
            if not part.parameter.requires_grad:
                if part.tensor.dtype.itemsize == 1:
                    part.tensor.view(torch.uint8).random_(generator=generator)
                elif part.tensor.ndim > 1:
                    part.tensor.normal_(std=0.05, generator=generator)
                else:
                    part.tensor.fill_(0.05)
    batch, length = recipe.train.global_batch, recipe.data.sequence_length
    random, found = np.random.RandomState(0), []
    for step in range(STEPS):
        rows = columns(random.randint(0, 97, (batch, length + 1)))
        extension.begin_step(step + 1, batch, 1.0)
        loss, norm, _ = engine.step(rows, step * batch, 1e-3, batch * length, 1.0)
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch", [2, 6], ids=["one micro-batch", "three micro-batches"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_the_curve_of_ordinary_passes(kind, batch):
    batches = f"train.global_batch={batch}"
    expected, found = curve(kind, batches), curve(kind, batches, "train.cuda_graph=true")
    assert found == pytest.approx(expected, rel=2e-3)
    assert len({loss for loss, _ in found}) > STEPS // 2


def test_packed_documents_are_refused():
    graph = StepGraph(lambda batch, factor: factor, [], torch.device("cpu"))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match="packed documents"):
        graph(Batch(tokens, document_starts_BN=tokens), torch.ones(()))


def test_torch_knows_the_options_of_compiled_layers():
    plain, tuned = (
        set(compile_options(load_recipe("gpt2-small", [f"train.tune_kernels={value}"]))) for value in ("false", "true")
    )
    assert plain != tuned
    assert plain | tuned <= set(torch._inductor.list_options())
