"""Models with experts in fine-tuning: an adapter for each expert, all weights, preferences, and what is refused."""

import math
from pathlib import Path

import pytest
import torch

from steelyard import checkpoint, model
from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.core.recipe.finetune_section import AdapterSection
from steelyard.evaluate.chat import open_chat
from steelyard.evaluate.generation import Sampling, writer
from steelyard.finetuning import peft_format, sft
from steelyard.finetuning.lora import AdaptedExperts, add_adapters, merged
from steelyard.model.experts import ExpertLinear
from steelyard.sizes.adapter_size import adapter_size
from steelyard.sparsity.prune import prune
from steelyard.sparsity.prune_request import PruneRequest
from tests.finetuning.conftest import recipe_of, write_jsonl
from tests.finetuning.test_dpo import WORDS as DPO
from tests.finetuning.test_dpo import pairs
from tests.finetuning.test_lora import WORDS, adapt, logits
from tests.sparsity.small import answer

EXPERTS = "finetune.adapter.targets=['experts']"
BOTH = "finetune.adapter.targets=['attention', 'experts']"
LORA = "finetune.adapter.rank=4"
IDS = torch.randint(5, 390, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keeps_zeros", [False, True])
def test_adapters_of_experts_compute_what_merged_experts_do(keeps_zeros):
    torch.manual_seed(0)
    linear = ExpertLinear(3, 8, 12)
    torch.nn.init.normal_(linear.weight)
    with torch.no_grad():
        linear.weight[linear.weight.abs() < 0.5] = 0
    adapted = AdaptedExperts(linear, AdapterSection(rank=2, alpha=3.0), keeps_zeros)
    learned = {name: getattr(adapted, name) for name in ("adapter_in", "adapter_out")}
    for parameter in learned.values():
        torch.nn.init.normal_(parameter)
    x, counts = torch.randn(10, 12), torch.tensor([4, 0, 5])
    whole = merged(linear.weight, learned, 1.5, keeps_zeros)
    expected = torch.cat([x[:4] @ whole[0].t(), x[4:9] @ whole[2].t(), torch.zeros(1, 8)])
    torch.testing.assert_close(adapted(x, counts), expected)


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        ([], {"attention.query", "mlp.shared.up", "mlp.up"}),
        (["experts"], {"mlp.experts.up", "mlp.experts.down"}),
        (["mlp.experts.up"], {"mlp.experts.up"}),
        (["attention", "experts.down"], {"attention.query", "mlp.experts.down"}),
        (["mlp"], {"mlp.up", "mlp.shared.up"}),
    ],
)
def test_experts_get_adapters_only_if_a_target_names_them(targets, chosen):
    adapter = AdapterSection(targets=targets) if targets else AdapterSection()
    names = ["attention.query", "mlp.up", "mlp.experts.up", "mlp.experts.down", "mlp.shared.up"]
    assert {name for name in names if adapter.selects(name)} == chosen


@pytest.mark.parametrize("targets", [EXPERTS, BOTH])
def test_the_predicted_size_is_that_of_the_adapters(expert_bases, place, targets):
    recipe = recipe_of(expert_bases / "mixtral", LORA, targets)
    with torch.device("meta"):
        network = model.build(recipe.model)
    add_adapters(network, recipe.finetune.adapter)
    trained = [each.numel() for each in network.layers["0"].parameters() if each.requires_grad]
    assert adapter_size(recipe, 4).parameters == sum(trained)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [EXPERTS, BOTH])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_merged_model_is_the_base_plus_the_adapters_of_each_expert(expert_bases, place, family, targets):
    base = expert_bases / family
    prepared, run = adapt(base, targets)
    names = [name for name in checkpoint.source(run.path).shapes() if name.startswith("model.")]
    assert all("adapter" in name and ("experts" in name or targets == BOTH) for name in names)
    saved, origin = open_source(run.path), open_source(base)
    sft.export(prepared, run, place / "out")
    out = open_source(place / "out")
    for name in origin.names():
        module, expected = name.removesuffix(".weight"), origin.tensor(name)
        if f"model.{module}.adapter_in" in names:
            way_in, way_out = (saved.tensor(f"{module}.adapter_{way}") for way in ("in", "out"))
            expected = expected + 8 * torch.einsum("...or,...ri->...oi", way_out, way_in)
            assert (expected - origin.tensor(name)).abs().max() > 0.01
        torch.testing.assert_close(out.tensor(name), expected, atol=1e-6, rtol=0)
    peft_format.merge(str(base), str(run.path), place / "merged")
    assert torch.equal(logits(place / "merged", IDS), logits(place / "out", IDS))
    losses = [record["loss"] for record in run.metrics() if "loss" in record]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mixtral", "'attention', 'experts'"),
        ("mixtral", "'experts.gate'"),
        ("qwen3-moe", "'output', 'experts.up', 'experts.down'"),
    ],
)
def test_peft_computes_what_the_merged_model_does(expert_bases, place, family, targets):
    peft = pytest.importorskip("peft")
    import transformers

    prepared, run = adapt(expert_bases / family, f"finetune.adapter.targets=[{targets}]", "train.steps=2")
    sft.export(prepared, run, place / "out")
    peft_format.export(run.path, place / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(expert_bases / family, dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, place / "adapter").eval()(IDS).logits
    assert (expected - logits(expert_bases / family, IDS)).abs().max() > 0.01
    torch.testing.assert_close(logits(place / "out", IDS), expected, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=r"target_parameters .* is not supported"):
        peft_format.merge(str(expert_bases / family), str(place / "adapter"), place / "merged")


@pytest.mark.slow
def test_adapters_of_a_dense_layer_beside_experts_are_not_written_for_peft(expert_bases, place):
    _, run = adapt(expert_bases / "qwen3-moe", "train.steps=1")
    with pytest.raises(UserError, match="for those of the experts") as refused:
        peft_format.export(run.path, place / "adapter")
    assert "steelyard adapter merge" in str(refused.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "dpo", "dpo with adapters"])
