"""The reader of launch scripts against bash itself, and against what it must never do."""

import shutil
import subprocess
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.megatron import read
from steelyard.megatron.shell import symbolic
from steelyard.megatron.shell.interpreter import follow

SNIPPETS = [
    "show.py plain 'single $X' \"double $0 \\$X\" a\\ b '' \"\"",
    'A=( one "two three" ); A+=( four ); show.py "${A[@]}" ${A[@]} ${#A[@]} "${A[1]}" ${A[*]}',
    'X=" --a 1 \\\n  --b 2 "; show.py $X "$X" pre${X}post',
    'show.py ${NO:-default} "${NO:-with blank}" ${NO:+set} "${1:-none}" $2 $# "$@" ${@:2}',
    'P=/a/b.tar.gz; show.py ${P%.gz} ${P%%.*} ${P#/} ${P##*/} ${P/a/x} ${P//a/x} ${#P} ${P:3} ${P:1:2} ${P^^} ${P,,}',
    "N=8; M=4; show.py $((N * M)) $(($N/3)) $((-7 / 2)) $((7 % 3)) $((2 ** 10)) $((N > M ? N : M))",
    "N=8; show.py $((N++)) $N $((N += 2)) $((1 << 4 | 3)) $((!N)) $((9223372036854775807 + 1)) $((0x10))",
    "if [ 3 -gt 2 ] && [ -z '' ]; then show.py yes; else show.py no; fi",
    "if [[ abc == a* && ! abc == x* ]]; then show.py match; elif true; then show.py late; fi",
    "X=b; case $X in a) show.py A ;; b|c) show.py B ;; *) show.py other ;; esac",
    "for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; show.py turn $i; done",
    "for ((i = 0; i < 3; i++)); do show.py count $i; done",
    "i=0; while [ $i -lt 3 ]; do i=$((i + 1)); if [ $i -eq 3 ]; then break; fi; show.py $i; done",
    'while [[ $# -gt 0 ]]; do case $1 in one) show.py got $1; shift ;; *) show.py other "$1"; shift ;; esac; done',
    "f() { local X=inner; show.py $X $1 \"$@\"; }\nX=outer\nf a 'b c'\nf d",
    "show.py before # a comment ' with a quote\nshow.py after",
    "R=$(cat << END\nshow.py from \\\n   document $1\nEND\n)\n$R more",
    "cat <<'END' > /dev/null\n$(not run) ' \"\nEND\nshow.py $(echo hello there)",
    "show.py $(basename /a/b.txt .txt) $(dirname /a/b/c) \"$(basename a/)\"",
    "true && show.py and; false || show.py or; false && show.py never; ! false && show.py negated",
    "{ show.py grouped; }; (X=1; show.py inside $X); show.py \"out ${X:-side}\"",
    "set -- x y z; shift; show.py $1 $2 $#",
    "X=$'tab\\tend'; show.py \"$X\" ~user \\$HOME",
    "A=(); A[2]=c; A[0]=a; show.py \"${A[0]}\" \"${A[2]}\"",
    "for A in K=v=w L=; do N=$(echo $A | cut -f1 -d=); export \"$N\"=\"${A:${#N}+1}\"; done; show.py $K \"$L\" $N",
    "show.py $(echo a:b:c | cut -d : -f 2) $(echo plain | cut -d: -f3) \"$(echo a:b | cut -d: -f9)\"",
    "T=true; if $T; then show.py flag; fi; X=1 show.py only; show.py \"${X-unset}\"",
    "show.py a>/dev/null b 2>&1 | cat; show.py two | cat",
    "eval \"show.py evaluated $1\"; bash -c 'echo' x; unset NO; show.py ${1%e}",
    "show.py $(expr 2 \\* 3) `echo back` \"nested $(echo \"$(echo deep)\")\"",
]  # fmt: skip


