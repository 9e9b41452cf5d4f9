"""What is asked of schedulers: quoted words, nodes that follow from the plan, nothing started in a dry run."""

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.site_section import ContainerSection, MpiSection, SiteSection, SlurmSection
from steelyard.launch import job_spec, rendezvous_file, site_environment, site_shell, sites, submit
from steelyard.launch.backends import mpi, slurm, slurm_script
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.submit import SubmitRequest, preview
from steelyard.planning import cluster as clusters

HOSTILE = "a b'\"$(touch pwned)`touch pwned`\n;touch pwned #"
PLAIN = SiteSection()
CLUSTER = """
[[nodes]]
type = "a10"
count = 15
gpu = "a10"
gpus = 4
partition = "gpu2"
gres = "gpu:a10:4"

[[nodes]]
type = "a100"
count = 1
gpu = "a100-40"
gpus = 4
partition = "gpu1"
gres = "gpu:a100:4"
"""


def order(run: Path, site: SiteSection = PLAIN, **changes) -> JobSpec:
    values = {"groups": [NodeGroup(1, 1)], "command": ["true"], "name": "x", "python": "python3", "workdir": str(run)}
    return JobSpec(run=run, site=site, submitted="now", **{**values, **changes})


@pytest.fixture
def mixed(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return clusters.load(tmp_path / "cluster.toml")


def plan(*overrides: str):
    return load_recipe("gpt2-xl", ["parallel.pipeline=8", "train.global_batch=64", *overrides])


def test_nodes_follow_from_the_placement_in_its_order(mixed):
    recipe = plan("parallel.data=8", 'parallel.placement=["a100:1", "a10:7", "a10:8"]')
    found = job_spec.of_plan(recipe, mixed, SiteSection(), None, None)
    assert found == [NodeGroup(1, 4, "gpu1", "gpu:a100:4"), NodeGroup(15, 4, "gpu2", "gpu:a10:4")]
    assert job_spec.written(found) == "1x4,15x4"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ('["a100:2", "a10:6"]', "the cluster has 1 of that type"),
        ('["h100:1"]', "does not name nodes of the cluster"),
        ("[]", "does not say which one to use"),
        ('["a100:1"]', "not on 4"),
    ],
)
def test_a_placement_that_the_cluster_lacks_is_refused(mixed, placement, message):
    with pytest.raises(UserError, match=message):
        job_spec.of_plan(plan(f"parallel.placement={placement}"), mixed, SiteSection(), None, None)


def test_a_plan_without_a_placement_fills_nodes_of_the_site():
    recipe = plan("parallel.data=4")
    assert job_spec.of_plan(recipe, None, SiteSection(ranks_per_node=4), None, None) == [NodeGroup(8, 4, None, "gpu:4")]
    with pytest.raises(UserError, match="not a multiple of 5 ranks per node"):
        job_spec.of_plan(recipe, None, SiteSection(ranks_per_node=5), None, None)


def test_several_partitions_become_one_heterogeneous_job(tmp_path):
    two = [NodeGroup(1, 4, "gpu1", "gpu:a100:4"), NodeGroup(7, 4, "gpu2", "gpu:a10:4")]
    made = order(
        tmp_path,
        SiteSection(slurm=SlurmSection(account="nlp", sbatch=["--qos=long"])),
        groups=two,
        time_limit="24:00:00",
    )
    words = slurm_script.sbatch(made)
    first, second = words[: words.index(":")], words[words.index(":") + 1 :]
    assert {"--nodes=1", "--partition=gpu1", "--gres=gpu:a100:4", "--cpus-per-task=16", "--qos=long"} <= set(first)
    assert {"--nodes=7", "--partition=gpu2", "--gres=gpu:a10:4", "--account=nlp", "--time=24:00:00"} <= set(second)
    text = slurm_script.text(made)
    assert "--het-group=0 --nodes=1" in text
    assert ": --het-group=1 --nodes=7" in text
    assert text.count("--groups 1x4,7x4") == 2


