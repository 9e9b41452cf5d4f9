"""`steelyard site init`: what a login node's programs say becomes a site. The job is tried in tests/cluster."""

import json
import os

import pytest

from steelyard.core.errors import UserError
from steelyard.launch import sites
from steelyard.launch.backends.slurm_site import SiteFacts, add_site, chosen, container_kind, partitions, settings

SINFO = """\
cpu*|up|infinite|64|100|(null)
gpu|up|2-00:00:00|128|4|gpu:a100:4(S:0-3)
gpu|up|2-00:00:00|96+|2|gpu:8,nvme:1
big|up|1:00:00|128|20|gpu:nvidia_h100_80gb_hbm3:8(S:0-1)
old|down|infinite|8|1|gpu:k80:2
"""
PROGRAMS = {
    "sinfo": f"cat <<'END'\n{SINFO}END\n",
    "scontrol": "echo 'ClusterName             = campus'\n",
    "sacctmgr": "echo nlp\n",
    "srun": "echo '  --container-image=[USER@][REGISTRY#]IMAGE'\n",
}


def test_partitions_that_are_up_are_read_with_their_gpus_and_limits():
    found = partitions(SINFO)
    assert [(each.name, each.gres, each.cpus) for each in found] == [
        ("cpu", None, 64), ("gpu", "gpu:a100:4", 128), ("gpu", "gpu:8", 96),
        ("big", "gpu:nvidia_h100_80gb_hbm3:8", 128),
    ]  # fmt: skip
    assert [each.time_limit for each in found] == [None, "2-00:00:00", "2-00:00:00", "1:00:00"]
    assert chosen(found, None, gpus=True).name == "big"
    assert chosen(found, "gpu", gpus=True).gres == "gpu:a100:4"
    assert chosen(found, None, gpus=False).name == "cpu"
    with pytest.raises(UserError, match="there is no partition fast"):
        chosen(found, "fast", gpus=True)


def test_a_site_asks_for_all_gpus_of_a_node_and_its_share_of_the_cores():
    facts = SiteFacts("campus", partitions(SINFO), "nlp", ["gcc/12"], ["apptainer/1.2", "apptainer/1.3"], ["docker"])
    site = settings(facts, chosen(facts.partitions, "gpu", gpus=True), "/images/x.sif", gpus=True)
    assert site == {
        "modules": ["gcc/12", "apptainer/1.3"],  # Apptainer comes with a module here.
        "ranks_per_node": 4,
        "container": {"kind": "apptainer", "image": "/images/x.sif"},
        "slurm": {
            "partition": "gpu", "account": "nlp", "gres": "gpu:a100:4", "cpus_per_rank": 32, "time_limit": "2-00:00:00",
        },
    }  # fmt: skip
    without = settings(facts, chosen(facts.partitions, "cpu", gpus=True), None, gpus=True)
    assert without == {"modules": ["gcc/12"], "slurm": {"partition": "cpu", "account": "nlp"}}


@pytest.mark.parametrize(
    ("image", "runtimes", "kind"),
    [
        ("a.sif", ["singularity", "docker"], "singularity"),
        ("a.sqsh", ["pyxis", "enroot"], "pyxis"),
        ("a.sqsh", [], "enroot"),
        ("ghcr.io/me/image:1", ["podman", "docker"], "podman"),
    ],
)
def test_the_runtime_fits_the_image(image, runtimes, kind):
    assert container_kind(image, SiteFacts("c", [], runtimes=runtimes)) == kind


def test_a_file_keeps_its_sites_and_comments_and_no_site_is_overwritten(tmp_path):
    file = tmp_path / "config" / "sites.toml"
    add_site(file, "one", {"slurm": {"partition": "a"}})
    file.write_text("# mine\n" + file.read_text())
    add_site(file, "two", {"modules": ["gcc"], "slurm": {"partition": "b"}})
    assert file.read_text().startswith("# mine\n")
    assert sites.find(None, None, file)[0] == "one"
    assert sites.find("two", None, file)[1].slurm.partition == "b"
    before = file.read_bytes()
    with pytest.raises(UserError, match="already described"):
        add_site(file, "two", {})
    assert file.read_bytes() == before


def test_the_command_writes_what_the_login_node_says(workplace):
    for name, body in PROGRAMS.items():
        program = workplace.path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}")
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{workplace.path / 'bin'}:{os.environ['PATH']}", "LOADEDMODULES": "gcc/12:git"}
    words = ("site", "init", "--no-test", "--sites", "sites.toml", "--image", "x.sqsh", "--json")
    done = workplace.steelyard(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["site"] == "campus"
    name, site = sites.find(None, None, workplace.path / "sites.toml")
    assert (name, site.slurm.partition, site.slurm.account, site.modules) == ("campus", "big", "nlp", ["gcc/12", "git"])
    assert site.container.kind == "pyxis"
    assert workplace.steelyard(*words, env=environment).returncode == 2


def test_without_slurm_the_command_says_where_to_run_it(workplace, tmp_path):
    done = workplace.steelyard("site", "init", env=os.environ | {"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "login node" in done.stderr


def test_a_node_whose_gpu_torch_does_not_see_fails_with_the_cause(monkeypatch):
    import torch

    from steelyard.training.node_check import check_node

    assert check_node(0)["works"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    facts = check_node(1)
    assert not facts["works"]
    assert "granted 1 GPU" in facts["verdict"]
    assert "steelyard doctor" in facts["hint"]
