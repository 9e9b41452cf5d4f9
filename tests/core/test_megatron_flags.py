"""Single flags of Megatron: the key that each becomes, or why it has none."""

import re
import tomllib
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.megatron import read
from tests.core.megatron_reading import LLAMA, MOE, SMALL, left, of_flags

MUON = "--optimizer muon --muon-momentum 0.9 "


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--use-distributed-optimizer", "parallel.zero", 1),
        ("", "parallel.zero", 0),
        ("--zero-stage 2", "parallel.zero", 2),
        ("--use-torch-fsdp2", "parallel.zero", 3),
        (LLAMA, "model.ffn", 128),
        (LLAMA + "--group-query-attention --num-query-groups 2", "model.kv_heads", 2),
        (LLAMA + "--kv-channels 32", "model.head_dim", 32),
        (LLAMA + "--add-qkv-bias", "model.qkv_bias", True),
        (LLAMA + "--norm-epsilon 1e-6", "model.norm_eps", 1e-6),
        ("--untie-embeddings-and-output-weights", "model.tied", False),
        ("--vocab-size 1000", "model.vocab", 1000),
        ("--vocab-size 1000 --tokenizer-type NullTokenizer", "model.vocab", 1001),
        ("--padded-vocab-size 1024", "model.vocab_multiple", 1024),
        ("--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64", "model.vocab_multiple", 128),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "parallel.sequence_parallel", True),
        ("--sequence-parallel", "parallel.sequence_parallel", False),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "parallel.virtual", 2),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "parallel.schedule",
            "interleaved",
        ),
        ("--pipeline-model-parallel-size 2 --balance 1-3", "parallel.partition", "1-3"),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", "parallel.partition", "1-1-1-1"),
        ("--context-parallel-size 2 --attention-dropout 0", "parallel.data", 4),
        ("--recompute-activations", "parallel.recompute", "selective"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "parallel.recompute",
            "full",
        ),
        ("--checkpoint-activations", "parallel.recompute", "full"),
        ("--train-samples 160 --lr-warmup-fraction 0.1", "optim.warmup_samples", 16),
        ("--train-samples 160 --lr-warmup-samples 8 --lr-decay-samples 80", "optim.decay_samples", 80),
        ("--train-iters 100 --lr-warmup-fraction 0.1", "optim.warmup_steps", 10),
        (MUON, "optim.name", "muon"),
        ("--optimizer dist_muon", "optim.name", "muon"),
        (MUON, "optim.muon_momentum", 0.9),
        (MUON, "optim.muon_nesterov", False),
        (MUON + "--muon-use-nesterov", "optim.muon_nesterov", True),
        (MUON + "--muon-num-ns-steps 6", "optim.muon_ns_steps", 6),
        (MUON, "optim.muon_scale", "match_rms_adamw"),
        (MUON, "optim.muon_extra_scale_factor", 5.0),
        (MUON + "--muon-extra-scale-factor 0.2", "optim.muon_extra_scale_factor", 1.0),
        (MUON + "--muon-scale-mode shape_scaling", "optim.muon_scale", "original"),
        (MUON + "--muon-scale-mode shape_scaling", "optim.muon_extra_scale_factor", 1.0),
        (MUON + "--muon-fp32-matmul-prec high", "optim.muon_precision", "fp32"),
        (MUON + "--adam-beta2 0.98", "optim.betas", [0.9, 0.98]),
        (
            "--train-iters 100 --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear",
            "optim.decay_fraction",
            0.2,
        ),
        ("--fp16 --initial-loss-scale 4096 --loss-scale-window 500", "train.loss_scale", 4096.0),
        ("--bf16 --fp8-format hybrid", "train.precision", "fp8"),
        ("--reset-position-ids --reset-attention-mask", "data.mask_documents", True),
        ("--data-path a b", "data.train", [{"prefix": "a", "weight": 1.0}, {"prefix": "b", "weight": 1.0}]),
        ("--train-data-path 1 a --valid-data-path b", "data.valid", [{"prefix": "b", "weight": 1.0}]),
        ("--split '900, 50, 50'", "data.split", "900,50,50"),
        ("--eval-iters 0", "eval.every", 0),
        ("--wandb-project p", "log.wandb", "p"),
        ("--profile --use-pytorch-profiler --profile-step-end 11", "log.profile_tool", "torch"),
        ("--profile --profile-ranks 0 4", "log.profile_ranks", [0, 4]),
        ("--distributed-timeout-minutes 30", "parallel.timeout_minutes", 30.0),
        ("--load elsewhere", "train.init_from", "elsewhere"),
        ("--seed 1 --seed=7", "train.seed", 7),
        ("--mask-only --gumbel-temperature-range 2 0.05", "sparsity.temperature", [2.0, 0.05]),
        ("--gumbel-scale-range 1e2 5e2", "sparsity.scale", [100.0, 500.0]),
        ("--mask-only --N 1 --M 4", "sparsity.pattern", "1:4"),
        ("--weight-reg 1e-5 1e-5", "sparsity.weight_reg", [1e-5, 1e-5]),
        ("--mask-only --prior-strength 5", "sparsity.prior_strength", 5.0),
        ("--mask-only --lr-mult 20 --hard", "sparsity.learning_rate_multiplier", 20.0),
        (LLAMA + "--qk-layernorm", "model.family", "qwen3"),
        (LLAMA + "--qk-layernorm", "model.head_dim", 16),
        (LLAMA + "--window-size '(7,0)'", "model.window", 8),
        (LLAMA + "--rotary-percent 0.5", "model.rope_share", 0.5),
        (LLAMA + "--rotary-percent 1.0", "model.rope_share", 1.0),
        (MOE, "model.family", "mixtral"),
        (MOE, "model.experts", 8),
        (MOE, "model.experts_per_token", 2),
        (MOE, "model.aux_loss", 0.0),
        (MOE + "--qk-layernorm", "model.family", "qwen3-moe"),
        (MOE + "--moe-router-topk 3", "model.experts_per_token", 3),
        (MOE + "--moe-ffn-hidden-size 48", "model.expert_ffn", 48),
        (MOE + "--ffn-hidden-size 96", "model.expert_ffn", 96),
        (MOE + "--moe-shared-expert-intermediate-size 24", "model.shared_ffn", 24),
        (MOE + "--moe-layer-freq 2", "model.dense_layers", [1, 3]),
        (MOE + "--moe-layer-freq '([0]*1+[1]*3)'", "model.dense_layers", [0]),
        (MOE + "--moe-layer-freq '[1, 0]*2'", "model.dense_layers", [1, 3]),
        (MOE + "--moe-router-score-function sigmoid", "model.router_score", "sigmoid"),
        (MOE + "--moe-router-pre-softmax", "model.router_normalize", False),
        (MOE + "--moe-router-score-function sigmoid --moe-router-pre-softmax", "model.router_normalize", True),
        (MOE + "--moe-router-topk-scaling-factor 2.5", "model.router_scale", 2.5),
        (MOE + "--moe-router-enable-expert-bias", "model.router_bias_rate", 0.001),
        (MOE + "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1", "model.router_bias_rate", 0.1),
        (MOE + "--moe-router-bias-update-rate 0.1", "model.router_bias_rate", None),
        (MOE + "--moe-aux-loss-coeff 0.01", "model.aux_loss", 0.01),
        (MOE + "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", "model.aux_loss", 0.0),
        (
            MOE + "--moe-aux-loss-coeff 0.01 0.02 --moe-router-load-balancing-type aux_loss seq_aux_loss",
            "model.aux_loss",
            0.03,
        ),
        (MOE + "--moe-z-loss-coeff 0.001", "model.router_z_loss", 0.001),
        (MOE + "--moe-expert-capacity-factor 1.25", "model.capacity", 1.25),
        (MOE + "--expert-model-parallel-size 4", "parallel.expert", 4),
    ],
)
def test_a_flag_becomes_its_key(flags, key, value, place):
    recipe, _ = of_flags(f"--lr 1e-3 {flags}")
    section, _, name = key.partition(".")
    assert recipe.settings()[section].get(name) == value