def test_where_they_are_forbidden_each_partition_is_a_job_that_knows_its_place(tmp_path):
    two = [NodeGroup(1, 4, "gpu1"), NodeGroup(7, 4, "gpu2")]
    made = order(tmp_path, SiteSection(slurm=SlurmSection(heterogeneous="several-jobs")), groups=two)
    assert slurm_script.jobs(made) == [0, 1]
    assert ":" not in slurm_script.sbatch(made, 1)
    assert "--group 1" in slurm_script.text(made, 1)
    assert "--het-group" not in slurm_script.text(made, 1)


def test_every_word_of_a_person_stays_one_word(tmp_path, monkeypatch):
    """The script is run by a real bash, with programs of our own in the place of srun and the scheduler's."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / f"dir {HOSTILE}"
    (place / "launch").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$SEEN"\nprintf "%s\\0" "$HOSTILE" >>"$SEEN"\n')
    (programs / "srun").chmod(0o755)
    site = SiteSection(
        environment={"HOSTILE": HOSTILE}, container=ContainerSection(kind="apptainer", image=HOSTILE, options=[HOSTILE])
    )
    made = order(place, site, name=HOSTILE, command=["python3", HOSTILE], workdir=str(place))
    seen = tmp_path / "seen"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SEEN": str(seen), "SLURM_JOB_ID": "7"}
    with pytest.raises(UserError, match="colon or a comma") if set(":,") & set(str(place)) else _nothing():
        text = slurm_script.text(made)
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=150)
    words = seen.read_bytes().decode().split("\0")
    assert words.count(HOSTILE) == 4  # option, image, command, variable
    assert str(place) in words
    assert not list(tmp_path.rglob("pwned"))
    assert slurm_script.job_name(HOSTILE).isascii()
    assert not set(slurm_script.job_name(HOSTILE)) & set(" '\"$`\n;#")


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_mpirun_can_be_asked_for_the_line_of_a_megatron_script(tmp_path):
    site = SiteSection(
        mpi=MpiSection(
            mpirun="/opt/openmpi/bin/mpirun", hosts=["192.168.1.1", "192.168.1.2"], slots=120, cpus_per_rank=15,
            ssh_port=53412, ssh_options=["-o StrictHostKeyChecking=no"],
        )
    )  # fmt: skip
    line = shlex.join(mpi.options(site, [NodeGroup(2, 8)]))
    assert line == (
        "/opt/openmpi/bin/mpirun -x MASTER_ADDR=192.168.1.1 --host 192.168.1.1:120,192.168.1.2:120 "
        "--map-by ppr:8:node --cpus-per-rank 15 --mca plm_rsh_args '-o StrictHostKeyChecking=no -p 53412'"
    )
    words = mpi.BACKEND.command(
        order(tmp_path, site, groups=[NodeGroup(2, 8)], command=["steelyard", "train", "my.toml"])
    )
    assert words[-4:] == ["--", "steelyard", "train", "my.toml"]
    with pytest.raises(UserError, match="needs 3 hosts"):
        mpi.refuse_hosts(site, [NodeGroup(3, 8)])
    mpi.refuse_hosts(site, [NodeGroup(2, 8)])
    site.mpi.ssh_options.append("-o X=$(touch pwned)")
    with pytest.raises(UserError, match="interpreted by a shell"):
        mpi.refuse_hosts(site, [NodeGroup(2, 8)])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("apptainer", ["apptainer", "exec", "--nv", "--bind", "/data:/data"]),
        ("singularity", ["singularity", "exec", "--nv", "--bind", "/data:/data"]),
        ("docker", ["docker", "run", "--rm", "--init", "--network=host"]),
        ("podman", ["podman", "run", "--rm", "--init", "--network=host"]),
        ("none", ["python3"]),
    ],
)
def test_a_container_is_words_before_the_command(kind, expected):
    image = "" if kind == "none" else "image"
    site = SiteSection(container=ContainerSection(kind=kind, image=image, binds=["/data"]))
    words = site_environment.wrapped(site, ["python3"], "/work", None, gpus=True)
    assert words[: len(expected)] == expected
    assert words[-1] == "python3"


def test_enroot_keeps_what_is_set_and_the_folder(tmp_path):
    """A program of ours in the place of enroot clears the environment and goes elsewhere, as enroot does."""
    fake, image = tmp_path / "enroot", ContainerSection(kind="enroot", image="x.sqsh", binds=["/data"])
    fake.write_text("""#!/bin/bash
        shift; kept=()
        while [[ $1 == --* ]]; do
            case $1 in --env) kept+=("$2=${!2}"); shift 2;; --mount) shift 2;; *) shift;; esac
        done
        shift; cd /; exec env -i PATH=/usr/bin:/bin "${kept[@]}" "$@"
    """)
    fake.chmod(0o755)
    command = ["sh", "-c", 'echo "$PWD|$SLURM_PROCID|$MINE|${CUDA_VISIBLE_DEVICES-unset}"']
    words = site_environment.wrapped(
        SiteSection(container=image, environment={"MINE": "x"}), command, str(tmp_path), None, gpus=True,
        variables=slurm.BACKEND.rank_variables,
    )  # fmt: skip
    there = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_PROCID": "3", "MINE": "two words"}
    done = subprocess.run(words, env=there, capture_output=True, text=True, timeout=150)
    assert done.stdout == f"{tmp_path}|3|two words|unset\n"


def test_enroot_is_told_of_binds_as_its_fstab_has_them():
    site = SiteSection(container=ContainerSection(kind="enroot", image="x.sqsh", binds=["/data:/mnt:ro"]))
    assert "/data:/mnt:rbind,x-create=auto,ro" in site_environment.wrapped(site, ["true"], "/work", None, gpus=False)
    with pytest.raises(UserError, match="contains a space"):
        site_environment.wrapped(site, ["true"], "/my work", None, gpus=False)


@pytest.mark.parametrize("kind", ["apptainer", "docker", "podman", "enroot"])
def test_folders_before_path_leave_the_image_its_own_path(kind):
    """A module's apptainer may need them outside; inside, the host's PATH would hide the image's programs."""
    site = SiteSection(
        container=ContainerSection(kind=kind, image="x"), prepend={"PATH": ["/host/bin"], "LD_LIBRARY_PATH": ["/l"]}
    )
    text = site_shell.script_for(site, ["true"])
    assert 'export PATH=/host/bin"${PATH:+:$PATH}"' in text
    assert ("APPTAINERENV_PREPEND_PATH=/host/bin\n" in text) == (kind == "apptainer")
    assert "ENV_PATH=" not in text
    passed = text.splitlines()[-1].replace("'", " ").split()
    assert "PATH" not in passed
    assert ("LD_LIBRARY_PATH" in passed) == (kind != "apptainer")


