"""The large budget: `python -m tests.faults --out faults.json` prints the tables of docs/benchmarks.md.

What is done is written at once, and the same command goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.faults.campaign import mutate
from tests.faults.fuzz import fuzz
from tests.faults.kill import SCENARIOS, kill
from tests.faults.outcome import Tally
from tests.faults.targets import TARGETS

BAD = ("silent", "traceback", "hang")


def main() -> int:
    """Run what is not in the file yet, print the tables, and exit with 1 if anything is bad."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--mutations", type=int, default=2200)
    parser.add_argument("--kills", type=int, default=104)
    parser.add_argument("--fuzzed", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    words = parser.parse_args()
    done = json.loads(words.out.read_text()) if words.out.exists() else {}

    def note(kind: str, name: str, tally: Tally, checksum: bool = True) -> None:
        done.setdefault(kind, {})[name] = {"counts": dict(tally.counts), "bad": tally.bad, "checksum": checksum}
        words.out.write_text(json.dumps(done, indent=1))
        print(kind, name, dict(tally.counts), flush=True)

    for target in TARGETS:
        if words.only in target.name and words.mutations and target.name not in done.get("mutations", {}):
            note("mutations", target.name, mutate(target, words.mutations // len(TARGETS), words.seed), target.checksum)
    for scenario in SCENARIOS:
        if words.only in scenario.name and words.kills and scenario.name not in done.get("kills", {}):
            note("kills", scenario.name, kill(scenario, words.kills // len(SCENARIOS), words.seed))
    for name, tally in fuzz(words.fuzzed, words.seed, skip=done.get("fuzzed", {})) if words.fuzzed else ():
        note("fuzzed", name, tally)
    for kind, rows in done.items():
        _print_table(kind, rows)
    return int(any(_is_bad(row) for rows in done.values() for row in rows.values()))


def _is_bad(row: dict) -> bool:
    """Whether anything happened that must not; a format without a checksum cannot notice every change of a value."""
    counts = row["counts"]
    return any(counts.get(outcome) for outcome in BAD if outcome != "silent" or row["checksum"])


def _print_table(kind: str, rows: dict[str, dict]) -> None:
    seen = [
        outcome
        for outcome in ("detected", "unchanged", "accepted", *BAD)
        if outcome in BAD or any(row["counts"].get(outcome) for row in rows.values())
    ]
    print(f"\n| {kind} | attempts | {' | '.join(seen)} |\n|---|{'---|' * (len(seen) + 1)}")
    for name, row in rows.items():
        counts = [row["counts"].get(outcome, 0) for outcome in seen]
        note = "" if row["checksum"] else " (no checksum)"
        print(f"| {name}{note} | {sum(row['counts'].values())} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    sys.exit(main())
