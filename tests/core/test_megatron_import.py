"""Launch scripts in the shapes people have them, and the recipes they mean."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.core.errors import UserError
from steelyard.megatron import ImportResult, read, result
from steelyard.megatron.flag_table import ALIASES, CARRIED, NOT_CARRIED, NOT_NEEDED, RULED
from tests.core.megatron_reading import SMALL, left, meant, of_flags

MASKS = r"""
. ./blend.sh  # the data
resume=$1
NNODES=1
NPROC_PER_NODE=8
export WORLD_SIZE=$(($NNODES * $NPROC_PER_NODE))
HERE=$(pwd)
OUT="$HERE/output/masks"
if [ $resume -eq 0 ]; then
    LOAD="$HERE/pruned"
    EXTRA="--no-load-optim --no-load-rng --finetune --enable-partial-load "
else
    LOAD="$OUT/ckpt"
    EXTRA=""
fi
TASK=" --gumbel-scale-range 1e2 5e2 --gumbel-temperature-range 4 0.05 --N 2 --M 4 --mask-only --weight-reg 1e-5 "
OPTIONS=" \
--untie-embeddings-and-output-weights --disable-bias-linear --no-position-embedding --use-rotary-position-embeddings \
--swiglu --normalization RMSNorm --ffn-hidden-size 11008 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
--seq-length 4096 --max-position-embeddings 4096 --make-vocab-size-divisible-by 1 \
--adam-eps 1e-5 --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0.0 --hidden-dropout 0.0 \
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 256 \
--train-iters 2000 --lr 5e-5 --min-lr 5e-6 --lr-decay-style cosine --lr-warmup-iters 0 --weight-decay 0.1 \
--data-path "$BLEND" --data-cache-path CACHE --split 98,2,0 \
--tokenizer-type Llama2Tokenizer --tokenizer-model $HERE/llama2/tokenizer.model \
--save-interval 500 --save $OUT/ckpt --load $LOAD --log-interval 10 --eval-iters 10 --eval-interval 100 \
--clip-grad 1.0 --init-method-std 0.014 --exit-signal-handler --use-flash-attn --bf16 --no-rope-fusion \
${EXTRA} ${TASK}"
torchrun --nproc_per_node=$NPROC_PER_NODE --nnodes=$NNODES --master_port=45522 pretrain_masks.py ${OPTIONS}
"""
SEVENTY = r"""#!/bin/bash
LOAD=$1; SAVE=$2; TOKENIZER=$3
DATA=$4/llama3_arxiv_text_document
GPT_MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8   # eight (not one)
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 100 --optimizer sgd --bf16
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --finetune
)
TRAINING_ARGS+=( --recompute-granularity full --recompute-method block --recompute-num-layers 4 )
MODEL_PARALLEL_ARGS=( --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel )
nsys profile -s none -t nvtx,cuda --capture-range=cudaProfilerApi \
    python pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} "${MODEL_PARALLEL_ARGS[@]}" \
    --data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model ${TOKENIZER} --split 99,1,0 \
    --save $SAVE --load $LOAD --log-interval 1 --save-interval 1000 --tensorboard-dir ./tensorboard \
    --profile --profile-step-start 10 --profile-step-end 12
"""
CLUSTER = r"""
python tools/checkpoint/convert.py --bf16 --model-type GPT --loader llama_mistral --saver core \
    --target-tensor-parallel-size 8 --target-pipeline-parallel-size 2 --checkpoint-type hf \
    --load-dir models/Llama-3.1-70B --save-dir ./mega --tokenizer-model models/Llama-3.1-70B --model-size llama3
python tools/preprocess_data.py --input ./arxiv.jsonl --output-prefix ./datasets/llama3_arxiv --workers 64 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model models/Llama-3.1-70B --append-eod
/opt/openmpi/bin/mpirun -x MASTER_ADDR=10.0.0.1 --host 10.0.0.1:120,10.0.0.2:120 --map-by ppr:8:node \
    --mca plm_rsh_args '-o StrictHostKeyChecking=no -p 53412' \
    ./seventy.sh ./mega ./saved models/Llama-3.1-70B ./datasets
