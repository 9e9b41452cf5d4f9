import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard import training
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core import sha256sums
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import load_recipe
from steelyard.evaluate import publish
from steelyard.evaluate.weight_stats import measure
from steelyard.text import tokenizer as tokenizers
from tests import preloaded
from tests.hub import TOKEN
from tests.hub import Fault as Trouble

NAME = "someone/small"
TEXT = ["once upon a time, there was a tokenizer for a small model"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A small model as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("original") / "model"
    tokenizer = tokenizers.train_byte_bpe(TEXT, 280)
    tokenizers.export_hf(tokenizer, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=280, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for path in original.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    return made


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def writes(hub):
    return [request for request in hub.requests if request.startswith(("POST", "PUT"))]


def test_what_was_pushed_is_what_is_pulled(hub, folder, tmp_path):
    from steelyard.checkpoint import hub as hubs

    result = publish.push(folder, "small")
    assert result["name"] == NAME
    hubs.pull(NAME, tmp_path / "back")
    pulled = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    sums = pulled.pop("SHA256SUMS").decode()
    assert {name: content for name, content in pulled.items() if name != "README.md"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert sorted(line[66:] for line in sums.splitlines()) == sorted(path.name for path in folder.iterdir())
    assert sha256sums.mismatches(tmp_path / "back", sha256sums.read(tmp_path / "back")) == []
    assert pulled["README.md"].decode().startswith("---\nlicense: unknown\n")
    assert not hub.model(NAME).private
    assert publish.try_out(tmp_path / "back", "once upon") == publish.try_out(folder, "once upon")


def test_a_second_push_sends_nothing_and_a_changed_file_alone(hub, folder):
    publish.push(folder, NAME)
    hub.sent.clear()
    commits = list(hub.model(NAME).commits)
    again = publish.push(folder, NAME)
    assert (again["sent"], again["bytes"], hub.sent) == ([], 0, [])
    assert hub.model(NAME).commits == commits
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.5, "do_sample": True}))
    assert publish.push(folder, NAME)["sent"] == ["SHA256SUMS", "generation_config.json"]
    assert hub.sent == []


def test_a_link_out_of_the_folder_is_not_published(hub, folder, tmp_path):
    (tmp_path / "key").write_text("a private key")
    (folder / "LICENSE").symlink_to(tmp_path / "key")
    with pytest.raises(UserError, match="LICENSE is a link that leaves its folder"):
        publish.push(folder, NAME)
    assert writes(hub) == []


def test_a_folder_that_does_not_match_its_own_sums_is_not_published(hub, folder):
    sha256sums.write(folder)
    change_weights(folder, lambda tensors: {name: tensor * 0.5 for name, tensor in tensors.items()})
    with pytest.raises(UserError, match=r"model\.safetensors does not match its SHA-256"):
        publish.push(folder, NAME)
    assert writes(hub) == []


def test_private_means_private(hub, folder):
    publish.push(folder, NAME, private=True)
    assert hub.model(NAME).private


def test_a_public_model_is_not_taken_for_a_private_one(hub, folder):
    hub.add("models", NAME, "config.json", b"{}")
    with pytest.raises(UserError, match="and is public"):
        publish.push(folder, NAME, private=True)
    assert writes(hub) == []


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan}, "not finite"),
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "model.norm.weight: missing"),
        (lambda t: t | {"model.extra.weight": torch.ones(3)}, "model.extra.weight: unknown"),
        (lambda t: t | {"model.norm.weight": torch.ones(65)}, "model.norm.weight: wrong size"),
    ],
)
def test_a_model_that_does_not_work_is_not_uploaded(hub, folder, damage, reported):
    change_weights(folder, damage)
    with pytest.raises(RuntimeFailure, match=reported):
        publish.push(folder, NAME)
    assert writes(hub) == []
    assert hub.repositories == {}


def test_without_transformers_the_model_is_tried_out_all_the_same(folder, monkeypatch):
    expected = publish.try_out(folder, "once upon a time,")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert publish.try_out(folder, "once upon a time,") == expected
    change_weights(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan})
    with pytest.raises(UserError, match="NaN or infinite values in model"):
        publish.try_out(folder, "once upon a time,")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "checkpoint", "earlier checkpoint"])
def test_a_run_is_published_as_a_hugging_face_model(hub, in_workplace, what, tmp_path):
    from steelyard.checkpoint import hub as hubs

    tokenizers.train_byte_bpe(TEXT, 280).save(tmp_path / "tok")
    run = training.run(load_recipe("tiny.toml", ["data.tokenizer=tok", "model.vocab=280"]))
    saved = sorted(run.checkpoints.iterdir())
    source = {"run": run.path, "checkpoint": saved[-1], "earlier checkpoint": saved[-2]}[what]
    before = sorted(source.parent.iterdir())
    publish.push(source, NAME)
    assert sorted(source.parent.iterdir()) == before
    hubs.pull(NAME, tmp_path / "back")
    publish.try_out(tmp_path / "back", "once")
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"{int(source.name.removeprefix('step-')) if what == 'earlier checkpoint' else 20} of 20" in card
    hub.sent.clear()
    assert publish.push(source, NAME)["sent"] == []


