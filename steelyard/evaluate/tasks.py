"""Benchmark tasks with lm-eval, which uses a Steelyard model as its backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.evaluate.generation import Writer


@dataclass(frozen=True)
class TaskOptions:
    """The options for lm-eval."""

    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    include: str | None = None


def check_installed() -> None:
    """Raise an error if lm-eval is missing, before a model is loaded."""
    try:
        import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"tasks need lm-eval, which cannot be imported: {error}", hint="pip install 'steelyard[eval]'"
        ) from None


def run(writer: Writer, names: Sequence[str], options: TaskOptions) -> dict[str, Any]:
    """Score a model on tasks. Returns lm-eval's metrics by task."""
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from steelyard.evaluate.lm_eval_backend import LmEvalModel

    broken = _broken(Path(options.include)) if options.include is not None else {}
    manager = TaskManager(include_path=options.include)
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown and broken:
        reported = "\n  ".join(f"{path}: {reason}" for path, reason in broken.items())
        raise UserError(f"there is no task {', '.join(unknown)} in the valid files of --include:\n  {reported}")
    if unknown:
        raise UserError(f"lm-eval has no task {', '.join(unknown)}", hint="see lm-eval ls tasks, or add --include DIR")
    for path, reason in broken.items():
        console.warn(f"{path}: {reason}; its task is skipped")
    found = simple_evaluate(
        model=LmEvalModel(writer, options.batch),
        tasks=list(names),
        num_fewshot=options.shots,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return {
        "tasks": {name: _plain(metrics) for name, metrics in found["results"].items()},
        "versions": found["versions"],
        "shots": found["n-shot"],
        "samples": {name: count["effective"] for name, count in found["n-samples"].items()},
    }


def _broken(folder: Path) -> dict[Path, str]:
    """Task files that cannot be read, and why. lm-eval skips them silently.

    They are parsed but not built: Python code that a file names is not run.
    """
    yaml: Any = import_module("yaml")  # A dependency of lm-eval.
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", where="--include")
    broken = {}
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            found = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            broken[path] = f"{line}{error.problem or error.context}"
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            broken[path] = str(error).splitlines()[0]
        else:
            if not isinstance(found, yaml.MappingNode):
                broken[path] = "it is not a table of settings"
            elif missing := [name for name in _included(found) if not (path.parent / name).is_file()]:
                broken[path] = f"it includes {missing[0]}, which does not exist"
    return broken


def _included(settings: Any) -> list[str]:
    """The files that a task file includes."""
    found = next((value for key, value in settings.value if key.value == "include"), None)
    inner = [] if found is None else found.value if isinstance(found.value, list) else [found]
    return [str(node.value) for node in inner]


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics by name, without the suffix of the default filter, which every task has."""
    return {
        key.removesuffix(",none"): value
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and "," in key
    }


def as_text(result: dict[str, Any]) -> str:
    """One line per metric of each task, with its standard error."""
    lines = []
    for task, metrics in result["tasks"].items():
        for name, value in metrics.items():
            if "_stderr" in name:
                continue
            metric, _, filter_ = name.partition(",")
            error = metrics.get(f"{metric}_stderr" + (f",{filter_}" if filter_ else ""))
            spread = f" ± {error:.4f}" if error is not None else ""
            lines.append(f"{task:<24} {name:<16} {value:.4f}{spread}  ({result['samples'].get(task, '?')} samples)")
    return "\n".join(lines)