def test_pyxis_is_options_of_srun(tmp_path):
    site = SiteSection(container=ContainerSection(kind="pyxis", image="repo/image:1", binds=["/data:/mnt"]))
    text = slurm_script.text(order(tmp_path, site))
    assert "--container-image=repo/image:1" in text
    assert "--container-mounts=/data:/mnt" in text


def test_pyxis_reloads_an_image_outside_of_it(tmp_path):
    site = SiteSection(container=ContainerSection(kind="pyxis", image="x.sqsh"))
    first = slurm_script.text(order(tmp_path, site, reload_container=True)).split("enroot remove")[0]
    assert "--container-" not in first


def test_a_step_of_an_allocation_is_asked_to_save_and_waited_for(tmp_path):
    srun = tmp_path / "srun"
    word = "trap 'echo saved; exit 0' USR1; touch started; while :; do sleep 0.02; done"
    srun.write_text(f"#!/bin/bash\n{word}\n")
    srun.chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm_script.text(order(tmp_path, allocation="7")))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", tmp_path / "job.sh"], env=path, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.terminate()
    assert job.communicate(timeout=150)[0] == "saved\n"
    assert job.returncode == 0


def test_a_refused_follower_takes_the_master_off_the_queue(tmp_path, monkeypatch):
    for name, script in {
        "sbatch": "case $* in *job-1*) exit 1;; esac; echo 41",
        "scancel": "echo $* >cancelled",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    two = order(
        tmp_path,
        SiteSection(slurm=SlurmSection(heterogeneous="several-jobs")),
        groups=[NodeGroup(1, 1), NodeGroup(1, 2)],
    )
    with pytest.raises(UserError, match="refuses"):
        slurm.BACKEND.submit(two, submit.described(SubmitRequest("slurm", PLAIN), two))
    assert (tmp_path / "cancelled").read_text() == "41\n"
    assert not (tmp_path / "launch.json").exists()  # Nothing was handed over.


def test_nodes_of_the_master_wait_for_followers_in_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_file, "SECONDS_TO_ARRIVE", 0.0)
    asked: list[int] = []
    Timer(0.5, asked.append, [1]).start()
    with ExitStack() as stack:
        assert rendezvous_file.join(tmp_path, "1.0", 1, 0, 1, asked, stack) is None


