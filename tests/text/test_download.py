import gzip
import http.server
import json
import threading

import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.text.convert_corpus import convert
from steelyard.text.corpus import documents
from steelyard.text.download import download, rows_on_the_hub


@pytest.fixture
def wikitext(hub, tmp_path):
    """The hub's layout of both forms, with a few lines each."""
    for form in ("wikitext-2-v1", "wikitext-2-raw-v1"):
        for split in ("train", "validation", "test"):
            (tmp_path / "x.txt").write_text(f" = {form} {split} = \n\n <unk> 日本 \n")
            convert([tmp_path / "x.txt"], tmp_path / "x.parquet")
            content = (tmp_path / "x.parquet").read_bytes()
            hub.add("datasets", "Salesforce/wikitext", f"{form}/{split}-00000-of-00001.parquet", content)
    return hub


def test_both_forms_of_wikitext_are_told_apart_and_fetched_once(wikitext, tmp_path):
    paths = download("wikitext-2-raw-v1", tmp_path / "out")
    names = [f"wikitext-2-raw-v1.{split}.jsonl" for split in ("train", "validation", "test")]
    assert [path.name for path in paths] == names
    assert list(documents([paths[1]])) == [" = wikitext-2-raw-v1 validation = ", "", " <unk> 日本 "]
    assert len(wikitext.fetched) == 3
    assert not any("wikitext-2-v1" in name for name in wikitext.fetched)
    assert download("wikitext-2-raw-v1", tmp_path / "out") == paths
    assert len(wikitext.fetched) == 3
    with pytest.raises(UserError, match="two versions"):
        download("wikitext-2", tmp_path / "out")


def test_shards_of_c4_come_by_number(hub, tmp_path):
    for number in (0, 1, 2):
        content = gzip.compress(b'{"text": "shard %d"}\n' % number)
        hub.add("datasets", "allenai/c4", f"en/c4-train.{number:05d}-of-01024.json.gz", content)
    paths = download("c4", tmp_path / "c4", shards="0,2")
    assert list(documents(paths)) == ["shard 0", "shard 2"]
    with pytest.raises(UserError, match="1024"):
        download("c4", tmp_path / "c4", shards="1024")


def test_conversations_of_openassistant_come_as_one_jsonl_per_split(hub, tmp_path):
    tree = {"message_id": "1", "parent_id": None, "text": "안녕", "role": "prompter"}
    (tmp_path / "x.jsonl").write_text(json.dumps(tree) + "\n")
    convert([tmp_path / "x.jsonl"], tmp_path / "x.parquet")
    for split in ("train", "validation"):
        name = f"data/{split}-00000-of-00001-b42a.parquet"
        hub.add("datasets", "OpenAssistant/oasst1", name, (tmp_path / "x.parquet").read_bytes())
    for name in ("train", "eval"):
        row = b'{"text": "### Human: %s"}\n' % name.encode()
        hub.add("datasets", "timdettmers/openassistant-guanaco", f"openassistant_best_replies_{name}.jsonl", row)
    paths = download("openassistant", tmp_path / "out")
    assert [path.name for path in paths] == ["openassistant.train.jsonl", "openassistant.validation.jsonl"]
    assert json.loads(paths[0].read_text()) == tree
    paths = download("openassistant-guanaco", tmp_path / "out")
    assert [json.loads(path.read_text())["text"] for path in paths] == ["### Human: train", "### Human: eval"]


def test_bookcorpus_comes_from_the_branch_that_the_hub_converts(hub, tmp_path):
    hub.add("datasets", "bookcorpus/bookcorpus", "bookcorpus.py", b"not wanted")
    hub.add("datasets", "bookcorpus/bookcorpus@refs--convert--parquet", "plain_text/train/0003.parquet", b"books")
    (path,) = download("bookcorpus", tmp_path, shards="3")
    assert (path.name, path.read_bytes()) == ("bookcorpus.0003.parquet", b"books")
    with pytest.raises(UserError, match="there are 10"):
        download("bookcorpus", tmp_path, shards="10")


