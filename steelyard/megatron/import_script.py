"""Converts launch scripts to a recipe: interprets them, finds the training command, and accounts for every flag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe.load import problems
from steelyard.megatron import expert_flags, model_flags, parallel_flags, sparsity_flags, tool_commands, training_flags
from steelyard.megatron.cli_args import DroppedFlag, Given, canonical
from steelyard.megatron.flag_table import SHAPES, VARIABLES
from steelyard.megatron.recipe_draft import Draft
from steelyard.megatron.shell import interpreter, symbolic
from steelyard.megatron.shell.shell_state import Command, ShellState

MOST_PROBLEMS = 20
TRAINING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--train-iters", "--train-samples", "--seq-length"}


@dataclass
class ImportResult:
    """The result of a conversion: a recipe (None if nothing trains), commands, and flags and questions for the user.

    `unsound` has the keys that are commented out in the recipe, with the reason.
    """

    recipe: str | None = None
    written: dict[str, Any] | None = None
    commands: list[str] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)
    left: list[DroppedFlag] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsound: dict[str, str] = field(default_factory=dict)
    where: str = ""


def read(
    scripts: Sequence[Path],
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    sgd: str | None = None,
    count: model_flags.Count = lambda tokenizer: None,
) -> ImportResult:
    """Convert launch scripts, read in order; `arguments` are their `$1`, `$2`, ..."""
    state = interpreter.follow(scripts, arguments, environment or {}, lambda state: bool(_trainings(state)))
    imported = ImportResult(notes=state.notes)
    trainings = _trainings(state)
    for command in state.commands:
        tool, _, flags = tool_commands.program_of(command.words)
        if tool in tool_commands.TOOLS:
            _tool(imported, command, tool, flags)
    training = _chosen(state, trainings)
    if training is None and not imported.commands:
        raise _nothing(state, scripts)
    if training is not None:
        draft = Draft(training.given(state))
        _write(draft, training.program, parallel_flags.world(training.launchers, state.variables), sgd, count)
        parallel_flags.account(training.launchers, imported.left, imported.carried)
        if not trainings:
            others = "also give the script that starts the training, so that its flags are not missing"
            draft.ask(f"{scripts[0]} starts no training: {others}")
        elif not training.program and not parallel_flags.names_nodes(state.variables):
            draft.ask("the number of nodes is not given: one is assumed")
        _finish(imported, draft, scripts)
    return imported


def _trainings(state: ShellState) -> list[TrainingCommand]:
    found = []
    for command in state.commands:
        tool, before, flags = tool_commands.program_of(command.words)
        if tool not in tool_commands.TOOLS and (
            tool.startswith("pretrain")
            or TRAINING & {canonical(word.partition("=")[0]) for word in flags}
            or (tool == "" and not before and flags[0][:2] == "--")
        ):
            found.append(TrainingCommand(command.where, tool, [*command.launchers, before], flags))
    return found


def _tool(imported: ImportResult, command: Command, tool: str, words: list[str]) -> None:
    given = Given(command.where)
    given.add(words)
    imported.commands.append(tool_commands.TOOLS[tool](given))
    given.close()
    imported.left += given.left
    imported.carried |= given.carried_as_written()


@dataclass(frozen=True)
class TrainingCommand:
    """A training command, or flags without a command; then `program` is empty."""

    where: str
    program: str
    launchers: list[list[str]]
    flags: list[str]

    def given(self, state: ShellState) -> Given:
        """The flags of the command; for a configuration file, its variables."""
        given = Given(self.where, files=state.files)
        given.add(self.flags)
        if not self.program:
            _variables(state, given)
        return given


def _chosen(state: ShellState, trainings: list[TrainingCommand]) -> TrainingCommand | None:
    """The first training command, or all lines of flags together, or the flags in arrays and variables."""
    started = [training for training in trainings if training.program]
    for other in started[1:]:
        if other.flags != started[0].flags:
            state.notes.append(f"{other.where}: another training command, ignored: the first one is converted")
    if started:
        return started[0]
    if trainings:
        flags = [flag for training in trainings for flag in training.flags]
        return TrainingCommand(trainings[0].where, "", trainings[0].launchers, flags)
    if state.exited or state.missing:
        return None
    arrays = [flag for value in state.variables.values() for flag in _flags_in(value)]
    named = set(VARIABLES) & set(state.variables)
    return TrainingCommand(state.file, "", state.launchers, arrays) if named or TRAINING & set(arrays) else None


def _flags_in(value: str | list[str]) -> list[str]:
    words = symbolic.fields(value) if isinstance(value, str) else value
    return words if words and words[0].startswith("--") else []


def _variables(state: ShellState, given: Given) -> None:
    """Read a configuration file without a command: known variables become flags, all others go to `left`."""
    known = {name: value for name, value in state.variables.items() if isinstance(value, str) and not _flags_in(value)}
    named = {VARIABLES[name]: value for name, value in known.items() if name in VARIABLES and value}
    model = SHAPES.get(known.get("MODEL", "").lower(), {})
    if not named:
        return
    if model:
        sizes = ", ".join(f"{flag[2:]} {value}" for flag, value in model.items())
        state.note(f"MODEL={known['MODEL']} is assumed to be FASOP's: {sizes}")
    for flag, value in (model | named).items():
        if not given.has(flag):
            given.add([flag, value])
            given.spelled[flag] = next(
                (name for name, known_as in VARIABLES.items() if known_as == flag and name in known), "MODEL"
            )
    counted = {name for pair in parallel_flags.VARIABLES for name in pair} | {"WORLD_SIZE", "DP_SIZE", *VARIABLES}
    for name, value in known.items():
        if name not in counted and not name.startswith("SLURM_") and not (name == "MODEL" and model):
            given.left.append(DroppedFlag(name, symbolic.shown(value), "a variable that is not a known flag"))


def _write(draft: Draft, program: str, ranks: int | None, sgd: str | None, count: model_flags.Count) -> None:
    model_flags.model(draft, program)
    config = parallel_flags.deepspeed(draft)
    training_flags.plain(draft)
    parallel_flags.parallel(draft, ranks, config)
    model_flags.vocabulary(draft, count)
    training_flags.data(draft)
    parallel_flags.batch(draft)
    expert_flags.experts(draft)
    training_flags.train(draft, config)
    training_flags.optim(draft, sgd)
    training_flags.checkpoint(draft)
    training_flags.watching(draft)
    sparsity_flags.sparsity(draft)
    draft.close()


def _finish(imported: ImportResult, draft: Draft, scripts: Sequence[Path]) -> None:
    """Write the recipe. Keys that do not pass the validation of any other recipe are commented out."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", scripts[-1].stem).strip("-._")[:100] or "recipe"
    head = [f"From {' '.join(script.name for script in scripts)}, by steelyard recipe from-megatron."]
    head += ["Before training:", *(f"    {command}" for command in imported.commands)] if imported.commands else []
    _comment_out_unsound(draft, name)
    draft.settle()
    imported.recipe = draft.toml(name, head)
    imported.written = {"name": name} | draft.kept()
    imported.left += draft.given.left
    imported.carried |= draft.given.carried_as_written()
    imported.questions += draft.questions
    imported.unsound = {key: reason for key, (_, reason) in draft.unsound.items()}
    imported.where = draft.given.where