@pytest.mark.parametrize(
    ("slurm_", "with_cluster", "expected"),
    [
        (SlurmSection(gres="gpu:2"), True, NodeGroup(1, 4, None, "gpu:2")),
        (SlurmSection(partition="gpu1"), True, NodeGroup(1, 4, "gpu1", "gpu:a100:4")),
        (SlurmSection(), True, NodeGroup(1, 4)),
        (SlurmSection(partition="gpu1"), False, NodeGroup(1, 4, "gpu1")),
    ],
)
def test_a_command_gets_its_gpus_from_the_site_or_the_cluster_or_a_warning(
    mixed, capsys, slurm_, with_cluster, expected
):
    request = SubmitRequest("slurm", SiteSection(slurm=slurm_), words=["prune"], ranks_per_node=4, uses_gpu=True)
    assert slurm.BACKEND.nodes(request, mixed if with_cluster else None) == [expected]
    assert ("requests no GPU" in capsys.readouterr().err) == (expected.gres is None)
    without = replace(request, uses_gpu=False, site=PLAIN)
    assert slurm.BACKEND.nodes(without, mixed) == [NodeGroup(1, 4)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_local_command_in_a_container_sees_the_gpus_of_this_machine(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr(job_spec, "NVIDIA", tmp_path if has_gpu else tmp_path / "nothing")
    site = SiteSection(container=ContainerSection(kind="apptainer", image="i.sif"))
    for uses_gpu in (True, False):
        result, _ = preview(SubmitRequest("local", site, words=["eval"], uses_gpu=uses_gpu))
        assert ("--nv" in "".join(result["scripts"].values())) == (has_gpu and uses_gpu)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SubmitRequest("local", PLAIN, plan(), nodes=2), "one node"),
        (SubmitRequest("slurm", PLAIN, plan(), job="7;x"), "not a job id"),
        (SubmitRequest("local", PLAIN, plan(), time_limit="1:00:00"), "no time limit"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(tmp_path, monkeypatch, request_, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        submit.prepare(request_)
    assert not list(tmp_path.iterdir())


def test_an_unpacked_image_is_reused_until_it_is_reloaded(tmp_path):
    """A program of ours in the place of apptainer counts how often it unpacks."""
    fake = tmp_path / "bin" / "apptainer"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\nmkdir -p "$3"\n')
    fake.chmod(0o755)
    container = ContainerSection(kind="apptainer", image="my image.sif", unpack=str(tmp_path / "place"))
    for reload in (False, False, True):
        script = site_environment.preparation(container, reload)
        subprocess.run(["bash", "-c", script], env={"PATH": f"{fake.parent}:/usr/bin:/bin"}, check=True, timeout=150)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].startswith("build --sandbox")
    assert Path(site_environment.unpacked(container)).is_dir()


@pytest.mark.parametrize(
    "trap", ["a link", "another user's folder", "a folder others write to", "a parent others write to"]
)
def test_an_image_is_not_unpacked_where_others_could_change_it(tmp_path, trap):
    container = ContainerSection(kind="apptainer", image="x.sif", unpack=str(tmp_path / "shared"))
    place = Path(site_environment.unpacked(container)).parent
    place.parent.mkdir()
    match trap:
        case "a link":
            (tmp_path / "evil" / "image").mkdir(parents=True)
            place.symlink_to(tmp_path / "evil")
        case "another user's folder":
            if os.geteuid():
                pytest.skip("only root can make one")
            place.mkdir()
            os.chown(place, 12345, 12345)
        case "a folder others write to":
            place.mkdir()
            place.chmod(0o777)
        case "a parent others write to":
            place.parent.chmod(0o777)
    script = site_environment.preparation(container, reload=False)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert f"error: {place.parent if 'parent' in trap else place}" in done.stderr


def test_a_shell_has_the_modules_the_environment_and_the_container(tmp_path):
    site = SiteSection(
        modules=["apptainer", "cuda/12.4"], environment={"A": "b c"}, prepend={"LD_LIBRARY_PATH": ["/x", "/y"]},
        container=ContainerSection(kind="apptainer", image="i.sif"), workdir=str(tmp_path),
    )  # fmt: skip
    text = site_shell.script_for(site, [])
    assert "module load apptainer cuda/12.4 || exit 1" in text
    assert "export A='b c'" in text
    assert 'export LD_LIBRARY_PATH=/x:/y"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"' in text
    assert 'export APPTAINERENV_LD_LIBRARY_PATH="$LD_LIBRARY_PATH"' in text
    assert text.splitlines()[-1].startswith("exec apptainer exec")
    plain = site.model_copy(update={"modules": [], "container": ContainerSection()})
    done = subprocess.run(
        ["bash", "-c", site_shell.script_for(plain, ["env"])],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/z"}, timeout=150,
    )  # fmt: skip
    assert "A=b c\n" in done.stdout
    assert "LD_LIBRARY_PATH=/x:/y:/z\n" in done.stdout


@pytest.mark.parametrize(("users", "opened"), [("own", "own"), ("absent", "bash")])
def test_a_shell_in_an_image_is_the_users_if_the_image_has_it(tmp_path, monkeypatch, users, opened):
    """A program of ours in the place of apptainer runs the last words here."""
    for name, text in {
        "own": "echo own",
        "apptainer": 'while [ "$1" != i.sif ]; do shift; done; shift; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("SHELL", str(tmp_path / users))
    site = SiteSection(container=ContainerSection(kind="apptainer", image="i.sif"), workdir=str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", site_shell.script_for(site, [])], capture_output=True, text=True, timeout=150,
        input="echo ${BASH##*/}\n", env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == f"{opened}\n", done.stderr


def test_a_site_is_found_by_name_and_the_recipe_goes_before_it(tmp_path):
    file = tmp_path / "sites.toml"
    file.write_text('default = "one"\n[one.slurm]\naccount = "a"\npartition = "p"\n[two]\n')
    assert sites.find(None, None, file)[0] == "one"
    name, site = sites.find("one", SiteSection(slurm=SlurmSection(partition="q")), file)
    assert (name, site.slurm.account, site.slurm.partition) == ("one", "a", "q")
    assert sites.find("two", None, file)[1].slurm.account is None
    with pytest.raises(UserError, match="there is no site tow") as error:
        sites.find("tow", None, file)
    assert error.value.hint == "did you mean two?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[s.slurm]\nacount = 'x'", "sites.toml:2: slurm.acount: unknown key\n  hint: did you mean slurm.account?"),
        ("[s]\naccount = 'x'", "sites.toml:2: account: this key is now called slurm.account"),
        ("[s.environment]\nHF_TOKEN = 'x'", "environment.HF_TOKEN: a secret would be written"),
        ("[s.container]\nkind = 'docker'", "docker needs an image"),
        ("[s.mpi]\noptions = ['-x', 'WANDB_API_KEY=0123']", "mpi.options: holds a secret"),
        ("[s.slurm]\nsbatch = ['--export=HF_TOKEN=0123']", "sbatch: holds a secret"),
        ("[s.environment]\nPROXY = 'http://me:pw@proxy'", "environment.PROXY: holds a secret"),
        ("[s.environment]\n'A B' = 'x'", "may contain only"),
        ("s = 1", "there is no site s"),
    ],
)
def test_a_mistake_in_a_site_is_named(tmp_path, text, message):
    (tmp_path / "sites.toml").write_text(text)
    with pytest.raises(UserError) as error:
        sites.find("s", None, tmp_path / "sites.toml")
    assert message in str(error.value)


@pytest.mark.parametrize("on", ["local", "mpi", "slurm"])
def test_a_secret_on_the_command_line_reaches_the_job_and_no_file_that_others_can_read(tmp_path, monkeypatch, on):
    """The script is run by a real bash and a real starter; only the command itself is a program of ours."""
    monkeypatch.chdir(tmp_path)
    url = "postgresql://me:open/sesame@db.example/studies"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"""#!/bin/bash
        case "$3" in steelyard) printf "%s\\n" "$@" >"{tmp_path}/words" ;; *) exec {sys.executable} "$@" ;; esac
    """)
    runs_the_rest = '#!/bin/bash\nwhile [[ $1 == -* || $1 == ppr:* ]]; do shift; done; exec "$@"\n'
    for name in ("srun", "mpirun"):
        (tmp_path / name).write_text(runs_the_rest)
    for program in ("python", "srun", "mpirun"):
        (tmp_path / program).chmod(0o755)
    words = ["tune", "my.toml", "--storage", url]
    request = SubmitRequest(on, SiteSection(python=str(stand_in)), words=words)
    assert "sesame" not in json.dumps(preview(request))
    made = submit.prepare(request)
    process = {"pid": 1, "started": None, "host": "elsewhere"}
    submit.note(made, replace(submit.described(request, made), jobs=["1"], process=process))
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    subprocess.run(["bash", made.run / "launch" / "job.sh"], env=paths | {"SLURM_JOB_ID": "1"}, timeout=600, check=True)
    assert (tmp_path / "words").read_text().splitlines()[3:] == words
    holding = [file for file in made.run.rglob("*") if file.is_file() and b"sesame" in file.read_bytes()]
    assert [(file.name, file.stat().st_mode & 0o777) for file in holding] == [("command.json", 0o600)]


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = SubmitRequest("slurm", SiteSection(ranks_per_node=4), plan("parallel.data=4"), time_limit="1:00:00")
    result, text = preview(request)
    assert not list(tmp_path.iterdir())
    assert "--nodes=8" in result["lines"][0]
    assert "srun" in text
    json.dumps(result)


