"""`[site]`: the cluster or host that a job runs on. A table of the user's `sites.toml`, or a section of the recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.core.recipe.section import Degree, NonNegativeInt, Section, contradiction, refuse_secrets
from steelyard.core.secrets import is_secret_name

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Port = Annotated[int, Field(gt=0, lt=65536)]


class ContainerSection(Section):
    """The container of the ranks."""

    kind: Literal["none", "apptainer", "singularity", "enroot", "pyxis", "docker", "podman"] = "none"
    image: str = Field("", description="an image file, or an image name of the runtime")
    binds: list[str] = Field([], description='bind mounts, like "/data" or "/data:/mnt/data"')
    python: str = Field("python3", description="the Python of the image that has steelyard")
    options: list[str] = Field([], description="further arguments of the runtime")
    unpack: str | None = Field(None, description="a folder on each node where the image is unpacked once and reused")

    @model_validator(mode="after")
    def _has_image(self) -> ContainerSection:
        if self.kind != "none" and not self.image:
            raise contradiction("container.image", f"{self.kind} needs an image", "give an image file or name")
        return self


class MpiSection(Section):
    """The hosts and options of mpirun."""

    mpirun: str = "mpirun"
    hosts: list[str] = Field([], description="in rank order; the first has rank 0")
    slots: Degree | None = Field(None, description="slots of each host; default: the ranks per node")
    cpus_per_rank: Degree | None = None
    ssh_port: Port | None = None
    ssh_options: list[str] = Field([], description='like "-o StrictHostKeyChecking=no"')
    options: list[str] = Field([], description="further arguments of mpirun")


class SlurmSection(Section):
    """Resources and options of Slurm jobs."""

    account: str | None = None
    partition: str | None = Field(None, description="if the plan has none")
    gres: str | None = Field(None, description='if the plan has none, like "gpu:a10:4"')
    sbatch: list[str] = Field([], description='further options of sbatch, like "--qos=long"')
    time_limit: str | None = Field(None, description="in Slurm's format, like 24:00:00")
    memory: str | None = Field(None, description="of each node, like 200G")
    cpus_per_rank: Degree | None = Field(None, description="default: 4 with a GPU, 1 without")
    heterogeneous: Literal["one-job", "several-jobs"] = Field(
        "one-job", description="several-jobs: a master and followers, if a site forbids heterogeneous jobs"
    )
    requeue: bool = Field(True, description="requeue after a time limit, a preemption or a node failure")
    warning_seconds: NonNegativeInt = Field(120, description="time before the limit, for saving a checkpoint")
    max_restarts: NonNegativeInt = 100


class SiteSection(Section):
    """The settings of a site: modules, environment, container, MPI and Slurm."""

    modules: list[str] = Field([], description="environment modules to load")
    environment: dict[Variable, str] = Field({}, description="variables for every rank; secrets belong in the shell")
    prepend: dict[Variable, list[str]] = Field({}, description="folders to prepend to a variable like PATH")
    workdir: str | None = Field(None, description="working directory; default: where the job is submitted")
    python: str | None = Field(None, description="the Python that has steelyard; default: the one that submits")
    ranks_per_node: Degree | None = Field(None, description="if the plan has no nodes")
    port: Port | None = Field(None, description="rendezvous port; default: a free one")
    container: ContainerSection = ContainerSection()
    mpi: MpiSection = MpiSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _holds_no_secret(self) -> SiteSection:
        for name in self.environment:
            if is_secret_name(name):
                raise contradiction(
                    f"environment.{name}", "a secret would be written into scripts and logs",
                    "set it in the shell that submits the job: jobs inherit it",
                )  # fmt: skip
        refuse_secrets(self)
        return self
