import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.cli import COMMANDS, DEFAULTS, TASKS, main
from tests.conftest import kill


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["recipe", "list"],
        ["recipe", "show", "quickstart"],
        ["recipe", "from-megatron", "--help"],
        ["hub", "pull", "--help"],
    ],
)
def test_small_questions_import_no_torch(workplace, words):
    code = (
        "import sys\nfrom steelyard.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_process_runs_a_command_after_it_has_run_list(tmp_path):
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["list", str(tmp_path)])
        assert ended.value.code == 0


@pytest.mark.slow
def test_the_command_and_the_module_are_the_same(workplace):
    script = subprocess.run(
        [Path(sys.executable).with_name("steelyard"), "--help"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert script.returncode == 0
    assert workplace.steelyard("--help").stdout == script.stdout


def test_the_help_lists_every_command_once_under_its_task(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    _, *sections = re.split(r"^(\w[\w ]*):$", shown[shown.index("\nData:") :], flags=re.MULTILINE)
    listed = {
        task: re.findall(r"^  ([a-z-]+)  ", body.partition("Exit codes")[0], flags=re.MULTILINE)
        for task, body in zip(sections[::2], sections[1::2], strict=True)
    }
    assert listed == {task: list(commands) for task, commands in TASKS.items()}
    assert list(listed) == ["Data", "Train", "Compress", "Evaluate and publish", "Cluster", "Inspect"]
    assert sum(map(len, listed.values())) == len(COMMANDS)


@pytest.mark.parametrize("group", DEFAULTS)
def test_the_help_of_a_group_shows_the_options_of_the_command_that_need_not_be_named(group, capsys):
    default, commands = DEFAULTS[group]

    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    shown, wanted = help_of(group), help_of(group, default).partition("\n")[2]
    assert len(wanted) > 300
    assert wanted in shown
    assert all(f"\n  {command} " in shown for command in commands)


def mistake(done: subprocess.CompletedProcess) -> str:
    """The one clear message of a user's mistake."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "tiny.toml"], "did you mean train?"),
        (["train"], "missing argument"),
        (
            ["checkpoint", "info", "a", "b"],
            "error: got unexpected extra argument(s) (b)\n  Usage: steelyard checkpoint",
        ),
        (["train", "tiny.toml", "trian.steps=5"], "did you mean train.steps?"),
        (["recipe", "check", "missing.toml"], "no such file"),
        (["recipe", "check", "broken.toml"], "broken.toml:1: this is not TOML"),
        (["recipe", "check", "."], "is a folder"),
        (["train", "tiny.toml", "data.train=nowhere"], "there is no token file nowhere.idx"),
        (["train", "gpt2-small"], "data.train"),
        (["train", "tiny.toml", "--world", "8"], "belong to a dry run"),
        (["train", "llama3.1-70b", "--dry-run", "--world", "24"], "a multiple of 16 ranks, not on 24"),
        (["train", "tiny.toml", "--dry-run", "--gpu", "h10"], "unknown GPU h10"),
        (["recipe", "from-megatron", "nowhere.sh"], "nowhere.sh: there is no such file"),
        (["recipe", "from-megatron", "tiny.toml"], "tiny.toml"),
        (["recipe", "from-megatron", "--", "a"], "give at least one script"),
        (["submit"], "give a recipe, or a command after --"),
        (["submit", "tiny.toml", "--on", "mpi", "--nodes", "2", "parallel.data=2"], "only 0 are given for mpirun"),
        (["submit", "tiny.toml", "--site", "nowhere"], "there is no site nowhere"),
        (["submit", "--", "trian", "x"], "there is no command trian"),
        (["cancel", "nowhere"], "nowhere is not a run"),
        (["list", "nowhere"], "there is no folder nowhere"),
        (["report", "."], "not a run folder"),
        (["report", "tiny.toml"], "is a file, not a run folder"),
        (["data", "convert", "tiny.jsonl", "folder.txt"], "Is a directory: folder.txt"),
        (["tokenizer", "info", "missing.model"], "there is no file or folder missing.model"),
        (["report", "nowhere"], "there is no run folder"),
        (["prune", ".", "out", "--method", "magnitude"], "is not a checkpoint of a supported format"),
        (["submit", "--", "prune", ".", "out", "--method", "wanda"], "wanda needs calibration"),
        (["submit", "--", "prune", ".", "out"], "missing option '--method'"),
        (["submit", "--", "eval", "ppl", "runs/my"], "missing option '--data'"),
        (["submit", "--", "eval", "perplexity", "runs/my"], "no such command 'perplexity'"),
        (["submit", "--ranks-per-node", "2", "--", "generate", "my", "--prompt", "a"], "generate runs in one process"),
        (["submit", "--nodes", "2", "--", "train", "my.toml", "--nproc", "4"], "remove --nproc"),
        (["prune", ".", "out", "--method", "sparse-gpt"], "did you mean sparsegpt?"),
        (["mask", "info", "tiny.toml"], "not a valid safetensors file"),
        (["hub", "push", "nowhere", "me/model"], "there is no folder nowhere"),
        (["hub", "push", ".", "a/b/c"], "a/b/c is not a valid name on the hub"),
        (["hub", "push", ".", "me/model", "--test-prompt", " "], "the test prompt is empty"),
        (["hub", "push", ".", "me/model", "--dry-run"], "not a checkpoint of a supported format"),
        (["hub", "pull", "https://hub/x", "model"], "is not a valid model name on the hub"),
        (["hub", "pull", "me/model", "tiny.toml"], "tiny.toml is a file"),
        (["hub", "login", "--token-file", "empty.txt"], "this is not a token"),
        (["hub", "login", "--token-file", "missing.txt"], "there is no file missing.txt"),
        (["hub", "login", "hf_pasted"], "a token on the command line can be read by everyone"),
        (["generate", ".", "--prompt", "x"], "is not a checkpoint of a supported format"),
        (
            ["tokenizer", "train", "--input", "empty.txt", "--model-prefix", "t", "--vocab-size", "300"],
            "corpus is empty",
        ),
        (["tokenizer", "train", "--input", "nowhere.txt", "--model-prefix", "t", "--vocab-size", "300"], "no file"),
        (["tokenizer", "extend", "no.model", "--text", "tiny.jsonl", "--add", "9", "--out", "o"], "no file or folder"),
        (["checkpoint", "extend", ".", "o", "--tokenizer", "t"], "not a checkpoint of a supported format"),
        (["data", "tokenize", "--input", "empty.txt", "--tokenizer", ".", "--output-prefix", "p"], "no tokenizer"),
    ],
)
def test_a_mistake_exits_with_two_and_one_message(workplace, words, message):
    (workplace.path / "broken.toml").write_text("[train")
    (workplace.path / "empty.txt").touch()
    (workplace.path / "folder.txt").mkdir()
    (workplace.path / "tiny.jsonl").write_text('{"text": "a"}\n')
    assert message in mistake(workplace.steelyard(*words))


LAUNCH = """
python tools/preprocess_data.py --input text.jsonl --output-prefix made --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model tok --json-keys text title --append-eod --workers 1
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
    --max-position-embeddings 16 --micro-batch-size 2 --train-iters 3 --lr 1e-3 --tokenizer-model tok \\
    --data-path $1 --quiet-flag --save ckpt --no-masked-softmax-fusion
"""


def test_a_launch_script_becomes_a_recipe_that_trains_and_commands_that_run(workplace):
    (workplace.path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} of some text", "title": f"title {n}"}) + "\n" for n in range(200))
    )
    train = ["--input", "text.jsonl", "--model-prefix", "tok", "--vocab-size", "300", "--type", "byte-bpe"]
    assert workplace.steelyard("tokenizer", "train", *train).returncode == 0
    (workplace.path / "launch.sh").write_text(LAUNCH)
    words = ["recipe", "from-megatron", "launch.sh"]
    done = workplace.steelyard(*words, "--json", "--", "made_text_document", "--quiet")
    result = json.loads(done.stdout)
    assert {entry["flag"] for entry in result["not_carried"] if entry["matters"]} == {"--quiet-flag", "--save"}
    assert result["recipe"]["model"]["vocab"] == 300
    assert "not carried over (2):" in done.stderr
    [command] = result["commands"]
    made = workplace.steelyard(*shlex.split(command)[1:])
    assert made.returncode == 0, made.stderr
    written = workplace.steelyard(*words, "--out", "new.toml", "--", "made_text_document")
    assert (written.returncode, written.stdout) == (0, "")
    assert (workplace.path / "new.toml").read_text() == result["toml"]
    assert workplace.steelyard(*words, "--", "made_text_document").stdout == result["toml"]
    overrides = ["train.device=cpu", "eval.batches=1", "model.dropout=0.0", "model.attention_dropout=0.0"]
    trained = workplace.steelyard("train", "new.toml", *overrides)
    assert trained.returncode == 0, trained.stderr


def test_a_launch_script_with_one_unsupported_flag_still_becomes_a_recipe_and_exits_with_two(workplace):
    (workplace.path / "launch.sh").write_text(LAUNCH.replace("--lr 1e-3", "--lr 1e-3 --optimizer lion"))
    done = workplace.steelyard("recipe", "from-megatron", "launch.sh", "--out", "new.toml", "--", "made_text_document")
    assert done.returncode == 2
    assert "question: optim.name is commented out: optimizer lion is not supported" in done.stderr
    assert "error: launch.sh:4: the recipe is not complete: optim.name commented out" in done.stderr
    written = (workplace.path / "new.toml").read_text()
    assert '# name = "lion"  # QUESTION: optimizer lion is not supported' in written
    assert "learning_rate = 0.001" in written
    assert workplace.steelyard("recipe", "check", "new.toml").returncode == 0


def test_quiet_still_says_that_something_is_missing(workplace):
    (workplace.path / "launch.sh").write_text(LAUNCH)
    done = workplace.steelyard("recipe", "from-megatron", "launch.sh", "--quiet")
    assert re.fullmatch(
        r"warning: \d+ questions?, 3 flags not carried over; run without --quiet to list them\n", done.stderr
    )


def test_an_empty_corpus_leaves_no_token_files(workplace):
    (workplace.path / "some.txt").write_text("some text\n" * 50)
    (workplace.path / "empty.txt").touch()
    train = ["tokenizer", "train", "--input", "some.txt", "--model-prefix", "tok", "--vocab-size", "300"]
    train += ["--type", "byte-bpe"]
    assert workplace.steelyard(*train).returncode == 0
    tokenize = ["data", "tokenize", "--input", "empty.txt", "--tokenizer", "tok", "--output-prefix", "p"]
    assert "corpus is empty" in mistake(workplace.steelyard(*tokenize))
    assert not list(workplace.path.glob("p_*"))


def test_text_becomes_tokens_without_a_gpu_library_and_from_several_files_after_one_flag(workplace):
    for name in ("a.txt", "b.txt"):
        (workplace.path / name).write_text(f"some text of {name}\n" * 20)
    (workplace.path / "fakes").mkdir()
    (workplace.path / "fakes" / "torch.py").write_text("raise ImportError('torch must not be imported')")
    environment = os.environ | {"PYTHONPATH": str(workplace.path / "fakes")}
    words = ["--input", "?.txt", "--model-prefix", "tok", "--vocab-size", "300", "--type", "byte-bpe"]
    trained = workplace.steelyard("tokenizer", "train", *words, env=environment)
    assert trained.returncode == 0, trained.stderr
    words = ["--input", "a.txt", "b.txt", "--tokenizer", "tok", "--output-prefix", "p", "--json"]
    done = workplace.steelyard("data", "tokenize", *words, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == 40


def test_debug_shows_the_traceback_anywhere_on_the_line(workplace):
    for words in (["--debug", "report", "nowhere"], ["report", "nowhere", "--debug"]):
        assert "Traceback" in workplace.steelyard(*words).stderr


def test_quiet_and_json_leave_one_object_on_standard_output(workplace):
    done = workplace.steelyard("train", "tiny.toml", "--json", "--quiet")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["steps"] == 20
    assert result["valid_loss_after"] < result["valid_loss_before"]
    assert done.stderr == ""


def test_a_dry_run_needs_no_data_and_exits_with_one_where_it_would_not_fit(workplace):
    words = ["train", "llama3.1-70b", "--dry-run", "--json"]
    fits = workplace.steelyard(*words, "--world", "64", "--gpu", "h100-80", "parallel.zero=1")
    assert fits.returncode == 0, fits.stderr
    assert json.loads(fits.stdout)["fits"] is True
    too_big = workplace.steelyard(*words, "--gpu", "h100-80")
    assert too_big.returncode == 1
    assert json.loads(too_big.stdout)["fits"] is False
    assert "stage 0 needs" in too_big.stderr
    assert "would need" in too_big.stderr
    assert not (workplace.path / "runs").exists()


def test_a_log_has_plain_lines_with_rate_and_time_left(workplace):
    process = workplace.start("train", "tiny.toml", "train.steps=100000", "checkpoint.every=0", "eval.every=0")
    log = workplace.path / "runs" / "tiny" / "logs"
    deadline = time.monotonic() + 300
    text = ""
    while time.monotonic() < deadline and "left" not in text:
        time.sleep(0.1)
        text = "".join(path.read_text() for path in log.glob("*.out")) if log.exists() else ""
    kill(process)
    assert "tokens/s" in text
    assert "left" in text
    assert "\x1b" not in text


@pytest.mark.slow
def test_ctrl_c_before_training_begins_is_quiet_and_exits_with_130(workplace):
    words = ["tokenizer", "train", "--input", "big.txt", "--model-prefix", "t", "--vocab-size", "9000"]
    # On a busy machine Python itself may still be starting when the signal comes, or the command may have ended.
    for seconds, lines in ((1.5, 100_000), (1.5, 400_000), (6, 400_000), (24, 1_600_000)):
        (workplace.path / "big.txt").write_text("".join(f"line {n} of the text\n" for n in range(lines)))
        process = workplace.start(*words)
        time.sleep(seconds)
        process.send_signal(2)
        _, messages = process.communicate(timeout=600)
        if process.returncode == 130:
            break
        shutil.rmtree(workplace.path / "t", ignore_errors=True)
    assert process.returncode == 130
    assert messages.strip() == "error: interrupted"
    assert not (workplace.path / "t").exists()


def test_a_full_disk_while_training_is_a_fault_that_loses_nothing_saved(workplace, small_disk):
    recipe = ["train", "tiny.toml", "model.hidden=64", "train.steps=30", "checkpoint.every=2", "checkpoint.keep_last=9"]
    failed = workplace.steelyard(*recipe, "--run", "disk/run")
    assert failed.returncode == 1
    assert "No space left on device" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "is saved" in failed.stderr
    assert workplace.steelyard("report", "disk/run", "-o", "page.html").returncode == 0
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    resumed = workplace.steelyard(*recipe, "--run", "disk/run")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step" in resumed.stderr


def test_a_disk_full_from_the_start_is_one_message(workplace, small_disk):
    (small_disk / "filler").write_bytes(b"x" * (2 * 2**20 - 4096))
    failed = workplace.steelyard("train", "tiny.toml", "--run", "disk/run")
    assert failed.returncode == 1
    assert "No space left on device" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_example_for_four_ranks_can_run_on_four(workplace):
    example = Path(__file__).parents[2] / "examples" / "four-ranks.toml"
    done = workplace.steelyard("train", str(example), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"] == 4


def test_a_check_of_a_recipe_says_which_files_it_did_not_look_at(in_workplace, capsys):
    from steelyard.cli.recipe import check

    check("tiny.toml", ["train.init_from=nowhere"])
    assert "not checked: the files of data.train, train.init_from" in capsys.readouterr().out


def test_a_text_that_is_cut_to_lines_is_told_of(tmp_path, capsys):
    from steelyard import cli
    from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe

    lines = [f"line {number} of some prose" for number in range(50)]
    train_byte_bpe(lines, 300).save(tmp_path / "tok")
    (tmp_path / "prose.txt").write_text("\n".join(lines))
    for document, is_told in (("line", True), ("file", False)):
        words = ["--input", tmp_path / "prose.txt", "--tokenizer", tmp_path / "tok", "--document", document]
        with contextlib.suppress(SystemExit):
            cli.main(["data", "tokenize", *map(str, words), "--output-prefix", str(tmp_path / document)])
        assert ("every line became a document" in capsys.readouterr().err) == is_told
