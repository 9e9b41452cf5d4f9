"""Converts launch scripts to a recipe: interprets them, finds the training command, and accounts for every flag."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.megatron import model_flags, parallel_flags, sparsity_flags, tool_commands, training_flags
from steelyard.megatron.cli_args import DroppedFlag, Given
from steelyard.megatron.flag_table import SHAPES, VARIABLES
from steelyard.megatron.recipe_draft import Draft
from steelyard.megatron.shell import interpreter, symbolic
from steelyard.megatron.shell.shell_state import Command, ShellState

TRAINING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--train-iters", "--train-samples", "--seq-length"}


@dataclass
class Reading:
    """The result of a conversion: a recipe (None if nothing trains), commands, and flags and questions for the user."""

    recipe: str | None = None
    written: dict[str, Any] | None = None
    commands: list[str] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)
    left: list[DroppedFlag] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(
    scripts: Sequence[Path],
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    sgd: str | None = None,
    count: model_flags.Count = lambda tokenizer: None,
) -> Reading:
    """Convert launch scripts, read in order; `arguments` are their `$1`, `$2`, ..."""
    state = interpreter.follow(scripts, arguments, environment or {})
    reading = Reading(notes=state.notes)
    trainings = []
    for command in state.commands:
        tool, before, flags = tool_commands.program_of(command.words)
        if tool in tool_commands.TOOLS:
            _tool(reading, command, tool, flags)
        elif (
            tool.startswith("pretrain")
            or TRAINING & {word.partition("=")[0] for word in flags}
            or (tool == "" and not before and flags[0][:2] == "--")
        ):
            trainings.append(TrainingCommand(command.where, tool, [*command.launchers, before], flags))
    training = _chosen(state, trainings)
    if training is None and not reading.commands:
        raise _nothing(state, scripts)
    if training is not None:
        draft = Draft(training.given(state))
        _write(draft, training.program, parallel_flags.world(training.launchers, state.variables), sgd, count)
        parallel_flags.account(training.launchers, reading.left, reading.carried)
        if not trainings:
            others = "also give the script that starts the training, so that its flags are not missing"
            draft.ask(f"{scripts[0]} starts no training: {others}")
        elif not training.program and not parallel_flags.names_nodes(state.variables):
            draft.ask("the number of nodes is not given: one is assumed")
        _finish(reading, draft, scripts)
    return reading


def _tool(reading: Reading, command: Command, tool: str, words: list[str]) -> None:
    given = Given(command.where)
    given.add(words)
    reading.commands.append(tool_commands.TOOLS[tool](given))
    given.close()
    reading.left += given.left
    reading.carried |= given.carried_as_written()


@dataclass(frozen=True)
class TrainingCommand:
    """A training command, or flags without a command; then `program` is empty."""

    where: str
    program: str
    launchers: list[list[str]]
    flags: list[str]

    def given(self, state: ShellState) -> Given:
        """The flags of the command; for a configuration file, its variables."""
        given = Given(self.where)
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
        if name not in counted and not (name == "MODEL" and model):
            given.left.append(DroppedFlag(name, symbolic.shown(value), "a variable that is not a known flag"))


def _write(draft: Draft, program: str, ranks: int | None, sgd: str | None, count: model_flags.Count) -> None:
    model_flags.model(draft, program)
    config = parallel_flags.deepspeed(draft)
    training_flags.plain(draft)
    parallel_flags.parallel(draft, ranks, config)
    model_flags.vocabulary(draft, count)
    training_flags.data(draft)
    parallel_flags.batch(draft)
    training_flags.train(draft)
    training_flags.optim(draft, sgd)
    training_flags.checkpoint(draft)
    training_flags.watching(draft)
    sparsity_flags.sparsity(draft)
    draft.close()


def _finish(reading: Reading, draft: Draft, scripts: Sequence[Path]) -> None:
    """Write the recipe, and validate it like any other recipe before it is shown."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", scripts[-1].stem).strip("-._")[:100] or "recipe"
    head = [f"From {' '.join(script.name for script in scripts)}, by steelyard recipe from-megatron."]
    head += ["Before training:", *(f"    {command}" for command in reading.commands)] if reading.commands else []
    reading.recipe = draft.toml(name, head)
    reading.written = {"name": name} | draft.settings
    reading.left += draft.given.left
    reading.carried |= draft.given.carried_as_written()
    reading.questions += draft.questions
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.toml"
        path.write_text(reading.recipe, encoding="utf-8")
        try:
            load_recipe(path)
        except UserError as error:
            problem = str(error).replace(f"{path}", "the recipe")
            raise UserError(f"these flags do not form a valid recipe\n{problem}", where=draft.given.where) from None


def _nothing(state: ShellState, scripts: Sequence[Path]) -> UserError:
    notes = "\n  ".join(state.notes)
    return UserError(
        "there is no Megatron command with flags in this script" + (f"\n  {notes}" if notes else ""),
        where=str(scripts[-1]),
        hint="give the script that starts pretrain_gpt.py, preprocess_data.py or convert.py; its arguments after --",
    )
