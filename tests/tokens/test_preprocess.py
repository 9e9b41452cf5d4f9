import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.indexed_dataset import IndexedTokens
from steelyard.tokens.inspect import verify
from steelyard.tokens.preprocess import tokenize
from steelyard.tokens.tokenize_job import TokenizeJob
from tests import preloaded
from tests.conftest import kill


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """2,000 documents, some of them empty, and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    random = np.random.RandomState(0)
    with open("corpus.jsonl", "w", encoding="utf-8") as file:
        for number in range(2000):
            words = " ".join(f"word{w}" for w in random.randint(0, 50, size=random.randint(0, 40)))
            file.write(json.dumps({"text": words, "title": f"第{number}章"}, ensure_ascii=False) + "\n")
    tokenizers.train_byte_bpe(["word1 word2 第3章 word45"] * 50, 300).save(Path("tok"))
    return tmp_path


def job(**options) -> TokenizeJob:
    return TokenizeJob(
        **({"inputs": ("corpus.jsonl",), "tokenizer": "tok", "prefix": "out", "piece_bytes": 20_000} | options)
    )


def output(prefix: str = "out_text_document") -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_every_document_is_there_in_order_and_empty_ones_keep_their_entry(corpus):
    result = tokenize(job(append_eod=True))
    tokenizer = tokenizers.load_tokenizer("tok")
    texts = [json.loads(line)["text"] for line in Path("corpus.jsonl").read_text().splitlines()]
    expected = [[*tokenizer.encode(text), tokenizer.end_of_document] if text else [] for text in texts]
    assert any(not ids for ids in expected)
    assert [ids.tolist() for ids in IndexedTokens("out_text_document").documents()] == expected
    assert result["documents"] == 2000
    assert verify("out_text_document", 300)["tokens"] == result["tokens"]["text"]
    assert not Path("out.tokenize").exists()


def test_the_result_does_not_depend_on_workers_pieces_or_packing(corpus):
    tokenize(job())
    expected = output()
    data = Path("corpus.jsonl").read_bytes()
    Path("packed.jsonl.gz").write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))
    for number, options in enumerate([{"piece_bytes": 1 << 20}, {"inputs": ("packed.jsonl.gz",)}]):
        tokenize(job(prefix=f"again{number}", **options), worker_count=2)
        assert output(f"again{number}_text_document") == expected


def test_a_compressed_table_is_read_to_its_last_row_group(corpus):
    tokenize(job())
    lines = Path("corpus.jsonl").read_text().splitlines()
    table = pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})
    parquet.write_table(table, "table.parquet", row_group_size=300)
    Path("table.parquet.gz").write_bytes(gzip.compress(Path("table.parquet").read_bytes()))
    tokenize(job(prefix="table", inputs=("table.parquet.gz",)))
    assert output("table_text_document") == output()


def test_each_key_has_its_own_pair(corpus):
    tokenize(job(keys=("text", "title")))
    tokenizer = tokenizers.load_tokenizer("tok")
    titles = IndexedTokens("out_title_document")
    assert tokenizer.decode(next(titles.documents())) == "第0章"
    assert len(IndexedTokens("out_text_document").document_index) == len(titles.document_index) == 2001


KILLED = """
from steelyard.tokens.preprocess import TokenizeJob, tokenize
if __name__ == "__main__":
    tokenize({job}, worker_count=2)
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_gives_the_same_bytes(corpus):
    tokenize(job(prefix="undisturbed"))
    Path("killed.py").write_text(KILLED.format(job=job()))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    random = np.random.RandomState(1)
    kept = alive = 0
    for _ in range(6):  # By the count of finished pieces, so at another moment each time.
        process = preloaded.Popen([sys.executable, "killed.py"], env=environment, start_new_session=True)
        deadline, aim = time.monotonic() + 300, kept + random.randint(1, 6)
        while time.monotonic() < deadline and process.poll() is None:
            kept = len(list(Path("out.tokenize").glob("0*.json")))
            if kept >= aim:
                break
            time.sleep(0.002)
        alive += process.poll() is None
        kill(process)
        deadline = time.monotonic() + 300
        while _children(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _children(process.pid), "workers outlived their parent"
    assert alive >= 2, "the jobs ended before they were killed"
    tokenize(job())
    assert output() == output("undisturbed_text_document")


def test_killed_between_the_files_and_the_record_it_joins_again(corpus, monkeypatch):
    tokenize(job(prefix="undisturbed"))
    write = files.write_json

    def killed_at_the_record(path, value):
        if path.name == "out.tokenize.json":
            raise OSError("as if killed here")
        write(path, value)

    monkeypatch.setattr(files, "write_json", killed_at_the_record)
    with pytest.raises(OSError, match="as if killed"):
        tokenize(job())
    monkeypatch.setattr(files, "write_json", write)
    assert Path("out_text_document.idx").exists()
    tokenize(job())
    assert output() == output("undisturbed_text_document")


def _children(session: int) -> list[str]:
    """Processes of a session that are still there."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "Z" not in line]


def test_a_finished_output_is_recognised_and_a_change_is_named(corpus, monkeypatch, capsys):
    tokenize(job())
    before = output()
    monkeypatch.setattr("steelyard.tokens.preprocess._encoded", None)
    tokenize(job())
    assert "already finished" in capsys.readouterr().err
    with pytest.raises(UserError, match="append_eod"):
        tokenize(job(append_eod=True))
    with open("corpus.jsonl", "a") as file:
        file.write('{"text": "one more", "title": ""}\n')
    with pytest.raises(UserError, match=r"inputs corpus\.jsonl"):
        tokenize(job())
    Path("out.tokenize.json").unlink()
    with pytest.raises(UserError, match="already exists, from another source"):
        tokenize(job())
    assert output() == before


def test_a_changed_tokenizer_is_named_and_overwrite_makes_it_anew(corpus):
    tokenize(job())
    before = output()
    tokenizers.train_byte_bpe(["other words entirely"] * 9, 280).save(Path("tok"))
    with pytest.raises(UserError, match="tokenizer"):
        tokenize(job())
    tokenize(job(), overwrite=True)
    assert output() != before


BAD = {
    "json": (b'{"text": "a"', "not JSON"),
    "key": (b'{"txt": "a"}', "'text'"),
    "utf8": (b'{"text": "\xff\xfe"}', "not JSON"),
    "type": (b'{"text": null}', "not text"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_stops_with_its_place_and_leaves_nothing_or_is_skipped_and_counted(corpus, kind):
    line, complaint = BAD[kind]
    lines = Path("corpus.jsonl").read_bytes().splitlines()
    lines[1500:1500] = [line]
    Path("corpus.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=complaint) as refused:
        tokenize(job(), worker_count=2)
    assert refused.value.where == "corpus.jsonl:1501"
    assert not list(corpus.glob("out*"))
    result = tokenize(job(on_bad_line="skip"))
    assert (result["skipped"], result["documents"]) == (1, 2000)
    assert result["examples"][0].startswith("corpus.jsonl:1501: ")


def test_a_truncated_gzip_stops_and_leaves_nothing(corpus):
    whole = gzip.compress(Path("corpus.jsonl").read_bytes())
    Path("cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: the gzip data is truncated"):
        tokenize(job(inputs=("cut.jsonl.gz",)))
    assert not list(corpus.glob("out*"))


@pytest.mark.parametrize("content", ["", '{"text": ""}\n' * 3])
def test_a_corpus_without_a_token_is_refused_and_leaves_nothing(corpus, content):
    Path("empty.jsonl").write_text(content)
    with pytest.raises(UserError, match="empty"):
        tokenize(job(inputs=("empty.jsonl",)))
    assert not list(corpus.glob("out*"))


def test_patterns_name_many_files_and_a_missing_one_is_refused(corpus):
    Path("a1.txt").write_text("word1\nword2\n")
    Path("a2.txt").write_text("word3\n")
    tokenize(job(inputs=("a*.txt",)))
    tokenizer = tokenizers.load_tokenizer("tok")
    texts = [tokenizer.decode(ids) for ids in IndexedTokens("out_text_document").documents()]
    assert texts == ["word1", "word2", "word3"]
    with pytest.raises(UserError, match=r"b\*\.txt"):
        tokenize(job(inputs=("b*.txt",), prefix="none"))


def test_an_input_that_is_no_file_is_refused_and_not_passed_over(corpus):
    Path("folder.jsonl").mkdir()
    Path("dangling.jsonl").symlink_to("nowhere")
    for name in ("folder.jsonl", "dangling.jsonl", "d*.jsonl"):
        with pytest.raises(UserError, match=r"not a file|no file"):
            tokenize(job(inputs=("corpus.jsonl", name)))


def test_fixed_length_windows_overlap_by_one_and_the_tail_is_counted(corpus):
    tokenize(job(append_eod=True))
    result = tokenize(job(append_eod=True, prefix="fixed", fixed_length=33))
    stream = np.concatenate(list(IndexedTokens("out_text_document").documents()))
    windows = np.stack(list(IndexedTokens("fixed_text_document").documents()))
    assert windows.shape[1] == 34
    assert np.array_equal(windows[:, :-1].ravel(), stream[: windows.shape[0] * 33])
    assert np.array_equal(windows[:-1, -1], windows[1:, 0])
    assert result["files"]["text"]["dropped_tokens"] == len(stream) - 1 - windows.shape[0] * 33 < 33


@pytest.mark.slow
def test_memory_stays_bounded(corpus):
    """A 256 MiB corpus with two workers: what is resident does not grow with the corpus.

    Its own peak comes from /proc: getrusage counts what the test's process held before it started the script.
    """
    line = json.dumps({"text": "word1 word2 word3 " * 200}) + "\n"
    with open("big.jsonl", "w") as file:
        for _ in range((256 << 20) // len(line)):
            file.write(line)
    script = (
        "import re, resource, steelyard.tokens.preprocess as p\n"
        "if __name__ == '__main__':\n"
        "    p.tokenize(p.TokenizeJob(('big.jsonl',), 'tok', 'big'), worker_count=2)\n"
        "    own = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "    print(own + 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    Path("big.py").write_text(script)
    done = subprocess.run([sys.executable, "big.py"], capture_output=True, text=True, timeout=600, check=True)
    assert int(done.stdout) < 512 << 10