"""
CONF = r"""
HOMOGENEOUS_CLUSTER=true # true | false
MODEL='xl' # 'small' or 'xl'
NPROC_PER_NODE=4
NNODES=8
WORLD_SIZE=$((NPROC_PER_NODE * NNODES))
GLOBAL_BATCH_SIZE=64
MICRO_BATCH_SIZE=1
TENSOR_MP_SIZE=1
DP_SIZE=4
PIPELINE_MP_SIZE=8
PARTITION="0-11-8-8-8-8-5-0"
NSYS=false
PROFILE=true
if [ $MODEL == "xl" ]; then
        HIDDEN_SIZE=1600
        NUM_LAYERS=48
elif [ $MODEL == "small" ]; then
        HIDDEN_SIZE=1024
        NUM_LAYERS=24
else
        return 1
fi
if $PROFILE; then
        PROFILE_ARGS="--timing-log-level 2 \
                      --timing-log-option all"
fi
"""
INTER = r"""
NODE_RANK=$1
. _00_conf.sh
WHERE="--nproc_per_node $NPROC_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK"
MODEL_ARGS="--num-layers $NUM_LAYERS --hidden-size $HIDDEN_SIZE --num-attention-heads 16 --seq-length 1024 \
        --max-position-embeddings 1024 --micro-batch-size $MICRO_BATCH_SIZE --global-batch-size $GLOBAL_BATCH_SIZE \
        --lr 0.00015 --train-iters 50 --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction .01 \
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --fp16 --balance $PARTITION"
RUN=$(cat << END
python -m torch.distributed.launch $WHERE pretrain_gpt.py $MODEL_ARGS \
        --log-interval 10 --save-interval 100 --eval-interval 100 --eval-iters 10 $PROFILE_ARGS \
        --data-path my-gpt2_text_document --tensor-model-parallel-size $TENSOR_MP_SIZE \
        --pipeline-model-parallel-size $PIPELINE_MP_SIZE --DDP-impl local --split 100,0,0
END
)
function run_torch() {
        OMP_NUM_THREADS=4 $RUN
}
if $NSYS; then
        nsys profile $RUN
else
        run_torch
fi
"""
DEEPSPEED = r"""
set -e
tokenizer=""
out=""
save_interval=1000
while [[ ${#} -gt 0 ]]; do
    case ${1} in
        --input_tokenizer_file) tokenizer=${2}; shift ;;
        --output_model_dir) out=${2}; shift ;;
        --save_interval) save_interval=${2}; shift ;;
        *) echo "Unknown parameter passed: ${1}"; exit 1 ;;
    esac
    shift
done
if [[ -z ${tokenizer} ]] || [[ -z ${out} ]]; then
    echo "Usage: give a tokenizer and a folder"
    exit 1
fi
out="${out%/}"
seq_len=2048
train_tokens=$((300 * 1000 * 1000 * 1000))
train_samples=$(( 300 * 1000 * 1000 * 1000 * 2 / ${seq_len} ))
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
python tools/preprocess_data.py --tokenizer-type SentencePieceTokenizer --tokenizer-model ${tokenizer} \
    --input arxiv.jsonl --output-prefix arxiv --dataset-impl mmap --workers $(nproc) --append-eod
options=" --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length ${seq_len} \
    --max-position-embeddings ${seq_len} --train-tokens ${train_tokens} --train-samples ${train_samples} \
    --lr-decay-tokens ${train_tokens} --lr-warmup-tokens $((3000 * 1000 * 1000)) --micro-batch-size 1 \
    --global-batch-size 256 --lr 6.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 --hysteresis 2 \
    --exit-duration-in-mins 30000000 --save-interval ${save_interval} --fp16 --seed 1234 --load ${out}/c_${gpus} \
    --save ${out}/c_${gpus} --tokenizer-type SentencePieceTokenizer --tokenizer-model ${tokenizer} \
    --data-path arxiv_text_document --data-impl mmap --weight-decay 0.1 --override-opt_param-scheduler"