@pytest.mark.parametrize(
    ("flags", "what", "reason"),
    [
        ("--moe-grouped-gemm", "--moe-grouped-gemm", "affects only speed"),
        ("--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type", "affects only speed"),
        ("--moe-router-dtype fp32", "--moe-router-dtype", "computes in fp32"),
        ("--moe-new-flag 3", "--moe-new-flag", "the converter does not know it"),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps", "no noise"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size", "sharded over parallel.tensor = 1"),
        ("--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size", "equal to parallel.tensor"),
        ("--moe-aux-loss-coeff 1e-2", "the load-balancing loss of each micro-batch", "the load of each sequence"),
        ("--moe-expert-capacity-factor 1", "the capacity of an expert in each micro-batch", "tokens of each sequence"),
        ("--moe-expert-capacity-factor 1 --moe-token-drop-policy probs", "--moe-token-drop-policy", "the last tokens"),
    ],
)
def test_a_flag_of_experts_without_a_key_is_reported(flags, what, reason, place):
    _, reading = of_flags(f"--lr 1e-3 {MOE} {flags}")
    assert reason in left(reading)[what]


def test_what_muon_does_otherwise_than_megatron_is_reported(place):
    flags = MUON.replace("--muon-momentum 0.9", "") + MOE + "--tensor-model-parallel-size 2 --muon-tp-mode blockwise"
    _, reading = of_flags(f"--lr 1e-3 {flags} --muon-no-split-qkv")
    assert "orthogonalized whole" in left(reading)["--muon-tp-mode"]
    assert "separate matrices" in left(reading)["--muon-no-split-qkv"]
    asked = " ".join(reading.questions)
    assert "updates the routers" in asked
    assert "muon_momentum is 0.95" in asked


