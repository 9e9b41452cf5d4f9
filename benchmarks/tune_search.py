"""How often the tuner finds the best of 96 known settings in 20 trials: PYTHONPATH=. python benchmarks/tune_search.py

The problem is that of tests/tune/test_study.py, trained in this process, so that only the search is measured.
"""

import argparse
import tempfile
from pathlib import Path

from steelyard.tune import spec
from steelyard.tune.objective import ObjectiveValues
from steelyard.tune.outcome import FINISHED, TrialEnd
from steelyard.tune.study import Study
from tests.tune.test_study import SPACE, TRAIN, TUNE


def main() -> None:
    """Print, for each seed, the rank of the best trial among all settings, and the number of that trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    names: dict = {}
    exec(compile(TRAIN, "train.py", "exec"), names)
    points = [(rate, decay, batch) for rate in SPACE["rate"] for decay in SPACE["decay"] for batch in SPACE["batch"]]
    losses = {point: names["train"](*point) for point in points}
    order = sorted(losses.values())
    with tempfile.TemporaryDirectory() as folder:
        space = "\n".join(f"{name} = {values}" for name, values in SPACE.items())
        file = Path(folder) / "tune.toml"
        file.write_text(TUNE.format(python="python", space=space, trials=20))
        for seed in range(arguments.seeds):
            tune = spec.load(file, {"seed": seed, "name": f"seed-{seed}"})
            study, found = Study(tune, f"sqlite:///{folder}/{seed}.db"), []
            for _ in range(20):
                trial, measured = study.next(), ObjectiveValues(tune.objectives[0])
                measured.line(f"loss: {losses[tuple(trial.params.values())]}")
                study.end(trial, TrialEnd(FINISHED, "", 1.0), [measured])
                found.append(measured.value)
            print(f"seed {seed}: rank {order.index(min(found)) + 1}, trial {found.index(min(found)) + 1}", flush=True)


if __name__ == "__main__":
    main()