def fields(script: Path, *arguments: str) -> list[list[str]]:
    """The words that each show.py would get."""
    return [command.words[1:] for command in follow([script], arguments, {}).commands if command.words[0] == "show.py"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the judge")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_become_what_bash_makes_of_them(snippet, tmp_path):
    script, judge = tmp_path / "script.sh", tmp_path / "judge.sh"
    script.write_text(snippet + "\n")
    judge.write_text("show.py() { printf '%s\\0' \"$@\" END >&9; }\n" + snippet.replace("bash -c 'echo' x;", "") + "\n")
    (tmp_path / "out").touch()
    command = ["bash", "-c", 'exec 9>out; . ./judge.sh "$@"', str(script), "one", "two words"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=150, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "out").read_text().split("END\0")[:-1]
    judged = [call.split("\0")[:-1] for call in calls]
    read_ = [[symbolic.shown(word) for word in words] for words in fields(script, "one", "two words")]
    assert judged
    assert read_ == judged


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(
        "A=$(touch X1)\nB=`touch X2`\ntouch X3\necho hi > X4\neval 'touch X5'\nbash -c 'touch X6'\n"
        "cat <<END > X7\n$(touch X8)\nEND\nif touch X9; then :; fi\ndiff <(touch X10) X11\n"
        'python -c \'open("X12", "w")\'\nrm run.sh\nf() { touch X13; }\nf\n(touch X14) &\n$(touch X15)\n'
        "torchrun --nproc_per_node $(touch X16; echo 8) pretrain_gpt.py --num-layers 2 --hidden-size 8 "
        "--num-attention-heads 2 --seq-length 8 --lr 1 --data-path $(touch X17)\n"
    )
    read([script])
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_what_only_a_running_script_knows_is_kept_as_written(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("N=$(nvidia-smi -L | wc -l)\nW=$((N * 2))\nshow.py --a $N --b x$W/y --c $MISSING --d $3\n")
    [words] = fields(script)
    assert [symbolic.shown(word) for word in words[1::2]] == [
        "$(nvidia-smi -L | wc -l)",
        "x$((N * 2))/y",
        "$MISSING",
        "$3",
    ]
    assert all(symbolic.is_unknown(word) for word in words[1::2])


def test_a_branch_that_cannot_be_decided_is_left_out_and_noted(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("if [ $1 -eq 0 ]; then\n  show.py zero\nelse\n  show.py other\nfi\n")
    state = follow([script], [], {})
    assert [command.words for command in state.commands] == [["show.py", "other"]]
    assert "run.sh:1: this condition depends on $1 (pass it after --)" in state.notes[0]
    assert fields(script, "0") == [["zero"]]


CHECKS = """
if [ ! -f train.py ]; then
  echo "run this from the root"
  exit 1
fi
[ -d /data ] || exit 2
[[ -e stop ]] && exit 3
if nvidia-smi; then GPU=yes; else exit 4; fi
if [ -r env.sh ]; then . ./env.sh; else exit 5; fi
case $(uname -m) in
  x86_64) ARCH=x86 ;;
  *) ARCH=other ;;
esac
[ -n "$ARCH" ] || exit 6
show.py $GPU $ARCH
"""


@pytest.mark.parametrize("here", [[], ["train.py", "stop", "env.sh"]])
def test_checks_of_another_machine_are_passed_on_the_path_that_trains_whatever_is_on_this_disk(here, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(CHECKS)
    for name in here:
        (tmp_path / name).touch()
    state = follow([script], [], {}, lambda state: bool(state.commands) and state.commands[-1].words[0] == "show.py")
    assert state.commands[-1].words == ["show.py", "yes", "x86"]
    notes = "\n".join(state.notes)
    assert "run.sh:2: this condition depends on whether train.py exists, which is not known; it was skipped" in notes
    assert "run.sh:6: this test depends on whether /data exists, which is not known; it was followed" in notes
    assert (
        "run.sh:8: this condition depends on the exit status of a program, which is not known; it was followed" in notes
    )
    assert "run.sh:10: this case depends on $(uname -m), which is not known; it was followed" in notes
    assert not state.exited


def test_without_a_path_that_trains_the_first_that_does_not_exit_is_kept(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("if docker ps; then C=docker; else exit 1; fi\n$C run image ./inside.sh\n")
    state = follow([script], [], {}, lambda state: False)
    assert not state.exited
    assert state.missing == ["./inside.sh"]


def test_many_unknown_conditions_end_the_search(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("if [ -f x ]; then A=1; fi\n" * 40 + "exit 1\n")
    assert follow([script], [], {}, lambda state: False).exited


def test_a_file_that_the_script_writes_is_known(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('N=3\nOUT=conf.$JOB.json\ncat <<END > $OUT\n{"a": $N}\nEND\ncat > two <<END\nx\nEND\n')
    assert follow([script], [], {}).files == {"conf.$JOB.json": '{"a": 3}\n', "two": "x\n"}


def test_slurm_variables_follow_from_the_directives_unless_they_are_set(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes 3   # three\n#SBATCH --ntasks-per-node=2\n#SBATCH --gres=gpu:h100:8\n"
        "show.py $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_NTASKS $SLURM_GPUS_PER_NODE\n"
        "bash -c 'show.py $SLURM_NNODES'\n"
    )
    assert fields(script) == [["3", "3", "6", "8"], ["3"]]
    state = follow([script], [], {"SLURM_NNODES": "5"})
    assert state.commands[0].words[1] == "5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("P=<Your path>/tok\nshow.py $P end", ["<Your", "path>/tok", "end"]),
        ("show.py --a <PATH TO a.json> --b $X/<NAME>-logs", ["--a", "<PATH TO a.json>", "--b", "$X/<NAME>-logs"]),
        ("show.py a <in.txt >out b", ["a", "b"]),
        ("show.py a <in 2>err b", ["a", "b"]),
    ],
)
def test_placeholders_are_words_and_redirections_are_not(text, words, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(text + "\n")
    assert [[symbolic.shown(word) for word in found] for found in fields(script)] == [words]


def test_sourced_and_started_scripts_are_followed_and_missing_ones_noted(tmp_path):
    (tmp_path / "conf.sh").write_text("LAYERS=4\nexport SEEN=yes\n")
    (tmp_path / "inner.sh").write_text('show.py "$1" "${SEEN:-no}" "${LAYERS:-none}"\n')
    script = tmp_path / "run.sh"
    script.write_text(
        '. conf.sh\nsource "$(dirname "$0")/conf.sh"\nshow.py $LAYERS\nmpirun -np 4 bash inner.sh arg\n'
        ". gone.sh\n./also_gone.sh 1 2\n"
    )
    state = follow([script], [], {})
    assert [command.words for command in state.commands] == [["show.py", "4"], ["show.py", "arg", "yes", "none"]]
    assert state.commands[1].launchers == [["mpirun", "-np", "4"]]
    missing, started = state.notes
    assert missing.endswith("run.sh:5: gone.sh is sourced here but was not found; its settings are missing")
    assert "run.sh:6: ./also_gone.sh is started here with the arguments 1 2 but was not found" in started


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A='never closed\n", "this ' is never closed"),
        ("echo ok\nif true; then\n", "run.sh:2: this if has no"),
        ("A=( --x 1\n", "this array is never closed"),
        ("echo $(date\n", "this ( is never closed"),
        ("fi\n", "is unexpected"),
        ("def main():\n    print((1))\n", "unexpected ("),
        ("f() { f; }\nf\n", "in a cycle"),
        (". run.sh\n", "in a cycle"),
        ("x=aa\nwhile true; do x=$x$x; done\n", "grows without bound"),
        ("for i in 1 2; do " * 30 + "echo; " + "done; " * 30, "runs more than 50000 statements"),
        ("x=" + "$((" + "(" * 5000 + ")" * 5000 + "))\n", ""),
        ("\0\1\2", "not a text file"),
    ],
)
def test_garbage_is_refused_in_one_message(text, message, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(UserError) as refused:
        read([script])
    assert message in str(refused.value)
    assert "run.sh" in str(refused.value)
