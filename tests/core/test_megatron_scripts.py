"""Constructs and flags of public launch scripts, in scripts of our own: what each must become."""

from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.megatron import ImportResult, read

GPT = "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --seq-length 64 --micro-batch-size 3 --lr 2e-4 "
LLAMA = GPT + "--swiglu --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear "
GUARDED = """#!/bin/bash
TRAIN=tools/pretrain_gpt.py
DATA_ARGS=( "--data-path '0.25 red 0.75 blue'" "--split '97,2,1'" "--vocab-file 'v.json'" "--merge-file m.txt" )
if [ ! -f "$TRAIN" ]; then
    echo "$TRAIN is not here"
    exit 1
fi
if [ -f done/latest.txt ]; then LOAD="--load done"; else LOAD="--load start"; fi
torchrun --nproc_per_node 3 $TRAIN FLAGS ${DATA_ARGS[@]} $LOAD --save done --global-batch-size 36 --train-iters 7
"""
SLURM = r"""#!/bin/bash
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1    # one launcher per node
#SBATCH --gres=gpu:4
source $WORK/start
MASTER_ADDR=`scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1`
DS=./ds.$SLURM_JOBID.json
MICRO=2
cat <<EOT > $DS
{ "train_micro_batch_size_per_gpu": $MICRO, "zero_optimization": {"stage": 1}, "steps_per_print": 9,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 300, "initial_scale_power": 11} }
EOT
SAMPLES=6_000_000
ARGS=" \
    --rampup-batch-size 36 36 90_000 \
    --train-samples $SAMPLES --lr-decay-samples $((SAMPLES / 2)) \

    --pp-partition-method 'type:transformer|embedding' \
    --deepspeed --deepspeed_config ${DS} --checkpoint-activations --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 4 --nnodes $SLURM_NNODES"
export CMD=" `pwd`/pretrain_gpt.py FLAGS $ARGS --global-batch-size 108 --fp16 --tensor-model-parallel-size 2"
clear; srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee log.$SLURM_JOBID
"""
KEY_VALUE = """
for PAIR in "$@"
do
   NAME=$(echo $PAIR | cut -f1 -d=)
   export "$NAME"="${PAIR:${#NAME}+1}"
done
SIZE="${SIZE:-big}"
if [[ $SIZE == small ]]; then LAYERS=2; else LAYERS=20; fi
ITERS=${ITERS:-50}
RUN="
   torchrun --nproc_per_node `python3 -c 'import torch; print(torch.cuda.device_count())'` pretrain_gpt.py \\
     FLAGS --num-layers $LAYERS --train-iters $ITERS --eval-iters 10 \\
     --eval-iters -1
"
if [ "${QUIET:-0}" -eq 1 ]; then RUN="$RUN >& all.log"; else RUN="$RUN |& tee all.log"; fi
eval $RUN
echo 'import sys
print("done")' > after.py
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def converted(script: str, flags: str = GPT, arguments: tuple[str, ...] = (), **options) -> tuple[dict, ImportResult]:
    Path("run.sh").write_text(script.replace("FLAGS", flags))
    reading = read([Path("run.sh")], arguments, **options)
    assert reading.written is not None
    return {f"{section}.{key}": value for section, keys in reading.written.items() if isinstance(keys, dict)
            for key, value in keys.items()}, reading  # fmt: skip


def of(flags: str, base: str = GPT, launcher: str = "torchrun --nproc_per_node 4") -> tuple[dict, ImportResult]:
    return converted(f"{launcher} pretrain_gpt.py {base} {flags}\n")


@pytest.mark.parametrize("here", [False, True])
def test_a_check_of_the_training_file_does_not_end_the_script(here, place):
    if here:
        Path("tools").mkdir()
        Path("tools/pretrain_gpt.py").touch()
        Path("done").mkdir()
        Path("done/latest.txt").touch()
    recipe, reading = converted(GUARDED)
    assert (recipe["train.steps"], recipe["parallel.data"], recipe["train.init_from"]) == (7, 3, "start")
    assert reading.unsound == {}
    assert "whether tools/pretrain_gpt.py exists, which is not known; it was skipped" in "\n".join(reading.notes)


def test_quotes_inside_values_are_removed(place):
    recipe, _ = converted(GUARDED)
    assert recipe["data.split"] == "97,2,1"
    assert recipe["data.train"] == [{"prefix": "red", "weight": 0.25}, {"prefix": "blue", "weight": 0.75}]
    assert recipe["data.tokenizer"] == "v.json,m.txt"


def test_a_script_that_exits_says_why_and_is_not_read_as_a_configuration_file(place):
    script = "NUM_LAYERS=4\nHIDDEN_SIZE=8\nif [ -z $WHERE ]; then echo Set WHERE; exit 1; fi\npython pretrain_gpt.py\n"
    with pytest.raises(UserError, match="the script exits here, after printing: Set WHERE"):
        converted(script)


def test_slurm_directives_and_a_deepspeed_config_in_the_script_count(place):
    recipe, reading = converted(SLURM)
    assert (recipe["parallel.data"], recipe["parallel.tensor"], recipe["parallel.zero"]) == (12, 2, 1)
    assert (recipe["train.loss_scale"], recipe["train.loss_scale_window"]) == (2048.0, 300)
    assert recipe["train.batch_ramp"] == {"start": 36, "increment": 36, "samples": 90000}
    assert (recipe["train.samples"], recipe["optim.decay_samples"]) == (6_000_000, 3_000_000)
    assert recipe["parallel.recompute"] == "full"
    assert reading.unsound == {}


def test_sbatch_options_and_directives_are_added_up(place):
    Path("inner.sh").write_text(
        f'#!/bin/bash\n#SBATCH -t 0:30:00 --ntasks-per-node=5\nsrun -l sh -c "python pretrain_gpt.py {GPT}"\n'
    )
    recipe, _ = converted("N=3\nsbatch -p gpu --nodes=${N} inner.sh\nexit 0\n")
    assert recipe["parallel.data"] == 15


def test_arguments_of_the_form_key_value_are_read(place):
    recipe, reading = converted(KEY_VALUE, arguments=("SIZE=small", "ITERS=9"))
    assert (recipe["model.layers"], recipe["train.steps"], recipe["eval.every"]) == (2, 9, 0)
    assert any("how many ranks" in question for question in reading.questions)
    assert converted(KEY_VALUE)[0]["model.layers"] == 20


def test_a_placeholder_is_asked_for_and_never_a_path(place):
    template = "DATA=<Specify path and file prefix>_text\nOUT=${OUT:-<Your folder>}\n"
    recipe, reading = converted(
        f"{template}python pretrain_gpt.py {GPT} --data-path $DATA --save $OUT --tokenizer-model <TOK>\n"
    )
    assert "data.train" not in recipe
    assert "data.tokenizer" not in recipe
    reasons = {left.flag: left.reason for left in reading.left}
    assert reasons["--data-path"] == "<Specify path and file prefix> is not set: set data.train"
    assert reasons["--tokenizer-model"] == "<TOK> is not set: set data.tokenizer"


def test_a_world_size_that_does_not_divide_is_asked_for(place):
    recipe, reading = of("--tensor-model-parallel-size 3 --global-batch-size 12")
    assert "parallel.data" not in recipe
    assert reading.unsound == {}
    assert any(
        "starts 4 ranks, which is not a multiple of tensor x pipeline x context = 3" in q for q in reading.questions
    )


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--num-experts 1 --moe-loss-coeff 0.01", "model.family", "gpt"),
        ("--position-embedding-type absolute --max-absolute-position-embeddings 80", "model.positions", 80),
        ("--activations-checkpoint-method uniform", "parallel.recompute", "full"),
        ("--train-samples 1_000_000", "train.samples", 1_000_000),
        ("--lr-decay-samples 100 --lr-decay-tokens 9000 --train-tokens 18000", "optim.decay_tokens", 9000),
        ("--pad-vocab-size-to 1280 --vocab-size 1200", "model.vocab_multiple", 1280),
        ("--fp16 --deepspeed", "train.loss_scale", 65536.0),
        ("--data-cache-path $PWD/cache", "data.index_cache", "./cache"),
        ("--tokenizer-name-or-path t5-small", "model.vocab", 32100),
        ("--tokenizer-model meta-llama/Llama-3.2-1B", "model.vocab", 128256),
        ("--tokenizer-model open_llama_3b/tokenizer.model", "model.vocab", 32000),
        ("--tokenizer-model Qwen/Qwen2.5-7B", "model.vocab", 151665),
        ("--tokenizer-model mistralai/Mistral-7B-v0.3", "model.vocab", 32768),
        ("--tokenizer-model EleutherAI/gpt-neox-20b", "model.vocab", 50277),
        ("--extra-vocab-size 256 --patch-tokenizer-type LLama3Tokenizer", "model.vocab", 128256),
        ("--extra-vocab-size 421 --patch-tokenizer-type Qwen2Tokenizer", "model.vocab", 152064),
        ("--extra-vocab-size 7 --patch-tokenizer-type LLamaTokenizer", "model.vocab", 32007),
        ("--extra-vocab-size 7 --patch-tokenizer-type Qwen2Tokenizer", "model.vocab_multiple", 1),
        ("--extra-vocab-size 16 --load /ckpts/Llama-2-7b-hf", "model.vocab", 32016),
    ],
)
def test_a_flag_of_a_fork_becomes_its_key(flags, key, value, place):
    recipe, reading = of(flags)
    assert recipe[key] == value
    assert reading.unsound == {}


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA + "--sliding-window 64 --rotary-seq-len-interpolation-factor 1",
        GPT + "--use-llama2-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear",
        GPT.replace("-", "_").replace("__", "--").replace("2e_4", "2e-4")
        + "--use_rms_norm --glu_activation swiglu --position_embedding_type rotary --no_tie_embed_logits",
    ],
)
def test_llama_has_several_spellings(flags, place):
    recipe, reading = of("", flags)
    assert (recipe["model.family"], recipe["model.layers"], recipe["train.micro_batch"]) == ("llama", 6, 3)
    assert reading.unsound == {}
    assert [left for left in reading.left if left.matters] == []


def test_an_unknown_tokenizer_with_extra_ids_is_asked_for(place):
    recipe, reading = of("--extra-vocab-size 5 --patch-tokenizer-type OurTokenizer")
    assert recipe["model.vocab"] == 50257
    assert any("placeholder; --extra-vocab-size 5 is to be added" in question for question in reading.questions)


def test_the_stage_of_a_deepspeed_config_that_is_not_here_is_asked_for(place):
    _, reading = of("--deepspeed --deepspeed_config made_by_sed.json")
    assert any("which ZeRO stage" in question for question in reading.questions)


def test_the_same_flag_twice_matters_only_if_the_values_differ(place):
    _, reading = of("--clip-grad 1.0 --clip-grad 1.0 --min-lr 0 --min-lr 1e-6")
    assert [left.flag for left in reading.left if left.matters] == ["--min-lr"]
