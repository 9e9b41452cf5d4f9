"""The layouts that `make test-gpu` runs over NCCL: those of the CPU tests, on CUDA, and what only a GPU can show.

Every case is compared with one process on the same GPU with the same settings. In fp32 the tolerances are those of the
CPU tests; TF32 is off, as it is in training. Coarser precisions have stated ones: `BF16` is the CPU tests', and in fp8
every tensor is scaled by its own largest value, so that a rank with half of a tensor rounds it otherwise (`FP8`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from tests.finetuning.conftest import write_bases
from tests.parallel import (
    jobs,
    test_bf16_gradients,
    test_experts,
    test_finetuning,
    test_flight_records,
    test_layouts,
    test_masks,
    test_muon,
    test_prune,
)
from tests.parallel.conftest import FAMILIES, Layouts, difference
from tests.parallel.test_layouts import LARGEST, parallel
from tests.parallel.test_settings import SGD

TWICE = ("zero 3 on 2", "pipeline 2 1f1b", "tensor", "sequence")  # In both families; of the other layouts in one.
BF16, FP8 = 3e-3, 5e-2
MOST_RANKS = 4
COMPILED = ("train.compile=true",)
UNCOMPILED = ("train.compile=false",)
WIDE = "model={family='llama', layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=97, tied=false}"
ONLY_HERE = {
    "tensor 4": (4, [*parallel(tensor=4), LARGEST]),
    "sequence 4": (4, [*parallel(tensor=4, sequence_parallel="true"), LARGEST]),
    "context 4": (4, [*parallel(context=4), LARGEST]),
    "data x tensor zero 1": (4, [*parallel(tensor=2, zero=1), LARGEST]),
    "tensor x pipeline": (4, [*parallel(tensor=2, pipeline=2, sequence_parallel="true"), LARGEST]),
}
FOR_MASKS = [("llama-bias", "zero 3"), ("gpt", "tensor"), ("llama-bias", "pipeline"), ("gpt", "data x tensor zero 3")]
FOR_LORA = [("llama", "zero 3"), ("gpt", "tensor"), ("llama", "pipeline"), ("gpt", "data x tensor zero 3")]
FOR_NF4 = [("llama", "zero 3"), ("llama", "tensor"), ("llama", "pipeline")]
FOR_PRUNE = ["data", "tensor", "data x tensor"]
FOR_FAMILIES = ["mistral", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3"]
FAMILY_ROUNDING = 1e-5  # with SGD
FOR_EXPERTS = [
    "expert zero 0", "expert zero 1", "expert zero 2 on 4", "expert zero 3 on 4", "expert 4", "expert x tensor",
    "expert x context", "expert x pipeline", "tensor",
]  # fmt: skip
FOR_COMPILED_EXPERTS = ["data zero 3", "expert zero 1"]
FOR_MUON = ["zero 0 on 2", "zero 3 on 4", "hybrid zero 1", "tensor", "data x pipeline zero 3", "data x tensor zero 3"]
FOR_COMPILED = ["zero 3 on 2", "tensor", "sequence", "context", "pipeline 2 1f1b", "data x tensor zero 3"]
LAST = ("gpipe", "hybrid", "empty")
FOR_PRECISION = ["zero 3 on 2", "tensor", "pipeline 2 1f1b", "pipeline 2 zero-bubble"]


@dataclass(frozen=True)
class Case:
    """One layout and what it is compared with."""

    name: str
    ranks: int
    family: str
    layout: list[str]
    tolerance: float
    settings: tuple[str, ...] = UNCOMPILED
    """Those of the layout's run and of the one process."""
    kind: Literal["pretrain", "masks", "lora", "nf4", "prune", "load", "hang"] = "pretrain"
    precision: str = "fp32"

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled."""
        return COMPILED[0] in self.settings

    @property
    def seconds(self) -> float:
        """About how long it takes on an H200, the run of one process included."""
        return 60 if self.compiled else 20 if self.kind == "hang" else 4 + self.ranks

    @property
    def described(self) -> dict[str, Any]:
        """What a summary says of it."""
        return {
            "kind": self.kind, "ranks": self.ranks, "family": self.family, "layout": " ".join(self.layout),
            "precision": self.precision, "compiled": self.compiled, "tolerance": self.tolerance,
        }  # fmt: skip


def cases() -> list[Case]:
    """All of them, in the order of value: a matrix, precisions, masks and adapters, compiled layers, the rest."""
    known = test_layouts.LAYOUTS | ONLY_HERE
    found, last = [], []
    for number, (layout, (ranks, overrides)) in enumerate(known.items()):
        for place, family in enumerate(test_layouts.ROUNDING):
            is_taken = number % 2 == place or layout in TWICE
            if layout in ONLY_HERE:
                is_taken = family == ("gpt" if "tensor=4" in " ".join(overrides) else "llama")
            if is_taken and ranks <= MOST_RANKS:
                case = Case(f"{layout}, {family}", ranks, family, overrides, test_layouts.ROUNDING[family])
                (last if any(word in layout for word in LAST) else found).append(case)
    for layout in FOR_PRECISION:
        ranks, overrides = known[layout]
        settings = (*UNCOMPILED, *test_bf16_gradients.SETTINGS)
        name, tolerance = f"{layout}, llama, bf16 gradients", test_bf16_gradients.ROUNDING
        found.append(Case(name, ranks, "llama", overrides, tolerance, settings, precision="bf16"))
        for precision, tolerance, more in (("bf16", BF16, ()), ("fp8", FP8, (WIDE,))):
            settings = (*UNCOMPILED, *SGD, f"train.precision={precision}", *more)
            name = f"{layout}, llama, {precision}"
            found.append(Case(name, ranks, "llama", overrides, tolerance, settings, precision=precision))
            if precision == "fp8":
                settings = (*settings, "train.fp8_scaling=row")
                case = Case(f"{name} by row", ranks, "llama", overrides, tolerance, settings, precision=precision)
                found.append(case)
    for family, layout in FOR_MASKS:
        ranks, overrides = test_masks.LAYOUTS[layout]
        name = f"masks, {layout}, {family}"
        found.append(Case(name, ranks, family, overrides, test_masks.ROUNDING, kind="masks"))
    for kind, chosen in (("lora", FOR_LORA), ("nf4", FOR_NF4)):
        for family, layout in chosen:
            ranks, overrides = test_finetuning.LAYOUTS[layout]
            name = f"{kind}, {layout}, {family}"
            found.append(Case(name, ranks, family, overrides, test_finetuning.ROUNDING[family], kind=kind))
    for family in FOR_FAMILIES:
        ranks, overrides = ONLY_HERE["tensor x pipeline"]
        for precision, tolerance in (("fp32", FAMILY_ROUNDING), ("bf16", BF16)):
            if precision == "fp32" or family in ("mistral", "gemma2"):
                settings = (*UNCOMPILED, *SGD, f"train.precision={precision}")
                name = f"tensor x pipeline, {family}, {precision}"
                found.append(Case(name, ranks, family, overrides, tolerance, settings, precision=precision))
    for number, layout in enumerate(FOR_EXPERTS):
        ranks, overrides = test_experts.LAYOUTS[layout]
        family = ("experts", "shared-experts")[number % 2]
        for precision, tolerance in (("fp32", FAMILY_ROUNDING), ("bf16", BF16)):
            if precision == "fp32" or layout in ("expert zero 1", "expert x tensor"):
                settings = (*UNCOMPILED, *SGD, f"train.precision={precision}")
                name = f"{layout}, {family}, {precision}"
                found.append(Case(name, ranks, family, overrides, tolerance, settings, precision=precision))
    for number, name in enumerate(test_experts.LOADS):
        found.append(Case(f"load, {name}", (2, 4)[number % 2], "experts", [], FAMILY_ROUNDING, kind="load"))
    for layout in FOR_MUON:
        ranks, overrides = known[layout]
        settings = (*UNCOMPILED, *test_muon.FP32)
        found.append(Case(f"muon, {layout}", ranks, "llama", overrides, test_muon.ROUNDING, settings))
    ranks, overrides = test_experts.LAYOUTS["expert x tensor"]
    # AdamW divides small gradients by their own size: noise of 1e-9 in them changes gradient norms by 5e-4 here.
    settings = (*UNCOMPILED, *test_muon.FP32, "optim.eps=1e-3")
    found.append(Case("muon, expert x tensor", ranks, "experts", overrides, test_muon.ROUNDING, settings))
    for layout in FOR_PRUNE:
        ranks, tensor = test_prune.LAYOUTS[layout]
        name = f"prune, {layout}, qwen2"
        found.append(Case(name, ranks, "llama", [f"parallel.tensor={tensor}"], test_prune.ROUNDING, kind="prune"))
    for layout, (ranks, overrides, *_) in test_flight_records.LAYOUTS.items():
        found.append(Case(f"hang, {layout}, llama", ranks, "llama", overrides, 0.5, kind="hang"))
    for layout in FOR_COMPILED:
        ranks, overrides = known[layout]
        name = f"{layout}, llama, compiled"
        found.append(Case(name, ranks, "llama", overrides, test_layouts.ROUNDING["llama"], COMPILED))
    for layout in FOR_COMPILED_EXPERTS:
        ranks, overrides = test_experts.LAYOUTS[layout]
        settings = (*COMPILED, *SGD, "train.precision=bf16")
        name = f"{layout}, experts, compiled"
        found.append(Case(name, ranks, "experts", overrides, BF16, settings, precision="bf16"))
    return found + last


def compared(case: Case, layouts: Layouts) -> float:
    """Run a case and the one process beside it; the largest relative difference of their losses and gradient norms."""
    if case.kind in ("lora", "nf4"):
        name, bases = case.name.replace(",", ""), layouts.folder / "bases"
        if not bases.exists():
            write_bases(bases)
        tune, kind = test_finetuning.tune, case.kind
        one = tune(layouts, bases, 1, case.family, kind, "alone", *case.settings)
        run = tune(layouts, bases, case.ranks, case.family, kind, name, *case.settings, *case.layout)
        return difference(run.metrics(), one.metrics())
    if case.kind == "masks":
        path = f"masks-alone-{case.family}"
        if not (layouts.folder / path).exists():
            test_masks.learn(layouts, 1, case.family, *case.settings, path=path)
        one = test_masks.Run.open(layouts.folder / path)
        run = test_masks.learn(layouts, case.ranks, case.family, *case.settings, *case.layout)
        found = difference(run.metrics(), one.metrics())
        if found < case.tolerance:
            test_masks.assert_alike(run, one)
        return found
    if case.kind == "load":
        device = "cuda" if "train.device=cuda" in layouts.always else "cpu"
        prefers, _ = test_experts.LOADS[case.name.removeprefix("load, ")]
        outcomes = layouts.ranks.do(case.ranks, jobs.experts_with_a_load, prefers, device)
        return max(max(outcome["worst"].values()) for outcome in outcomes)
    if case.kind == "prune":
        _, tensor = test_prune.LAYOUTS[case.name.split(", ")[1]]
        return test_prune.share_pruned_otherwise(layouts, case.ranks, tensor)
    if case.kind == "hang":  # Nothing is compared: the collective and the rank that did not enter it are named, or not.
        test_flight_records.name_the_rank(layouts, case.name.split(", ")[1], *case.settings)
        return 0.0
    run = layouts.run(case.ranks, case.family, *case.settings, *case.layout)
    return difference(run.metrics(), layouts.alone(case.family, *case.settings))


assert {case.family for case in cases()} <= set(FAMILIES)
