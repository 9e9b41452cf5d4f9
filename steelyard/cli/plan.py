"""`steelyard plan`: find the fastest, cheapest or most energy-efficient layout for a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, parse_count, print_result
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe, load_recipe, to_toml
from steelyard.core.run import Run

if TYPE_CHECKING:
    from steelyard.planning.cluster import Cluster
    from steelyard.planning.measured_layers import Profile
    from steelyard.planning.software import Software


class PlanObjective(StrEnum):
    """The objective that ranks plans."""

    time = "time"
    cost = "cost"
    energy = "energy"
    pareto = "pareto"


class Program(StrEnum):
    """The training program to predict."""

    steelyard = "steelyard"
    megatron = "megatron"
    megatron_deepspeed = "megatron-deepspeed"
    torchtitan = "torchtitan"
    torchtitan_async_tp = "torchtitan-async-tp"


ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")
]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="The cluster file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe.")
]


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the CLI."""
    group = typer.Typer(help=help_, rich_markup_mode=None, invoke_without_command=True)
    group.callback()(plan)
    group.command("cluster")(cluster)
    group.command("profile")(profile)
    group.command("measure")(measure)
    root.add_typer(group, name=name)


def plan(
    context: typer.Context,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    set_: SetOption = None,
    objective: Annotated[
        PlanObjective, typer.Option(help="What to minimize; pareto: the frontier of time and price.")
    ] = PlanObjective.time,
    top: Annotated[
        int, typer.Option(min=1, help="Number of plans to show; a Pareto frontier is shown completely.")
    ] = 10,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the recipe with the best plan.")] = None,
    excluded: Annotated[
        bool, typer.Option("--excluded", help="List layouts that do not fit, with the reason.")
    ] = False,
    given: Annotated[bool, typer.Option("--given", help="Predict the layout in the recipe, without a search.")] = False,
    software: Annotated[
        Program, typer.Option(help="The training program to predict; megatron: Megatron-LM of 2021 to 2023.")
    ] = Program.steelyard,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Token budget, such as 300B.")] = None,
    profiles: Annotated[
        list[Path] | None,
        typer.Option("--profile", metavar="FILE", help="Measured layers from `steelyard plan profile`."),
    ] = None,
    measured_files: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="FILE", help="Measured ranks from `steelyard plan measure`."),
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            "--expert-imbalance",
            min=1.0,
            metavar="X",
            help="Expert time of the busiest expert-parallel rank relative to an even load.",
        ),
    ] = 1.0,
    check: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Compare a finished run with its prediction, phase by phase.")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="With --check: calibrate plans of this cluster file with the run.")
    ] = False,
    calibration: Annotated[
        bool, typer.Option(help="Use the calibration that --check --store wrote beside the cluster file.")
    ] = True,
    explain: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pipeline timeline of the best plan as HTML.")
    ] = None,
    pareto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the Pareto frontier of time and price as HTML.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Rank the layouts of a recipe on a cluster and explain the best one. Layouts that do not fit are excluded.

    Example: steelyard plan --model gpt2-xl --cluster cluster.toml --write planned.toml
    """
    if context.invoked_subcommand is not None:
        return
    if cluster is None or (model is None and check is None):
        raise UserError(
            "a plan needs a recipe and a cluster",
            hint="steelyard plan --model RECIPE --cluster CLUSTER.toml, or steelyard plan --help",
        )
    from steelyard.planning import cluster as clusters
    from steelyard.planning import plan_pages, plan_report, site_calibration
    from steelyard.planning.search import given as predicted
    from steelyard.planning.search import search
    from steelyard.planning.software import KNOWN

    machines = clusters.load(cluster)
    if check is not None:
        from steelyard.planning import prediction_check as checking

        if model is not None or software is not Program.steelyard:
            hint = "remove --model and --software"
            raise UserError("--check reads the recipe from the run, which Steelyard trained", hint=hint)
        if store and (profiles or measured_files):
            hint = "remove --profile and --measured: a plan uses a calibration where it has neither"
            raise UserError("--store calibrates a prediction without measurements", hint=hint)
        recipe = Run.open(check).recipe()
        layers = [_profile(path, recipe, machines) for path in profiles or ()]
        measured_machines = _with_ranks(machines, recipe, measured_files or (), KNOWN["steelyard"])
        stored = site_calibration.load(site_calibration.path_beside(cluster)) if calibration else None
        compared = checking.compare(check, measured_machines, layers, stored.runs if stored is not None else ())
        result = checking.as_result(compared)
        if store:
            result["stored"] = [run.model_dump() for run in checking.store(compared, machines, cluster)]
        return print_result(result, json, checking.as_text(compared))
    recipe, program = load_recipe(str(model), set_ or ()), KNOWN[software.value]
    machines = site_calibration.applied(machines, cluster, program.name) if calibration else machines
    machines = _with_ranks(machines, recipe, measured_files or (), program)
    budget = (
        parse_count("--tokens", "tokens", tokens)
        if tokens is not None
        else recipe.train.samples_in(recipe.train.steps) * recipe.data.sequence_length
    )
    if pareto is not None and objective not in (PlanObjective.time, PlanObjective.pareto):
        raise UserError(f"--pareto compares time and price, not {objective.value}", hint="remove --objective")
    wanted = PlanObjective.pareto if pareto is not None else objective
    machines.check_objective(wanted.value)
    measured = [_profile(path, recipe, machines) for path in profiles or ()]
    if measured and program is not KNOWN["steelyard"]:
        console.say("--profile has Steelyard's layers: only its rates of products, copies and links count")
    if given:
        found = predicted(recipe, machines, program, measured, imbalance)
        for _, why in found.excluded:
            console.warn(f"this layout does not fit: {why}")
    else:
        found = search(recipe, machines, wanted.value, top, None, program, measured, imbalance)
    if not found.plans:
        why = ""
        if found.nearest is not None:
            why = f"; the nearest miss is {plan_report.shown(found.nearest[1])}: {found.nearest[2]}"
        raise RuntimeFailure(
            f"no layout of {recipe.name} fits {cluster}: {found.looked_at} layouts were tried{why}",
            hint="use more or larger GPUs, a shorter data.sequence_length, or --set optim.offload=true",
        )
    request = plan_report.PlanRequest(
        recipe, machines, budget, wanted.value, program, measured, imbalance, given, excluded
    )
    result = plan_report.as_result(request, found)
    result |= {"software": software.value, "calibration": machines.evidence.calibration or None}
    if write is not None:
        files.write_text(write, to_toml(found.plans[0].layout.written(recipe).settings()))
        ranks = found.plans[0].layout.world
        console.say(f"wrote {write}: steelyard train {write} --nproc {ranks}, or steelyard submit {write}")
        result["written"] = str(write)
    if explain is not None:
        files.write_text(explain, plan_pages.pipeline(request, found.plans[0]))
        result["explained"] = str(explain)
    if pareto is not None:
        files.write_text(pareto, plan_pages.frontier(request, found.plans))
        result["frontier"] = str(pareto)
    print_result(result, json, plan_report.as_text(request, found))


def _with_ranks(machines: Cluster, recipe: Recipe, measured: Sequence[Path], program: Software) -> Cluster:
    """The cluster with measured ranks."""
    from steelyard.planning import measured_ranks
    from steelyard.planning.evidence import OWN

    if not measured:
        return machines
    if program.name != OWN:
        raise UserError(
            f"--measured: these ranks ran Steelyard, but the plan is for {program.name}",
            hint="remove --measured or --software; host_operation_us of the file can be set in the cluster file",
        )
    files_read = [measured_ranks.load(each) for each in measured]
    for each, read in zip(measured, files_read, strict=True):
        measured_ranks.refuse_another(read, recipe, each, machines)
    machines = measured_ranks.with_measured_hosts(files_read, machines)
    return machines.with_evidence(measured_ranks.evidence_of(files_read, recipe, machines))


def _profile(path: Path, recipe: Recipe, machines: Cluster) -> Profile:
    from steelyard.planning import measured_layers as measured

    read = measured.load(path)
    measured.refuse_another(read, recipe, path, machines)
    return read


def cluster(
    source: Annotated[
        str, typer.Option("--from", metavar="SOURCE", help="slurm, or a file with saved output of sinfo.")
    ] = "slurm",
    out: Annotated[Path | None, typer.Option(help="Write the cluster file to this path.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Write a cluster file from the nodes that Slurm reports, and list every guess in it.

    Example: steelyard plan cluster --from slurm --out cluster.toml
    """
    from steelyard.planning import slurm_cluster

    nodes = slurm_cluster.nodes(slurm_cluster.ask() if source == "slurm" else slurm_cluster.read(Path(source)))
    text = slurm_cluster.as_toml(nodes)
    if out is not None:
        files.write_text(out, text)
        console.say(f"wrote {out}: fill in links and prices")
    guesses = slurm_cluster.guesses(nodes)
    for guess in guesses:
        console.warn(guess)
    result = {"nodes": nodes, "guesses": guesses, "out": str(out) if out else None}
    print_result(result, json, text.rstrip() if out is None else "")


