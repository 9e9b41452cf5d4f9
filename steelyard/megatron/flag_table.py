"""Megatron's flags as data: their recipe keys and Megatron's defaults, and why other flags are not needed or not
carried over.

Flags whose meaning depends on other flags are in `RULED`; their code is in `model_flags.py`, `training_flags.py`,
`parallel_flags.py`, `expert_flags.py` and `sparsity_flags.py`. Defaults are those of Megatron-LM (core 0.5 to
0.16) unless noted.
"""

from __future__ import annotations

# flag: (recipe key, type of the value, Megatron's default or None)
CARRIED: dict[str, tuple[str, type, object]] = {
    "--num-layers": ("model.layers", int, None),
    "--hidden-size": ("model.hidden", int, None),
    "--num-attention-heads": ("model.heads", int, None),
    "--init-method-std": ("model.init_std", float, 0.02),
    "--attention-dropout": ("model.attention_dropout", float, 0.1),
    "--hidden-dropout": ("model.dropout", float, 0.1),
    "--data-cache-path": ("data.index_cache", str, None),
    "--seed": ("train.seed", int, 1234),
    "--lr": ("optim.learning_rate", float, None),
    "--min-lr": ("optim.min_learning_rate", float, 0.0),
    "--weight-decay": ("optim.weight_decay", float, 0.01),
    "--clip-grad": ("optim.clip", float, 1.0),
    "--tensor-model-parallel-size": ("parallel.tensor", int, 1),
    "--pipeline-model-parallel-size": ("parallel.pipeline", int, 1),
    "--context-parallel-size": ("parallel.context", int, 1),
    "--distributed-timeout-minutes": ("parallel.timeout_minutes", float, None),
    "--save-interval": ("checkpoint.every", int, 0),
    "--eval-interval": ("eval.every", int, 1000),
    "--log-interval": ("log.every", int, 100),
    "--wandb-project": ("log.wandb", str, None),
}
# Old names of flags, and those of Megatron-DeepSpeed.
ALIASES = {
    "--norm-epsilon": "--layernorm-epsilon",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--num-key-value-heads": "--num-query-groups",
    "--warmup": "--lr-warmup-fraction",
    "--deepspeed-config": "--deepspeed_config",
    "--checkpoint-activations": "--deepspeed-activation-checkpointing",
    "--max-absolute-position-embeddings": "--max-position-embeddings",
    "--use-llama2-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "--no-tie-embed-logits": "--untie-embeddings-and-output-weights",
    "--tokenizer-name-or-path": "--tokenizer-model",
    "--pad-vocab-size-to": "--padded-vocab-size",
    "--sliding-window": "--window-size",
}
# Flags that the rules read, with their number of values (None: any number).
RULED: dict[str, int | None] = {
    "--ffn-hidden-size": 1, "--group-query-attention": 0, "--num-query-groups": 1, "--kv-channels": 1,
    "--normalization": 1, "--swiglu": 0, "--position-embedding-type": 1, "--use-rotary-position-embeddings": 0,
    "--no-position-embedding": 0, "--rotary-base": 1, "--rotary-percent": 1, "--use-rope-scaling": 0,
    "--rope-scaling-factor": 1, "--untie-embeddings-and-output-weights": 0, "--disable-bias-linear": 0,
    "--add-qkv-bias": 0, "--layernorm-epsilon": 1, "--max-position-embeddings": 1, "--seq-length": 1,
    "--vocab-size": 1, "--padded-vocab-size": 1, "--make-vocab-size-divisible-by": 1, "--tokenizer-type": 1,
    "--tokenizer-model": 1, "--vocab-file": 1, "--merge-file": 1, "--patch-tokenizer-type": 1,
    "--extra-vocab-size": 1, "--use-rms-norm": 0, "--glu-activation": 1, "--use-bias": 0, "--window-size": None,
    "--rotary-seq-len-interpolation-factor": 1, "--num-experts": None, "--activations-checkpoint-method": 1,
    "--activations-checkpoint-num-layers": 1,
    "--data-path": None, "--train-data-path": None, "--valid-data-path": None, "--test-data-path": None, "--split": 1,
    "--reset-position-ids": 0, "--reset-attention-mask": 0,
    "--micro-batch-size": 1, "--global-batch-size": 1, "--rampup-batch-size": 3, "--train-iters": 1,
    "--train-samples": 1, "--train-tokens": 1, "--exit-duration-in-mins": 1, "--bf16": 0, "--fp16": 0,
    "--fp8-format": 1, "--fp8-hybrid": 0, "--initial-loss-scale": 1, "--loss-scale-window": 1,
    "--optimizer": 1, "--adam-beta1": 1, "--adam-beta2": 1, "--adam-eps": 1, "--sgd-momentum": 1,
    "--muon-momentum": 1, "--muon-use-nesterov": 0, "--muon-scale-mode": 1, "--muon-extra-scale-factor": 1,
    "--muon-num-ns-steps": 1, "--muon-fp32-matmul-prec": 1, "--muon-tp-mode": 1,
    "--lr-decay-style": 1, "--lr-decay-iters": 1, "--lr-decay-samples": 1, "--lr-decay-tokens": 1,
    "--lr-warmup-fraction": 1, "--lr-warmup-iters": 1, "--lr-warmup-samples": 1, "--lr-warmup-tokens": 1,
    "--lr-wsd-decay-style": 1, "--lr-wsd-decay-iters": 1, "--lr-wsd-decay-samples": 1,
    "--load": 1, "--save": 1, "--finetune": 0, "--pretrained-checkpoint": 1, "--eval-iters": 1,
    "--tensorboard-dir": 1, "--profile": 0, "--profile-step-start": 1, "--profile-step-end": 1,
    "--use-pytorch-profiler": 0, "--profile-ranks": None,
    "--balance": 1, "--sequence-parallel": 0, "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1, "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1, "--use-distributed-optimizer": 0, "--zero-stage": 1,
    "--data-parallel-sharding-strategy": 1, "--use-torch-fsdp2": 0, "--deepspeed_config": 1,
    "--recompute-activations": 0, "--recompute-granularity": 1, "--recompute-method": 1, "--recompute-num-layers": 1,
    "--deepspeed-activation-checkpointing": 0, "--checkpoint-num-layers": 1,
    "--gumbel-temperature-range": 2, "--gumbel-scale-range": 2, "--N": 1, "--M": 1, "--mask-only": 0, "--hard": 0,
    "--weight-reg": 2, "--prior-strength": 1, "--lr-mult": 1,
    "--qk-layernorm": 0, "--moe-router-topk": 1, "--moe-ffn-hidden-size": 1, "--moe-layer-freq": 1,
    "--moe-shared-expert-intermediate-size": 1, "--moe-router-score-function": 1, "--moe-router-pre-softmax": 0,
    "--moe-router-topk-scaling-factor": 1, "--moe-router-enable-expert-bias": 0, "--moe-router-bias-update-rate": 1,
    "--moe-router-load-balancing-type": None, "--moe-aux-loss-coeff": None, "--moe-z-loss-coeff": 1,
    "--moe-expert-capacity-factor": 1, "--moe-token-drop-policy": 1, "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": 1,
}  # fmt: skip
# Flags that concern only experts. `expert_flags.py` reads them if the model has some.
OF_EXPERTS = ("--moe-*", "--expert-*", "--disable-moe-*", "--create-moe-param-group")
EXPERTS_NOT_NEEDED: dict[str, list[str]] = {
    "affects only speed: Steelyard computes all experts of a rank in one product": [
        "--moe-grouped-gemm", "--moe-use-legacy-grouped-gemm", "--moe-token-dispatcher-type", "--moe-permute-fusion",
        "--moe-router-fusion", "--moe-pad-expert-input-to-capacity", "--moe-shared-expert-overlap",
        "--moe-enable-deepep", "--moe-flex-dispatcher-backend", "--moe-deepep-*", "--moe-hybridep-*",
        "--moe-layer-recompute", "--moe-extended-tp", "--moe-router-padding-for-*", "--moe-per-layer-logging",
    ],
    "always on in Steelyard: the router computes in fp32": ["--moe-router-dtype"],
}  # fmt: skip
EXPERTS_NOT_CARRIED: dict[str, str] = {
    "--moe-shared-expert-gate": "this changes the model: the shared expert has no gate",
    "--moe-router-group-topk": "this changes the model: a token may use experts of all groups",
    "--moe-router-num-groups": "a token may use experts of all groups",
    "--moe-router-topk-limited-devices": "this changes the model: a token may use experts of all ranks",
    "--moe-latent-size": "this changes the model: experts have no latent projections",
    "--moe-apply-probs-on-input": "this changes the model: the router's weights apply to the output of experts",
    "--moe-input-jitter-eps": "the router's input has no noise",
    "--moe-router-force-load-balancing": "tokens always go to the experts that the router chooses",
    "--moe-use-upcycling": "experts are not made from the weights of a dense model",
}
# Flags that need no key, by reason; * matches any characters.
NOT_NEEDED: dict[str, list[str]] = {
    "affects only speed: Steelyard chooses kernels and communication overlap itself": [
        "--use-flash-attn*", "--no-*-fusion", "--overlap-*", "--tp-comm-*", "--transformer-impl", "--attention-backend",
        "--use-mcore-models", "--use-legacy-models", "--no-async-tensor-model-parallel-allreduce", "--DDP-impl",
        "--no-contiguous-buffers-in-local-ddp", "--num-workers", "--data-impl", "--dataset-impl", "--nccl-*",
        "--use-cpu-initialization", "--no-scatter-gather-tensors-in-pipeline", "--distributed-backend", "--local-rank",
        "--local_rank", "--use-ring-exchange-p2p", "--ddp-*", "--cuda-graph*", "--enable-cuda-graph", "--manual-gc*",
        "--no-create-attention-mask-in-dataloader", "--empty-unused-memory-level", "--align-*", "--no-align-*",
        "--no-check-for-nan-in-loss-and-grad", "--use-tp-pp-dp-mapping", "--mmap-bin-files", "--no-mmap-bin-files",
        "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--high-priority-stream-groups", "--fused-*",
        "--distribute-saved-activations", "--recompute-modules", "--tensorboard-queue-size", "--no-persist-layer-norm",
        "--batch-p2p-communication", "--barrier-with-L1-time", "--use-fused-*", "--defer-embedding-wgrad-compute",
        "--gradient-accumulation-fusion", "--apply-query-key-layer-scaling", "--no-query-key-layer-scaling",
        "--use-mpi", "--distribute-checkpointed-activations", "--partition-activations",
        "--num-dataset-builder-threads", "--abort-on-unmet-fused-kernel-constraints",
        "--use-contiguous-parameters-in-local-ddp",
    ],
    "fp8 has no delayed or block-wise scaling; train.fp8_scaling is tensor or row": ["--fp8-*"],
    "no effect on a model without experts": [*OF_EXPERTS],
    "the default in Steelyard: softmax and gradient accumulation are fp32": [
        "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
    ],
    "always on in Steelyard: the same command resumes a run, a stop signal saves, and checkpoints are verified": [
        "--exit-signal-handler*", "--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng",
        "--auto-detect-ckpt-format", "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler",
        "--override-opt-param-scheduler", "--override-lr-scheduler", "--exit-on-missing-checkpoint", "--ckpt-format",
        "--dist-ckpt-format",
        "--use-dist-ckpt", "--ckpt-fully-parallel-*", "--no-ckpt-fully-parallel-save", "--async-save",
        "--ckpt-assume-constant-structure", "--dist-ckpt-strictness", "--enable-partial-load",
    ],
    "metrics, timers and the report of a run are always written": [
        "--log-*", "--no-log-*", "--timing-log-level", "--timing-log-option", "--tensorboard-log-interval",
        "--wandb-save-dir", "--one-logger-*", "--enable-one-logger", "--no-one-logger",
    ],
    "selects DeepSpeed; Steelyard uses PyTorch, and other flags hold the settings": [
        "--deepspeed", "--no-pipeline-parallel", "--deepscale", "--deepscale_config", "--deepspeed_mpi",
    ],
}  # fmt: skip
# Flags that a recipe cannot express.
NOT_CARRIED: dict[str, str] = {
    "--loss-scale": "the loss scale is always dynamic; train.loss_scale is its initial value",
    "--grad-reduce-in-bf16": "gradients are reduced in fp32",
    "--fp32-residual-connection": "the precision of the residual is not configurable",
    "--use-checkpoint-args": "the sizes of the model are in the recipe, not in a checkpoint",
    "--dataloader-type": "samples are in the order of Megatron's single loader",
    "--exp-name": "a run has the name of its recipe",
    "--wandb-exp-name": "a run has the name of its recipe",
    "--wandb-name": "a run has the name of its recipe",
    "--standalone-embedding-stage": "write parallel.partition with a first stage of 0 layers",
    "--hysteresis": "the loss scale decreases at the first non-finite step",
    "--min-loss-scale": "the loss scale has no minimum",
    "--eod-mask-loss": "end-of-document tokens count in the loss",
    "--lr-warmup-init": "the warm-up starts at zero",
    "--weight-decay-incr-style": "weight decay is constant",
    "--start-weight-decay": "weight decay is constant",
    "--end-weight-decay": "weight decay is constant",
    "--decoupled-lr": "there is one learning rate",
    "--decoupled-min-lr": "there is one learning rate",
    "--muon-no-split-qkv": "query, key and value are separate matrices",
    "--muon-coefficient-type": "the coefficients are those of the quintic polynomial",
    "--muon-scalar-optimizer": "AdamW updates what is not a matrix of a layer",
    "--exit-interval": "use train.steps; optim.decay_steps keeps the length of the schedule",
    "--mock-data": "use real token files in data.train",
    "--data-args-path": "list the files in data.train",
    "--per-split-data-args-path": "list the files in data.train, data.valid and data.test",
    "--wandb-entity": "set WANDB_ENTITY",
    "--pipeline-model-parallel-layout": "set the layers per stage in parallel.partition",
    "--pipeline-model-parallel-split-rank": "encoder-decoder models are not supported",
    "--window-attn-skip-freq": "this changes the model: all layers have the same window",
    "--apply-layernorm-1p": "this changes the model: its norm weights are stored as differences from 1",
    "--layernorm-zero-centered-gamma": "this changes the model: its norm weights are stored as differences from 1",
    "--apply-residual-connection-post-layernorm": "this changes the model: residuals add to the input before the norm",
    "--rotary-interleaved": "this changes the model: interleaved RoPE is not supported",
    "--embed-layernorm": "this changes the model: a norm after the embedding is not supported",
    "--parallel-attn": "this changes the model: parallel attention and MLP are not supported",
    "--init-method-xavier-uniform": "weights are initialized from a normal distribution with model.init_std",
    "--cpu-offloading-num-layers": "activations stay on the GPU",
    "--optimizer-cpu-offload": "optim.offload = true keeps optimizer state in host memory",
    "--sparse-pattern": "the pattern is that of --N and --M: sparsity.pattern",
    "--freeze-weight": "weights are always frozen in mask learning",
    "--freeze-mask": 'a fixed mask is a separate method: sparsity.method = "fixed"',
}
# Flags of models that neither family supports.
REFUSED: dict[str, str] = {
    "--multi-latent-attention": "multi-latent attention",
    "--squared-relu": "a squared ReLU",
    "--hybrid-override-pattern": "a hybrid of Mamba and attention",
    "--mtp-num-layers": "multi-token prediction",
}
# Variable names that configuration files without a launch command use for flags.
VARIABLES: dict[str, str] = {
    "NUM_LAYERS": "--num-layers", "HIDDEN_SIZE": "--hidden-size", "NUM_ATTENTION_HEADS": "--num-attention-heads",
    "NUM_HEADS": "--num-attention-heads", "FFN_HIDDEN_SIZE": "--ffn-hidden-size", "SEQ_LENGTH": "--seq-length",
    "MAX_POSITION_EMBEDDINGS": "--max-position-embeddings", "GLOBAL_BATCH_SIZE": "--global-batch-size",
    "MICRO_BATCH_SIZE": "--micro-batch-size", "TENSOR_MP_SIZE": "--tensor-model-parallel-size",
    "PIPELINE_MP_SIZE": "--pipeline-model-parallel-size", "TP_SIZE": "--tensor-model-parallel-size",
    "PP_SIZE": "--pipeline-model-parallel-size", "PARTITION": "--balance", "TRAIN_ITERS": "--train-iters",
    "LR": "--lr", "MIN_LR": "--min-lr", "DATA_PATH": "--data-path", "VOCAB_FILE": "--vocab-file",
    "MERGE_FILE": "--merge-file", "TOKENIZER_MODEL": "--tokenizer-model", "SEED": "--seed",
}  # fmt: skip
# The model sizes of MODEL in FASOP's configuration files.
SHAPES: dict[str, dict[str, str]] = {
    "xl": {"--num-layers": "48", "--hidden-size": "1600", "--num-attention-heads": "16"},
    "gpt2": {"--num-layers": "48", "--hidden-size": "1600", "--num-attention-heads": "16"},
    "small": {"--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16"},
}
# Vocabulary sizes by tokenizer name, for a tokenizer that is not on this machine: all ids, and those without the added
# special tokens, to which Pai-Megatron-Patch adds --extra-vocab-size. The first pattern that fits counts.
VOCABULARIES: dict[str, tuple[int, int]] = {
    r"llama-?3(?!\d*b)|r1-distill-llama": (128256, 128000),
    r"qwen-?3": (151669, 151643),
    r"qwen-?2\.5": (151665, 151643),
    r"qwen-?(1\.5|2)": (151646, 151643),
    r"qwen": (151851, 151851),
    r"code-?llama": (32016, 32016),
    r"mistral-nemo": (131072, 131072),
    r"mistral-7b-v0\.3|mixtral-8x22b-v0\.3": (32768, 32768),
    r"llama-?2(?!\d*b)|tinyllama|huggyllama|open-?llama|llama-?\d+b|llamatokenizer|mistral|mixtral": (32000, 32000),
    r"gpt-neox|pythia": (50277, 50254),
    r"bloom": (250680, 250680),
    r"falcon": (65024, 65024),
    r"gemma": (256000, 256000),
    r"(^|/)yi(-|tokenizer)": (64000, 64000),
    r"baichuan-?2": (125696, 125696),
    r"baichuan": (64000, 64000),
    r"(^|/)(flan-)?t5-": (32100, 32100),
    r"(^|/)opt(-|tokenizer)": (50265, 50265),
    r"gpt-?2": (50257, 50257),
}