def test_a_loss_of_sequences_is_carried_without_remark(place):
    flags = f"--lr 1 {MOE} --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss"
    assert [dropped for dropped in of_flags(flags)[1].left if dropped.matters] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 1 8", "other numbers of experts in other layers"),
        ("--multi-latent-attention", "multi-latent attention"),
    ],
)
def test_a_kind_of_model_that_no_family_supports_is_refused_with_the_place(flags, message, place):
    with pytest.raises(UserError) as refused:
        of_flags(f"--lr 1 {flags}")
    assert message in str(refused.value)
    assert "flags.sh:1" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "key", "message"),
    [
        ("--swiglu", "model.family", "the model has --swiglu but not rotary positions and --normalization RMSNorm"),
        ("--position-embedding-type alibi", "model.family", "no family has alibi positions"),
        (LLAMA + "--normalization LayerNorm", "model.family", "but not --normalization RMSNorm"),
        (LLAMA.replace("--disable-bias-linear", ""), "model.family", "the model has biases, llama none"),
        ("--qk-layernorm", "model.family", "gpt has no norms of queries and keys"),
        ("--num-experts 8", "model.family", "gpt has no experts"),
        (MOE.replace("8", "$X"), "model.experts", "--num-experts is $X, which is not known"),
        (MOE + "--moe-router-topk 9", "model.experts_per_token", "9 exceeds model.experts = 8"),
        (MOE + "--moe-layer-freq [1,0]", "model.dense_layers", "not a pattern of 4 layers"),
        (MOE + "--moe-router-load-balancing-type sinkhorn", "model.family", "Sinkhorn"),
        (MOE + "--moe-shared-expert-gate", "model.family", "the shared expert has no gate"),
        (MOE + "--add-qkv-bias", "model.family", "mixtral has no biases"),
        (LLAMA + "--window-size 7,0 --window-attn-skip-freq 2", "model.family", "all layers have the same window"),
        (LLAMA + "--sliding-window 16", "model.family", "set model.window"),
        (LLAMA + "--rotary-seq-len-interpolation-factor 4", "model.family", "position interpolation"),
        ("--embed-layernorm", "model.family", "a norm after the embedding"),
        ("--disable-bias-linear", "model.family", "gpt has biases"),
        ("--group-query-attention --num-query-groups 2", "model.family", "gpt has as many key-value heads"),
        ("--optimizer lion", "optim.name", "optimizer lion is not supported"),
        ("--optimizer muon --muon-scale-mode unit_rms_norm", "optim.muon_scale", "only spectral and shape_scaling"),
        ("--lr fast", "optim.learning_rate", "--lr is 'fast', which is not a number"),
        ("--num-layers " + "9" * 400, "model.layers", "which is not an integer"),
        ("--num-layers $X", "model.layers", "--num-layers is $X, which is not set"),
        ("--num-layers 0", "model.layers", "--num-layers is 0, which is not a valid size"),
        ("--num-attention-heads 5", "model.heads", "5 heads do not divide model.hidden = 64"),
        ("--global-batch-size 10", "train.global_batch", "10 is not a multiple of"),
        ("--pipeline-model-parallel-size 2 --balance 1-4", "parallel.partition", "holds 5 layers"),
        ("--tensor-model-parallel-size 0", "parallel.tensor", "0 is not a valid size"),
        ("--rampup-batch-size 16 16", "train.batch_ramp", "not start, increment and samples"),
        ("--data-path talks.jsonl", "data.train", "talks.jsonl is text: write token files"),
        ("--gumbel-scale-range 1", "sparsity.scale", "not a first and a last value"),
        ("--weight-reg much", "sparsity.weight_reg", "--weight-reg is 'much', which is not a number"),
        ("--mask-only --N 3", "sparsity.pattern", "masks of 3:4 cannot be learned"),
        ("--swiglu --clip-grad -1", "optim.clip", "should be greater than or equal to 0"),
    ],
)
def test_only_the_key_that_cannot_be_set_is_commented_out(flags, key, message, place):
    Path("flags.sh").write_text(f"torchrun --nproc_per_node 8 {SMALL} --lr 1e-3 --init-method-std 0.03 {flags}\n")
    reading = read([Path("flags.sh")])
    assert message in reading.unsound[key]
    assert any(f"{key} is commented out" in question and message in question for question in reading.questions)
    section, _, name = key.partition(".")
    values = tomllib.loads(reading.recipe)
    assert name not in values[section]
    assert values["model"]["init_std"] == 0.03
    assert re.search(rf"^# {name} = .*  # QUESTION: .*{re.escape(message)}", reading.recipe, re.MULTILINE)
    assert reading.written == values
    assert not any(carried == key for carried in reading.carried.values())