def test_a_tokenizer_beyond_the_embedding_is_found_out(hub, folder):
    tokenizers.train_byte_bpe(TEXT * 3, 300).save(folder.with_name("larger"))
    larger = folder.with_name("larger")
    (folder / "tokenizer.json").write_bytes((larger / "tokenizer.json").read_bytes())
    with pytest.raises(RuntimeFailure, match="does not work"):
        publish.push(folder, NAME, prompt=" ".join(TEXT))
    assert writes(hub) == []


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_found_out(hub, folder, file):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises((RuntimeFailure, UserError)):
        publish.push(folder, NAME)
    assert writes(hub) == []


def test_only_files_of_the_model_are_published(hub, folder):
    for name in ("optimizer.pt", ".env", "credentials.json", "notes.md", "training_args.bin"):
        (folder / name).write_text("x")
    result = publish.push(folder, NAME)
    assert result["left_out"] == [".env", "credentials.json", "notes.md", "optimizer.pt", "training_args.bin"]
    assert not hub.model(NAME).files.keys() & set(result["left_out"])


def test_a_token_inside_the_folder_is_not_published(hub, folder):
    (folder / "README.md").write_text(f"export HF_TOKEN={TOKEN}")
    with pytest.raises(UserError, match="contains your hub token") as caught:
        publish.push(folder, NAME)
    assert TOKEN not in str(caught.value)
    assert writes(hub) == []


def test_an_upload_that_broke_off_sends_only_what_is_missing(hub, folder):
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert config["num_hidden_layers"] == 2
    hub.faults = [Trouble("POST .*/commit/", status=500)]
    with pytest.raises(RuntimeFailure, match="500") as caught:
        publish.push(folder, NAME)
    assert "uploaded: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in caught.value.hint
    assert hub.model(NAME).commits == []
    hub.sent.clear()
    publish.push(folder, NAME)
    assert hub.sent == []
    assert len(hub.model(NAME).commits) == 1


def test_weights_of_an_earlier_version_under_other_names_go(hub, folder):
    hub.add("models", NAME, "model-00001-of-00002.safetensors", b"old")
    hub.add("models", NAME, "model.safetensors.index.json", b"old")
    hub.add("models", NAME, "model.gguf", b"someone made this")
    removed = publish.push(folder, NAME)["removed"]
    assert removed == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert "model.gguf" in hub.model(NAME).files


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
@pytest.mark.parametrize("place", ["repos/create", "preupload", "lfs/objects/batch", "PUT /storage", "/commit/"])
def test_an_error_on_any_way_up_is_told_without_the_token(hub, folder, capsys, monkeypatch, status, place):
    monkeypatch.setattr(publish, "try_out", lambda folder, prompt: "tried out elsewhere")
    hub.faults = [Trouble(place, status=status, times=99)]
    with pytest.raises((RuntimeFailure, UserError)) as caught:
        publish.push(folder, NAME)
    assert caught.value.exit_code == (1 if status >= 500 else 2)
    assert TOKEN not in f"{caught.value!r} {caught.value} {capsys.readouterr()}"
    assert not hub.repositories or hub.model(NAME).commits == []
    hub.faults.clear()
    publish.push(folder, NAME)
    assert len(hub.model(NAME).commits) == 1


def test_a_card_that_is_there_is_kept_unless_a_new_one_is_asked_for(hub, folder):
    publish.push(folder, NAME)
    hub.model(NAME).files["README.md"] = b"written on the hub's page"
    assert publish.push(folder, NAME)["kept"] == ["README.md"]
    assert hub.model(NAME).files["README.md"] == b"written on the hub's page"
    (folder / "README.md").write_text("written here")
    publish.push(folder, NAME)
    assert hub.model(NAME).files["README.md"] == b"written here"
    publish.push(folder, NAME, new_card=True)
    assert b"License: not chosen yet" in hub.model(NAME).files["README.md"]
    assert (folder / "README.md").read_text() == "written here"