def _comment_out_unsound(draft: Draft, name: str) -> None:
    """Validate the recipe, and reject the keys of its problems until there is none, or none that a key explains."""
    for _ in range(MOST_PROBLEMS):
        values = draft.kept()
        values["model"]["family"] = draft.get("model.family")  # If it is unsound: the other keys depend on it.
        found = problems({"name": name} | values)
        keys = {key: _setting(draft, key) for key, _, _ in found}
        for key, message, _ in found:
            if (setting := keys[key]) and setting not in draft.unsound:
                draft.reject(setting, draft.get(setting), message)
        if not any(keys.values()):
            missing = [(key, message) for key, message, _ in found if key not in draft.unsound]
            for key, message in [] if draft.unsound else missing:  # A default that does not fit.
                draft.reject(key, None, message)
            return


def _setting(draft: Draft, key: str) -> str:
    """The setting that a key belongs to (`data.train` for `data.train.0.weight`); "" if it is not set."""
    setting = ".".join(key.split(".")[:2])
    return setting if draft.get(setting) is not None and setting not in draft.unsound else ""


def _nothing(state: ShellState, scripts: Sequence[Path]) -> UserError:
    notes = "\n  ".join(state.notes)
    return UserError(
        "there is no Megatron command with flags in this script" + (f"\n  {notes}" if notes else ""),
        where=str(scripts[-1]),
        hint="give the script that starts pretrain_gpt.py, preprocess_data.py or convert.py; its arguments after --",
    )