def test_a_sweep_is_every_combination():
    found = list(submit.combinations(["train.seed=[1, 2]", 'optim.name=["sgd", "adamw"]']))
    assert found[0] == ["train.seed=1", 'optim.name="sgd"']
    assert len(found) == 4
    with pytest.raises(UserError, match="is not a list of values"):
        submit.combinations(["train.seed=1"])


def test_the_tasks_of_an_array_keep_their_logs_apart_and_are_shown_before(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >words\necho 41\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    base = SubmitRequest("slurm", PLAIN, plan(), skip_checks=True)
    wanted = submit.array_requests(base, ["train.seed=[1, 2]"], lambda overrides: plan(*overrides))
    shown, text = submit.preview_array(wanted)
    assert not Path("runs").exists()
    results = submit.submit_array(wanted)
    assert shown["lines"] == [shlex.join(["sbatch", *Path("words").read_text().splitlines()])]
    assert shown["lines"][0] in text
    assert all(Path(name).read_text() == script for name, script in shown["scripts"].items())
    output = [word for word in Path("words").read_text().splitlines() if word.startswith("--output=")][-1]
    for number, each in enumerate(results):
        path = Path(output.removeprefix("--output=").replace("%a", str(number)).replace("%j", "9"))
        assert path.parent.resolve() == Path(each["run"]) / "logs"


def test_an_allocation_is_used_without_the_words_of_the_step_one_sits_in(monkeypatch):
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    found = slurm.environment()
    assert "SLURM_CPU_BIND" not in found
    assert found["SLURM_CONF"] == "/etc/slurm.conf"


def test_a_dry_run_names_the_folder_that_the_run_will_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = SubmitRequest("local", PLAIN, words=["doctor"], name="twice")
    for name in ("twice", "twice-2"):
        assert submit.preview(request)[0]["run"] == str(tmp_path / "runs" / name)
        assert submit.prepare(request).run == tmp_path / "runs" / name
