"""Many recipes that differ in a few keys, as one Slurm array: `--array 'optim.learning_rate=[1e-4, 3e-4]'`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.toml import parse_value
from steelyard.launch import job_script, slurm
from steelyard.launch.job_spec import JobSpec
from steelyard.launch.launch_record import FOLDER, Launch
from steelyard.launch.submit import SubmitRequest, described, groups_of, intended, note, planned, prepare


def requests(base: SubmitRequest, array: Sequence[str], load: Callable[[list[str]], Recipe]) -> list[SubmitRequest]:
    """One request for each combination of values, with a name of its own."""
    if base.recipe is None or base.on != "slurm" or base.job is not None:
        raise UserError("--array is for recipes on Slurm", hint="use --on slurm, or steelyard tune for searches")
    name, run = base.name or base.recipe.name, base.run
    return [
        replace(
            base,
            recipe=load(overrides),
            name=f"{name}-{number}",
            run=None if run is None else run.with_name(f"{run.name}-{number}"),
        )
        for number, overrides in enumerate(combinations(array))
    ]


def combinations(array: Sequence[str]) -> Iterator[list[str]]:
    """Every choice of one value for each key, as overrides of a recipe."""
    axes = []
    for word in array:
        key, separator, text = word.partition("=")
        values = parse_value(text.strip())
        if not separator or not isinstance(values, list) or not values:
            raise UserError(f"{word!r} is no list of values", hint="write KEY=[A, B], like 'train.seed=[1, 2, 3]'")
        axes.append([f"{key.strip()}={json.dumps(value)}" for value in values])
    return (list(choice) for choice in itertools.product(*axes))


def preview(all_: list[SubmitRequest]) -> tuple[dict[str, Any], str]:
    """What would be run, exactly; nothing is written or started."""
    _refuse_shapes(all_)
    orders = [planned(request) for request in all_]
    scripts = {str(_path(orders)): _script(orders)}
    scripts |= {str(order.run / FOLDER / slurm.script_name(None)): slurm.text(order) for order in orders}
    line = join(_line(orders))
    result = {"runs": [{"run": str(order.run), "jobs": []} for order in orders], "lines": [line], "scripts": scripts}
    return result, "\n".join([line, "", *(f"# {name}\n{text}" for name, text in scripts.items())])


def _refuse_shapes(all_: list[SubmitRequest]) -> None:
    shapes = {tuple(groups_of(request)) for request in all_}
    if len(shapes) > 1 or any(len(shape) > 1 for shape in shapes):
        raise UserError(
            "the jobs of an array need nodes of one kind, and the same number of them", hint="submit them one by one"
        )


def sweep(all_: list[SubmitRequest]) -> list[dict[str, Any]]:
    """Hand all of them to Slurm as one array, each with a run folder of its own."""
    _refuse_shapes(all_)
    orders = [prepare(request) for request in all_]
    files.write_text(_path(orders), _script(orders))
    for number, order in enumerate(orders):
        task = orders[0].run / FOLDER / f"task-{number}"
        task.unlink(missing_ok=True)
        task.symlink_to(order.run)
    pairs = list(enumerate(zip(all_, orders, strict=True)))
    launches = [described(request, order, [], None) for _, (request, order) in pairs]
    with intended({order.run: _task(launches[number], orders, number) for number, (_, order) in pairs}):
        job = slurm.ask(_line(orders))
    return [note(request, order, [f"{job}_{number}"], None) for number, (request, order) in pairs]


def _path(orders: list[JobSpec]) -> Path:
    return orders[0].run / FOLDER / "array.sh"


def _line(orders: list[JobSpec]) -> list[str]:
    """sbatch's line. Slurm's own words about a task belong to its run: `task-%a` leads there."""
    folder = str(orders[0].run / FOLDER).replace("%", "%%")
    output = f"--output={folder}/task-%a/logs/slurm-%j.log"
    return [*slurm.sbatch(orders[0]), output, f"--array=0-{len(orders) - 1}", str(_path(orders)), orders[0].mark]


def _task(launch: Launch, orders: list[JobSpec], number: int) -> Launch:
    """The launch of one task, which is known by the mark of all."""
    return replace(launch, marks=[f"{orders[0].mark}_{number}"])


def _script(orders: list[JobSpec]) -> str:
    """Which task runs which script."""
    cases = "".join(
        f'{number}) exec bash {quote(str(order.run / FOLDER / slurm.script_name(None)))} "$1_{number}" ;;\n'
        for number, order in enumerate(orders)
    )
    return f'{job_script.HEAD}case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'