def test_a_model_with_experts_is_tuned(expert_bases, place, kind):
    words = [*WORDS[:3], "finetune.valid_share=0.0", "optim.learning_rate=1e-3"]
    if kind != "full":
        write_jsonl(place / "talks.jsonl", pairs(8))
        words = DPO
    more = [LORA, BOTH, "optim.learning_rate=1e-2"] if "adapters" in kind else []
    prepared = sft.prepare(recipe_of(expert_bases / "mixtral", *words, *more))
    run = sft.run(prepared, Path("run"))
    losses = [record["loss"] for record in run.metrics() if "loss" in record]
    assert losses[-1] < losses[0]
    if kind != "full":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    sft.export(prepared, run, place / "out")
    assert (logits(place / "out", IDS) - logits(expert_bases / "mixtral", IDS)).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], [LORA, BOTH]], ids=["full", "lora"])
def test_pruned_experts_keep_their_zeros(expert_bases, place, words):
    prune(PruneRequest(str(expert_bases / "mixtral"), place / "pruned", "magnitude"))
    prepared = sft.prepare(recipe_of("pruned", *WORDS[:3], "optim.learning_rate=1e-2", *words))
    sft.export(prepared, sft.run(prepared, Path("run")), place / "out")
    before, after = open_source(place / "pruned"), open_source(place / "out")
    for name in (f"layers.1.mlp.experts.{each}.weight" for each in ("gate", "up", "down")):
        assert torch.equal(after.tensor(name) == 0, before.tensor(name) == 0), name
        assert not torch.equal(after.tensor(name), before.tensor(name)), name


REFUSED = {
    "finetune.base_precision": ([LORA, "finetune.base_precision=nf4"], "not available for models with experts"),
    "finetune.adapter.kind": (["finetune.adapter.kind=dora", EXPERTS], "DoRA is not available for experts"),
    "finetune.adapter.targets": (["finetune.adapter.targets=['exprets']"], "exprets is no matrix"),
    "sr-ste": (["sparsity.method=sr-ste"], '"sr-ste" does not support experts'),
    "joint": (["sparsity.method=joint"], '"joint" does not support experts'),
    "distill": (
        ["sparsity.method=learned", "sparsity.exclude=['experts']", "sparsity.distill=0.5"],
        "not available for models with experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_experts_do_not_support_is_refused_by_the_recipe(expert_bases, place, case):
    words, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        recipe_of(expert_bases / "mixtral", *words)


def test_a_dense_model_has_no_experts_to_adapt(bases, place):
    with pytest.raises(UserError, match="llama has no experts"):
        recipe_of(bases / "llama", EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_it_is_pruned_scored_and_answers(expert_bases, place, capsys, family):
    base = expert_bases / family
    (place / "text.txt").write_text("one two three red blue green\n" * 200)
    words = ["--method", "sparsegpt", "--calibration", "text.txt", "--samples", "4", "--sequence-length", "32"]
    code, report, _ = answer(capsys, "prune", str(base), "pruned", *words)
    assert (code, report["sparsity"]) == (0, 0.5)
    for folder in (base, "pruned"):
        code, scored, _ = answer(capsys, "eval", "ppl", str(folder), "--data", "text.txt")
        assert code == 0
        assert 1 < scored["perplexity"] < 1e4
    code, written, _ = answer(capsys, "generate", str(base), "--prompt", "one two", "--max-tokens", "4")
    assert code == 0
    assert written
    chat = open_chat(writer(base), str(base), "chatml", None)
    assert isinstance("".join(chat.answer("Say red", Sampling(max_tokens=4, temperature=0))), str)
