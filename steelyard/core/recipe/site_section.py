"""`[site]`: the place where a run is to run. A table of the user's `sites.toml`, or a section of the recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.core.recipe.section import Degree, NonNegativeInt, Section, contradiction, refuse_secrets
from steelyard.core.secrets import is_secret_name

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Port = Annotated[int, Field(gt=0, lt=65536)]


class ContainerSection(Section):
    """What the ranks run inside."""

    kind: Literal["none", "apptainer", "singularity", "enroot", "pyxis", "docker", "podman"] = "none"
    image: str = Field("", description="a file, or a name that the runtime understands")
    binds: list[str] = Field([], description='folders to show inside, like "/data" or "/data:/mnt/data"')
    python: str = Field("python3", description="the Python inside that has steelyard")
    options: list[str] = Field([], description="further words for the runtime")
    unpack: str | None = Field(None, description="a folder on each node where the image is unpacked once and reused")

    @model_validator(mode="after")
    def _has_image(self) -> ContainerSection:
        if self.kind != "none" and not self.image:
            raise contradiction("container.image", f"{self.kind} needs an image", "name a file or an image")
        return self


class MpiSection(Section):
    """How mpirun reaches the hosts."""

    mpirun: str = "mpirun"
    hosts: list[str] = Field([], description="in rank order; the first has rank 0")
    slots: Degree | None = Field(None, description="written behind each host; left out: the ranks per node")
    cpus_per_rank: Degree | None = None
    ssh_port: Port | None = None
    ssh_options: list[str] = Field([], description='like "-o StrictHostKeyChecking=no"')
    options: list[str] = Field([], description="further words for mpirun")


class SlurmSection(Section):
    """What Slurm is asked for."""

    account: str | None = None
    partition: str | None = Field(None, description="where the plan names none")
    gres: str | None = Field(None, description='where the plan names none, like "gpu:a10:4"')
    sbatch: list[str] = Field([], description='further options of sbatch, like "--qos=long"')
    time_limit: str | None = Field(None, description="as Slurm writes it, like 24:00:00")
    memory: str | None = Field(None, description="of each node, like 200G")
    cpus_per_rank: Degree | None = Field(None, description="left out: 4 beside a GPU, 1 without")
    heterogeneous: Literal["one-job", "several-jobs"] = Field(
        "one-job", description="several-jobs: a master and followers, where a site forbids heterogeneous jobs"
    )
    requeue: bool = Field(True, description="go on after a time limit, a pre-emption or a lost node")
    warning_seconds: NonNegativeInt = Field(120, description="before the time limit, for saving")
    max_restarts: NonNegativeInt = 100


class SiteSection(Section):
    """What a place needs, said once."""

    modules: list[str] = Field([], description="environment modules to load")
    environment: dict[Variable, str] = Field({}, description="variables for every rank; secrets belong in the shell")
    prepend: dict[Variable, list[str]] = Field({}, description="folders to put before those of a variable like PATH")
    workdir: str | None = Field(None, description="where commands run; left out: where they are submitted")
    python: str | None = Field(None, description="the Python that has steelyard; left out: the one that submits")
    ranks_per_node: Degree | None = Field(None, description="where the plan names no nodes")
    port: Port | None = Field(None, description="where ranks meet; left out: a free one")
    container: ContainerSection = ContainerSection()
    mpi: MpiSection = MpiSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _holds_no_secret(self) -> SiteSection:
        for name in self.environment:
            if is_secret_name(name):
                raise contradiction(
                    f"environment.{name}", "a secret would be written into scripts and logs",
                    "set it in the shell that submits: jobs inherit it",
                )  # fmt: skip
        refuse_secrets(self)
        return self