def test_a_dry_run_asks_nobody_and_changes_nothing(hub, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    result = publish.push(folder, NAME, dry_run=True)
    assert hub.requests == []
    assert result["files"]["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert f'from_pretrained("{NAME}")' in result["card"]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_dry_run_of_a_name_alone_does_not_pretend_to_know_whose_it_is(hub, folder):
    assert 'from_pretrained("<you>/small")' in publish.push(folder, "small", dry_run=True)["card"]
    assert hub.requests == []


@pytest.mark.parametrize(
    ("end", "reported"),
    [(0, None), ([7, 0], None), (7, "of the config is 7, but that of the tokenizer is <|endoftext|> (0)")],
)
def test_a_model_that_does_not_stop_where_its_tokenizer_does_is_remarked_on(
    hub, folder, monkeypatch, end, reported, capsys
):
    monkeypatch.setattr(publish, "try_out", lambda folder, prompt: "tried out elsewhere")
    for name in ("config.json", "generation_config.json"):
        table = json.loads((folder / name).read_text()) | {"eos_token_id": end}
        (folder / name).write_text(json.dumps(table))
    result = publish.push(folder, NAME, dry_run=True)
    assert len(result["remarks"]) == (reported is not None)
    assert not reported or reported in result["remarks"][0]
    assert not reported or reported in capsys.readouterr().err


def test_without_a_tokenizer_the_command_that_adds_one_is_shown_and_works(hub, folder, monkeypatch):
    monkeypatch.setattr(publish, "try_out", lambda folder, prompt: "tried out elsewhere")
    tokenizers.train_byte_bpe(TEXT, 280).save(folder.with_name("tok"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="has no tokenizer") as refused:
        publish.push(folder, NAME)
    command = shlex.split(refused.value.hint.split(" writes ")[0])
    assert shlex.join(command) == f"steelyard checkpoint convert {folder} {folder}-hf --to hf --tokenizer TOKENIZER"
    convert(open_source(command[3]), Path(command[4]), Target("hf", tokenizer=str(folder.with_name("tok"))))
    assert publish.push(Path(command[4]), NAME)["remarks"] == []


def test_sparsity_is_measured_in_the_weights(folder):
    assert measure(folder).zeros == 0

    def pruned(tensors):
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                tensor[:, ::2] = 0
        return tensors

    change_weights(folder, pruned)
    measured = measure(folder)
    assert measured.sparsity == pytest.approx(0.5)
    assert measured.two_of_four == measured.matrices == 14
    card = publish.push(folder, NAME, dry_run=True)["card"]
    assert "50.00% of the elements" in card
    assert "14 of them have two zeros in every group of four" in card


def test_the_card_tells_the_run_and_no_place_on_this_machine(in_workplace, folder):
    place = in_workplace.path
    run = training.run(load_recipe("tiny.toml", [f"data.train={place}/tokens_text_document"]))
    card = publish.push(folder, NAME, dry_run=True, run=run.path)["card"]
    last = [record for record in run.metrics() if "loss" in record][-1]
    valid = [record for record in run.metrics() if "valid_loss" in record][-1]
    assert f"{last['loss']:.4f} (perplexity" in card
    assert f"{valid['valid_loss']:.4f} (perplexity" in card
    assert f"({last['tokens']})" in card
    assert 'prefix = "tokens_text_document"' in card
    assert str(place) not in card
    assert run.manifest()["host"] not in card.replace(NAME, "")
    assert card == publish.push(folder, NAME, dry_run=True, run=run.path)["card"]
    recipe = card.split("```toml\n")[1].split("```")[0]
    (place / "again.toml").write_text(recipe)
    assert load_recipe("again.toml").model == run.recipe().model


@pytest.mark.parametrize(
    ("remove", "reported"),
    [
        ("model.safetensors", "no weights"),
        ("tokenizer", "no tokenizer"),
        ("config.json", "not a checkpoint of a supported format"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(hub, folder, remove, reported):
    for path in list(folder.glob(f"{remove}*")) + (list(folder.glob("special*")) if remove == "tokenizer" else []):
        path.unlink()
    with pytest.raises(UserError, match=reported):
        publish.push(folder, NAME)
    assert writes(hub) == []


@pytest.mark.slow
def test_the_command_keeps_the_token_to_itself(hub, folder, tmp_path):
    """The server repeats the token in every error; standard output, standard error and the process list have none."""
    environment = os.environ | hub.environment(tmp_path) | {"HF_DEBUG": "1"}

    def steelyard(*words, **options):
        command = [sys.executable, "-m", "steelyard", "hub", *words]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600, env=environment, **options)
        assert TOKEN not in done.stdout + done.stderr
        return done

    assert steelyard("whoami").stdout == "someone\n"
    assert steelyard("push", str(folder), NAME, "--debug").returncode == 0
    hub.faults = [Trouble("/api/models", status=418, times=99)]
    failed = steelyard("push", str(folder), NAME, "--debug")
    assert failed.returncode == 1
    assert "the hub answered 418" in failed.stderr
    assert "Bearer [hidden]" in failed.stderr
    del environment["HF_TOKEN"]
    for words in ([TOKEN], ["--token", TOKEN], [f"--token={TOKEN}"], ["--token-file", "nowhere", TOKEN]):
        assert steelyard("login", *words).returncode == 2
    assert steelyard("login", input="wrong-token-of-another-shape\n").returncode == 2
    assert steelyard("whoami").returncode == 2
    assert steelyard("login", input=f"{TOKEN}\n").stdout == "someone\n"
    assert steelyard("whoami", "--json").stdout == '{"name": "someone", "organizations": []}\n'
