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
    "if ! [ -d /nowhere ]; then show.py absent; fi; [ -d / ] && show.py present",
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