def test_papers_of_arxiv_come_from_the_addresses_that_redpajama_lists(hub, server, tmp_path):
    url, handler = server
    handler.requests.append(None)  # So that the connection is not cut.
    listed = f"{url}/nothing.jsonl\n{url}/data.bin\n".encode()
    hub.add("datasets", "togethercomputer/RedPajama-Data-1T", "urls/arxiv.txt", listed)
    (path,) = download("arxiv", tmp_path / "out", shards="1")
    assert path.read_bytes() == handler.content
    hub.add("datasets", "togethercomputer/RedPajama-Data-1T-Sample", "arxiv_sample.jsonl", b"{}")
    assert [path.name for path in download("arxiv-sample", tmp_path / "out")] == ["arxiv_sample.jsonl"]


def test_what_the_hub_does_not_have_is_a_fault_with_its_name(hub, tmp_path):
    with pytest.raises(RuntimeFailure, match="Salesforce/wikitext"):
        download("wikitext-103-v1", tmp_path)


def test_rows_for_tuning_are_those_of_one_training_split(hub):
    for name in (
        "data/train_sft-00000-of-00001.parquet",
        "data/train_gen-00000-of-00001.parquet",
        "data/test_sft.jsonl",
    ):
        hub.add("datasets", "org/talks", name, b"{}")
    hub.add("datasets", "org/talks", "dataset_infos.json", b"{}")
    with pytest.raises(UserError, match="several splits") as refused:
        rows_on_the_hub("org/talks")
    assert "org/talks:train_sft" in str(refused.value)
    assert [path.name for path in rows_on_the_hub("org/talks:train_sft")] == ["train_sft-00000-of-00001.parquet"]
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "validation-00000-of-00001.parquet"):
        hub.add("datasets", "org/plain", name, b"{}")
    assert [path.name[:11] for path in rows_on_the_hub("org/plain")] == ["train-00000", "train-00001"]
    hub.add("datasets", "org/alpaca", "alpaca_data.json", b"[]")
    assert [path.name for path in rows_on_the_hub("org/alpaca")] == ["alpaca_data.json"]


def test_any_data_set_loads_through_the_datasets_library(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text('{"text": "一"}\n{"text": "two"}\n')
    paths = download(f"hf:{tmp_path / 'mine'}", tmp_path / "out")
    assert [path.name for path in paths] == ["mine.train.jsonl"]
    assert list(documents(paths)) == ["一", "two"]


@pytest.fixture
def server():
    """A web server with one file that breaks off in the middle the first time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        content = bytes(range(256)) * 5000
        requests: list = []  # noqa: RUF012

        def log_message(self, *words):
            pass

        def do_GET(self):
            if self.path != "/data.bin":
                self.send_error(404)
                return
            asked = self.headers.get("Range")
            self.requests.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(self.content) - start))
            self.end_headers()
            end = len(self.content) // 2 if len(self.requests) == 1 else len(self.content)
            self.wfile.write(self.content[start:end])

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", Handler
    made.shutdown()
    made.server_close()


def test_a_broken_download_goes_on_where_it_was(server, tmp_path):
    url, handler = server
    with pytest.raises(RuntimeFailure, match="run the same command again to resume"):
        download(f"{url}/data.bin", tmp_path)
    assert not (tmp_path / "data.bin").exists()
    (path,) = download(f"{url}/data.bin", tmp_path)
    assert path.read_bytes() == handler.content
    assert handler.requests == [None, f"bytes={len(handler.content) // 2}-"]
    download(f"{url}/data.bin", tmp_path)
    assert len(handler.requests) == 2


def test_a_missing_page_and_an_unknown_name_are_clear(server, tmp_path):
    with pytest.raises(RuntimeFailure, match="404"):
        download(f"{server[0]}/nothing.bin", tmp_path)
    with pytest.raises(UserError, match="wikitext-2-raw-v1"):
        download("wikipedia", tmp_path)