deepspeed pretrain_gpt.py ${options} --deepspeed --deepspeed_config ds.json --zero-stage 2 \
    --pipeline-model-parallel-size 1 2>&1 | tee ${out}/log
"""
FRAGMENT = r"""
GPUS_PER_NODE=2

--num-layers 12 \
--hidden-size 512 \
--num-attention-heads 8 \
--seq-length 1024 \
--tensor-model-parallel-size 1 \
--pipeline-model-parallel-size 1 \
"""
GPT3 = r"""
GPUS_PER_NODE=8
NUM_NODES=16
DISTRIBUTED_ARGS=( --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_port 6000 )
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
    --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 \
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 \
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 \
    --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --use-distributed-optimizer \
    --data-path $5 --vocab-file $3 --merge-file $4 --split 949,50,1 --log-interval 100 --save $1 --load $1 \
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --tensorboard-dir $2
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the scripts, each under its name."""
    monkeypatch.chdir(tmp_path)
    scripts = {
        "masks.sh": MASKS, "blend.sh": 'BLEND="0.7 data/a 0.3 data/b"\n', "seventy.sh": SEVENTY, "cluster.sh": CLUSTER,
        "_00_conf.sh": CONF, "_01_run_inter.sh": INTER, "deepspeed.sh": DEEPSPEED, "fragment.sh": FRAGMENT,
        "gpt3.sh": GPT3,
    }  # fmt: skip
    for name, text in scripts.items():
        Path(name).write_text(text)
    return tmp_path


def test_arrays_and_an_mpirun_around_the_script(place):
    recipe, reading = meant("cluster.sh")
    model = recipe.model
    assert (model.family, model.layers, model.kv_heads, model.ffn, model.rope_theta) == ("llama", 80, 8, 28672, 5e5)
    assert (model.rope_scaling.factor, model.vocab, model.vocab_multiple, model.tied) == (8.0, 128256, 1024, False)
    assert recipe.data.train[0].prefix == "./datasets/llama3_arxiv_text_document"
    parallel = recipe.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data, parallel.zero) == (8, 2, 1, 0)
    assert (str(parallel.partition), parallel.recompute, parallel.sequence_parallel) == ("40-40", 4, True)
    assert (recipe.train.init_from, recipe.log.profile, recipe.log.tensorboard) == ("./mega", [11, 12], True)
    assert reading.commands == [
        "steelyard checkpoint convert models/Llama-3.1-70B ./mega --to megatron --tensor 8 --pipeline 2 --dtype bf16",
        "steelyard data tokenize --input ./arxiv.jsonl --tokenizer models/Llama-3.1-70B "
        "--output-prefix ./datasets/llama3_arxiv --append-eod --workers 64",
    ]
    assert all(f"#     {command}" in reading.recipe for command in reading.commands)


def test_which_sgd_is_meant_is_asked_until_it_is_said(place):
    recipe, reading = meant("cluster.sh")
    assert recipe.optim.name == "sgd"
    assert any("which SGD is meant?" in question and "sgd-sai" in question for question in reading.questions)
    recipe, reading = meant("cluster.sh", sgd="sgd-sai")
    assert recipe.optim.name == "sgd-sai"
    assert not any("SGD" in question for question in reading.questions)


def test_a_configuration_file_alone_and_with_the_script_that_sources_it(place):
    alone, reading = meant("_00_conf.sh")
    assert (alone.model.layers, alone.model.hidden, alone.model.heads) == (48, 1600, 16)
    assert str(alone.parallel.partition) == "0-11-8-8-8-8-5-0"
    assert (alone.parallel.data, alone.train.global_batch, alone.train.micro_batch) == (4, 64, 1)
    assert any("starts no training" in question for question in reading.questions)
    assert {"HOMOGENEOUS_CLUSTER", "NSYS", "PROFILE"} <= set(left(reading))
    assert "MODEL=xl is assumed to be FASOP's" in reading.notes[0]
    whole, reading = meant("_01_run_inter.sh", arguments=("0",))
    assert whole.parallel == alone.parallel
    assert (whole.train.steps, whole.train.precision, whole.train.loss_scale) == (50, "fp16", 2**32)
    optim = whole.optim
    assert (optim.learning_rate, optim.decay_steps, optim.warmup_steps) == (1.5e-4, 320000, 3200)
    assert (whole.model.vocab, whole.model.dropout, whole.data.split) == (50257, 0.1, "100,0,0")
    assert reading.questions == []
    assert "--node_rank" in left(reading)


def test_a_script_gets_its_arguments_and_says_when_they_are_missing(place):
    words = ("--input_tokenizer_file", "b.model", "--output_model_dir", "out/", "--save_interval", "500")
    recipe, reading = meant("deepspeed.sh", arguments=words)
    assert (recipe.train.tokens, recipe.optim.decay_tokens, recipe.optim.warmup_tokens) == (
        3 * 10**11,
        3 * 10**11,
        3 * 10**9,
    )
    assert (recipe.parallel.zero, recipe.parallel.data, recipe.checkpoint.every) == (2, None, 500)
    assert recipe.train.max_hours == 500000
    assert any("how many ranks" in question for question in reading.questions)
    assert any("PLACEHOLDER" in line for line in reading.recipe.splitlines())
    assert "train.tokens is reached first" in left(reading)["--train-samples"]
    assert reading.commands == [
        "steelyard data tokenize --input arxiv.jsonl --tokenizer b.model --output-prefix arxiv --append-eod"
    ]
    assert "only when the script runs" in left(reading)["--workers"]
    with pytest.raises(UserError, match="after printing: Usage: give a tokenizer"):
        read([Path("deepspeed.sh")])
    with pytest.raises(UserError, match="Unknown parameter passed: --bogus"):
        read([Path("deepspeed.sh")], ["--bogus", "1"])


def test_a_deepspeed_file_that_is_here_is_read(place):
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5, "wandb": {}}
    Path("ds.json").write_text(json.dumps(config))
    recipe, reading = of_flags("--lr 1 --deepspeed --deepspeed_config ds.json")
    assert (recipe.parallel.zero, recipe.train.precision, recipe.optim.clip) == (3, "bf16", 0.5)
    assert "wandb in ds.json" in left(reading)


def test_a_condition_on_an_argument_chooses_where_the_weights_come_from(place):
    fresh, reading = meant("masks.sh", arguments=("0",))
    assert fresh.train.init_from == "./pruned"
    assert [(source.prefix, source.weight) for source in fresh.data.train] == [("data/a", 0.7), ("data/b", 0.3)]
    assert (fresh.model.vocab, fresh.model.vocab_multiple, fresh.parallel.data) == (32000, 8, 1)
    sparsity = fresh.sparsity
    assert (sparsity.method, sparsity.pattern, sparsity.temperature) == ("learned", "2:4", [4.0, 0.05])
    assert (sparsity.scale, sparsity.weight_reg) == ([100.0, 500.0], [1e-5, 0.0])
    assert (sparsity.prior_strength, sparsity.learning_rate_multiplier) == (3.0, 10.0)
    assert any("steelyard mask export ./pruned prior.mask" in question for question in reading.questions)
    assert not {"--gumbel-scale-range", "--N", "--M", "--mask-only", "--weight-reg"} & set(left(reading))
    resumed, reading = meant("masks.sh", arguments=("1",))
    assert resumed.train.init_from is None
    assert any("set sparsity.base" in question for question in reading.questions)
    assert "the same command resumes" in left(reading)["--load"]


def test_lines_of_flags_alone_mean_what_they_say_and_ask_for_the_rest(place):
    recipe, reading = meant("fragment.sh")
    assert (recipe.model.family, recipe.model.hidden, recipe.parallel.data) == ("gpt", 512, 2)
    asked = " ".join(reading.questions)
    assert all(word in asked for word in ("--lr", "data.train", "train.steps", "--micro-batch-size", "nodes"))


def test_variables_in_one_file_and_flags_in_another_are_read_together(place):
    Path("paths.sh").write_text('VOCAB_FILE="gpt2-vocab.json"\nMERGE_FILE=gpt2-merges.txt\nDATA_PATH=my-gpt2\n')
    recipe, _ = meant("paths.sh", "fragment.sh")
    assert recipe.data.tokenizer == "gpt2-vocab.json,gpt2-merges.txt"
    assert recipe.data.train[0].prefix == "my-gpt2"
    with pytest.raises(UserError, match="--num-layers is not given"):
        read([Path("paths.sh")])


def test_flags_in_arrays_that_are_not_here_are_named(place):
    Path("profile.sh").write_text("nsys profile python pretrain_gpt.py ${MODEL_ARGS[@]} --profile\n")
    with pytest.raises(UserError, match=r"\$\{MODEL_ARGS\[@\]\} is not set"):
        read([Path("profile.sh")])


def test_a_wrapper_that_is_not_here_is_passed_over(place):
    Path("wrapped.sh").write_text("bash in_container.sh ./masks.sh 0\n")
    assert meant("wrapped.sh")[0].train.init_from == "./pruned"


def test_megatrons_own_example_keeps_its_ramp_and_its_horizon(place):
    recipe, reading = meant("gpt3.sh", arguments=("ckpt", "logs", "vocab.json", "merges.txt", "data/text_document"))
    assert recipe.train.batch_ramp.model_dump() == {"start": 16, "increment": 16, "samples": 5859375}
    assert (recipe.optim.warmup_steps, recipe.optim.decay_steps, recipe.parallel.zero) == (430, 430000, 1)
    assert recipe.data.tokenizer == "vocab.json,merges.txt"
    assert str(recipe.parallel.partition) == "-".join(["6"] * 16)
    assert reading.questions == []
    _, reading = meant("gpt3.sh")
    assert left(reading)["--data-path"] == "$5 is not set, pass it after --: set data.train"


def test_what_megatron_assumes_is_written_out(place):
    recipe, reading = of_flags("--lr 1e-3 --train-iters 10")
    assert (recipe.model.dropout, recipe.model.attention_dropout, recipe.model.init_std) == (0.1, 0.1, 0.02)
    assert (recipe.optim.betas, recipe.optim.weight_decay, recipe.optim.schedule) == ([0.9, 0.999], 0.01, "linear")
    assert (recipe.train.seed, recipe.train.precision, recipe.train.global_batch) == (1234, "fp32", 16)
    assert (recipe.data.split, recipe.log.every, recipe.eval.every, recipe.eval.batches) == ("969,30,1", 100, 1000, 100)
    assert (recipe.checkpoint.every, recipe.parallel.zero, recipe.model.tied) == (0, 0, True)
    for key in ("dropout", "betas", "weight_decay", "schedule", "seed", "split", "batches"):
        assert re.search(rf"^{key} = .*# Megatron's default$", reading.recipe, re.MULTILINE), key


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("torchrun --nproc_per_node 4 --nnodes=2", 8),
        ("python -m torch.distributed.run --nproc-per-node=2", 2),
        ("mpirun -np 6 python", 6),
        ("mpirun -H a:4,b:4 python", 8),
        ("srun -n 12 python", 12),
        ("srun --nodes 2 --ntasks-per-node 4 python -u", 8),
        ("deepspeed --num_gpus 4 --num_nodes 2", 8),
        ("srun torchrun --nproc_per_node 4 --nnodes 3", 12),
        ("python", None),
    ],
)
def test_the_number_of_ranks_comes_from_the_launcher(launch, ranks, place):
    Path("launch.sh").write_text(f"{launch} {SMALL} --lr 1\n")
    recipe, reading = meant("launch.sh")
    assert recipe.parallel.data == ranks
    assert any("how many ranks" in question for question in reading.questions) == (ranks is None)


def test_sbatch_lines_count_for_srun(place):
    Path("job.sh").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python {SMALL} --lr 1\n"
    )
    assert meant("job.sh")[0].parallel.data == 8


def test_a_tokenizer_that_is_here_is_counted(place):
    recipe, _ = of_flags("--lr 1 --tokenizer-model here.model", count={"here.model": 777}.get)
    assert recipe.model.vocab == 777


@pytest.mark.parametrize("text", ["echo nothing here\n", "", "hello, world\n", "python train.py --epochs 3\n"])
def test_a_script_without_megatron_is_refused(text, place):
    Path("other.sh").write_text(text)
    with pytest.raises(UserError, match="no Megatron command"):
        read([Path("other.sh")])


def accounted(reading: ImportResult) -> set[str]:
    return set(reading.carried) | {entry.flag for entry in reading.left}


@pytest.mark.parametrize(
    ("script", "arguments", "also"),
    [
        ("masks.sh", ("0",), set()),
        ("cluster.sh", (), {"seventy.sh"}),
        ("_01_run_inter.sh", ("0",), set()),
        ("deepspeed.sh", ("--input_tokenizer_file", "b", "--output_model_dir", "o"), set()),
        ("fragment.sh", (), set()),
        ("gpt3.sh", ("a", "b", "c", "d", "e"), set()),
    ],
)
def test_every_flag_of_a_script_is_accounted_for(script, arguments, also, place):
    _, reading = meant(script, arguments=arguments)
    text = "".join(Path(name).read_text() for name in {script, *also})
    own = {"--input_tokenizer_file", "--output_model_dir", "--save_interval", "--query-gpu", "--format"}
    assert set(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text)) - own <= accounted(reading)
    assert all(entry.reason for entry in reading.left)
    assert set(result(reading)) >= {"recipe", "commands", "not_carried", "questions"}


EVERY_FLAG = sorted({*ALIASES, *CARRIED, *RULED, *NOT_CARRIED, "--not-a-flag", "--made-up"} | {
    name.replace("*", "x") for names in NOT_NEEDED.values() for name in names
})  # fmt: skip
VALUES = ["", "0", "1", "2", "-1", "0.5", "nan", "inf", "a/b", "1 a", "$X", "$(nproc)"]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(EVERY_FLAG), st.sampled_from(VALUES))))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flags_are_accounted_for_or_refused(tmp_path, flags):
    script = tmp_path / "any.sh"
    script.write_text(f"torchrun {SMALL} {' '.join(f'{flag} {value}' for flag, value in flags)}\n")
    try:
        reading = read([script])
    except UserError:
        return
    assert {flag for flag, _ in flags} <= accounted(reading)
    for key in reading.carried.values():
        section, _, name = key.partition(".")
        assert name in reading.written[section], key
    assert "\ue000" not in json.dumps(result(reading), ensure_ascii=False)


def test_several_scripts_share_their_variables(place):
    Path("sizes.sh").write_text("LAYERS=3\n")
    Path("go.sh").write_text(SMALL.replace("--num-layers 4", "--num-layers $LAYERS").join(["python ", " --lr 1\n"]))
    assert meant("sizes.sh", "go.sh")[0].model.layers == 3
    assert "--num-layers is $LAYERS, which is not set" in read([Path("go.sh")]).unsound["model.layers"]


def test_a_second_training_command_is_named(place):
    Path("two.sh").write_text(f"python {SMALL} --lr 1\npython {SMALL} --lr 2\n")
    assert any("two.sh:2: another training command" in note for note in meant("two.sh")[1].notes)
