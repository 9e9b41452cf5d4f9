"""docs/plan.md has one table of all numbers that predictions and the search rest on."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import steelyard
from steelyard.planning.cluster import OwnGpu
from steelyard.planning.software import Software

PACKAGE = Path(steelyard.__file__).parent
NAMES_OF_PASSES = {"FORWARD", "BACKWARD", "WEIGHTS", "KINDS"}


def is_number(value: object) -> bool:
    """Whether a value is a number, or numbers by name or position."""
    if isinstance(value, dict):
        return bool(value) and all(map(is_number, value.values()))
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def constants(package: str) -> set[str]:
    """The module-level constants of a package that are numbers."""
    found = set()
    for path in sorted((PACKAGE / package).glob("*.py")):
        module = importlib.import_module(f"steelyard.{package}.{path.stem}")
        for node in ast.parse(path.read_text()).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            found |= {name for name in names if name.isupper() and is_number(getattr(module, name))}
    return found - NAMES_OF_PASSES


def table() -> set[str]:
    """The names in the first column of the table of constants."""
    page = (PACKAGE.parent / "docs" / "plan.md").read_text()
    section = page.split("\n### Constants\n")[1].split("\n### ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([A-Za-z0-9_]+)`", row)}


@pytest.mark.parametrize("package", ["planning", "sizes"])
def test_every_constant_is_in_the_table(package):
    found = constants(package)
    assert {"planning": "RAMP", "sizes": "RESERVED"}[package] in found
    assert found - table() == set()


def test_every_number_of_a_program_and_of_an_unknown_gpu_is_in_the_table():
    of_programs = {field.name for field in dataclasses.fields(Software) if field.type in ("float", "int")}
    assert {"launch", "kernels"} <= of_programs
    assert of_programs - table() == set()
    of_gpus = {name for name, field in OwnGpu.model_fields.items() if isinstance(field.default, int | float)}
    assert of_gpus == {"sustained", "units", "link_gb"}
    assert of_gpus - table() == set()
