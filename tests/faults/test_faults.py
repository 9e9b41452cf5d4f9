"""A small budget of every kind of fault, from a fixed seed; `make test-faults` has the large one."""

import pytest

from tests.faults import mutate as mutate_module
from tests.faults.campaign import mutate
from tests.faults.fuzz import KINDS, fuzz
from tests.faults.kill import SCENARIOS, kill
from tests.faults.outcome import Result, judge
from tests.faults.targets import TARGETS

QUICK = {"mask file", "token files, verified", "exported model", "GGUF", "recipe"}
QUICK_KILLS = {"data tokenize", "checkpoint convert"}


def _marked(name: str, quick: set[str]) -> object:
    return pytest.param(name, marks=() if name in quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [_marked(target.name, QUICK) for target in TARGETS])
def test_damage_to_a_file_is_detected_or_changes_nothing(name):
    target = next(each for each in TARGETS if each.name == name)
    tally = mutate(target, 6, seed=7)
    assert sum(tally.counts.values()) == 6
    assert not [line for line in tally.bad if target.checksum or not line.startswith("silent")]


@pytest.mark.parametrize("name", [_marked(scenario.name, QUICK_KILLS) for scenario in SCENARIOS])
def test_a_killed_command_leads_to_the_same_when_started_again(name):
    scenario = next(each for each in SCENARIOS if each.name == name)
    tally = kill(scenario, 2, seed=7)
    assert (dict(tally.counts), tally.bad) == ({"unchanged": 2}, [])


def test_fuzzed_input_is_accepted_or_refused_with_a_message():
    tallies = dict(fuzz(4 * len(KINDS), seed=7))
    assert {name: tally.bad for name, tally in tallies.items() if tally.bad} == {}
    assert all(sum(tally.counts.values()) == 4 for tally in tallies.values())


def test_outcomes_are_told_apart():
    assert judge(Result(0, "", ""), "same", "same") == "unchanged"
    assert judge(Result(0, "", ""), "other", "same") == "silent"
    assert judge(Result(2, "", "error: no"), None, "same") == "detected"
    assert judge(Result(1, "", ""), None, "same") == "traceback"
    assert judge(Result(1, "", "Traceback (most recent call last):\n..."), None, "same") == "traceback"
    assert judge(Result(-11, "", ""), None, "same") == "traceback"
    assert judge(Result(-1, "", "", timed_out=True), None, "same") == "hang"


def test_mutations_differ_from_the_file_and_repeat_with_their_seed():
    import random

    data = bytes(range(256)) * 8
    one, two = (list(mutate_module.mutations(data, 50, random.Random(3))) for _ in range(2))
    assert one == two
    assert all(content != data for _, content in one)