def profile(
    model: Annotated[
        str, typer.Option("--model", metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")
    ],
    set_: SetOption = None,
    tensor: Annotated[str, typer.Option(help="Tensor degrees to measure, such as 1,2,4.")] = "1",
    micro_batch: Annotated[str, typer.Option(help="Micro-batches to measure, such as 1,2,4.")] = "1,2,4",
    links: Annotated[bool, typer.Option(help="Also measure the link between two ranks of this machine.")] = True,
    out: Annotated[Path, typer.Option(help="Write the profile to this path.")] = Path("profile.toml"),
    json: JsonOption = False,
) -> None:
    """Measure layers, matrix products, copies and links on this machine, for `steelyard plan --profile`.

    It takes at most about a minute; the output names what was left out for lack of time.

    Example: steelyard plan profile --model llama3.1-8b --tensor 1,2,4 --out h100.toml
    """
    began = time.monotonic()  # The import of torch is part of the command's time.
    from steelyard.training.layer_profile import measure

    recipe = load_recipe(model, set_ or ())
    degrees, sizes = _numbers("--tensor", tensor), _numbers("--micro-batch", micro_batch)
    measured = measure(recipe, degrees, sizes, links, began=began)
    files.write_text(out, to_toml(measured))
    rows = [f"tensor {one['tensor']}, micro-batch {one['micro_batch']}: forward {1e3 * one['forward']:.3f} ms, "
            f"backward {1e3 * one['backward']:.3f} ms" for one in measured["layers"]]  # fmt: skip
    console.say(f"wrote {out}")
    rows += [f"{name.replace('_', ' ')}: {rate:.4g}" for name, rate in measured["rates"].items()]
    rows += [f"left out for lack of time: {what}" for what in measured["left_out"]]
    print_result(measured | {"out": str(out)}, json, "\n".join([measured["device"], *rows]))


def measure(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job.  [default: the smallest for the plan]")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks to measure, one after the other, such as 0,7.")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure after the warm-up.")] = 5,
    imbalance: Annotated[
        float,
        typer.Option(
            "--expert-imbalance",
            min=1.0,
            metavar="X",
            help="Slots that a rank receives, relative to those it sends.",
        ),
    ] = 1.0,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also profile one step of each rank; its traces are kept here.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the measurement to this path.")] = Path("measured.json"),
    json: JsonOption = False,
) -> None:
    """Run real steps of one rank of a layout on this machine: compute time by phase, and peak memory.

    The rank has its stage, shards and batch; collectives take no time. The file is for `steelyard plan --measured`.

    Example: steelyard plan measure llama3.1-70b parallel.tensor=8 parallel.pipeline=8 --world 512 --ranks 0,448
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler, which counts the memory of a CPU, is silent
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from steelyard.observe.profile import summary, trace_cache
    from steelyard.planning import measured_ranks
    from steelyard.training import rank_measure

    loaded = load_recipe(recipe, overrides or ())
    size = loaded.parallel.least_world if world is None else world
    chosen = _numbers("--ranks", ranks, 0)
    if profile is not None:
        try:  # Before the measurement, which may take minutes.
            profile.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"--profile: {profile} is not a folder", hint="give a folder, or a new path") from None
    result = measured_ranks.with_prediction(
        rank_measure.measure(loaded, size, chosen, steps, imbalance, profile), loaded
    )
    lines = [measured_ranks.as_text(result)]
    if profile is not None:
        traces = trace_cache.traces_in(profile)
        names = [f"torch-rank-{rank:05d}.json.gz" for rank in chosen]
        looks, problems = trace_cache.read_all({name: traces[name] for name in names})
        # What looks like communication in the trace fills buffers with values in place of those of other ranks.
        looks = [replace(each, communication=0.0, overlapped=0.0) for each in looks]
        lines += ["", "one more step, profiled:", *summary.reported(looks), *problems]
        result["profiles"] = [each.as_result() for each in looks]
    files.write_json(out, result)
    console.say(f"wrote {out}")
    print_result(result | {"out": str(out)}, json, "\n".join(lines))


def _numbers(option: str, text: str, least: int = 1) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise UserError(f"{option}: {text} is not a list of numbers", hint="use a form like 1,2,4")
    return [int(part) for part in parts]
