"""Whether the run goes on as it should: errors, progress, loss."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from statistics import median

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.observe.error_scan import is_lost_peer
from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import Verdict
from steelyard.observe.run_state import RunState, seconds_of
from steelyard.sizes.param_count import parameters

MUCH = 4.0  # times what is usual
LEAST_SAVING = 60.0  # seconds that a checkpoint may take, however small
MANY = 20  # records
FIRST_STEP = 1200.0  # seconds from the start of the ranks to the first record: data is prepared, kernels are compiled
SAVING_RATE = 100e6  # bytes a second that a slow shared filesystem takes
BYTES_SAVED = 14  # per parameter: weights and the optimizer's state
AGREED_ERRORS = 30.0  # seconds: an error this much older than the last record did not stop the run
SPIKE, SPIKE_SPREADS, LEAST_HISTORY = 1.3, 8.0, 12


def errors(state: RunState) -> Verdict | None:
    """Something on standard error that is no warning; the first of it is named."""
    if state.is_waiting:
        return None
    found = {host: reported for host in state.err if (reported := _errors(state, host))}
    if not found:
        return None

    def order(item: tuple[str, list[tuple[int, str]]]) -> tuple[bool, float]:
        host, reported = item
        return all(_is_consequence(text) for _, text in reported), state.written(host, reported[0][0])

    host, reported = min(found.items(), key=order)
    first = min((text for _, text in reported), key=_is_consequence)
    others = sum(map(len, found.values())) - 1
    more = f" (and {others} more{f' on {len(found)} hosts' if len(found) > 1 else ''})" if others else ""
    message = f"{host} says: {first}{more}"
    what = (
        f"steelyard logs RUN --node {host} --stream err shows it in its place; steelyard doctor explain RUN knows many"
    )
    finished = state.manifest.get("state") == "finished"
    if finished or (state.progressed or 0.0) > state.written(host, reported[-1][0]) + AGREED_ERRORS:
        return Verdict("errors", "warning", message + "; the run went on", what)
    return Verdict("errors", "wrong", message, what)


def _errors(state: RunState, host: str) -> list[tuple[int, str]]:
    """What a host complained of in the present attempt."""
    reported = state.errors_of(host)
    if not reported:
        return []
    began = state.began or 0.0
    return reported[bisect_left(reported, began, key=lambda each: state.written(host, each[0])) :]


def _is_consequence(text: str) -> bool:
    """Whether a rank says no more than that another is gone: the other's error is the one to name."""
    return is_lost_peer(text) or any(sign in text for sign in ("NCCL", "ChildFailedError", "srun: error", "SIGTERM"))


def no_progress(state: RunState) -> Verdict | None:
    """No step has ended for longer than steps, validation and saving take here."""
    if not state.is_live or state.recipe is None:
        return None
    begun, progressed = state.began, state.progressed
    if (begun is None and progressed is None) or _has_said_its_end(state):
        return None
    since = state.now - max(begun or 0.0, progressed or 0.0)
    is_rank0 = progressed is None or (begun or 0.0) > progressed
    allowed = FIRST_STEP if is_rank0 else expected_pause(state, state.recipe)
    if since <= allowed:
        return None
    step = state.metrics[-1]["step"] if state.metrics else 0
    usual = f"{units.duration(allowed)} would be much already"
    message = f"no progress for {units.duration(since)} behind step {step}, where {usual}{_idle_devices(state)}"
    wait = f"after {state.recipe.parallel.timeout_minutes:g} minutes the ranks give up by themselves"
    what = f"see what the ranks do: py-spy dump --pid PID on each host (ids: hosts/*.json); {wait}; then submit again"
    return Verdict("no-progress", "wrong", message, what)


def _has_said_its_end(state: RunState) -> bool:
    """Whether the manifest's word is the present attempt's; an earlier one's stands there until the ranks have met."""
    if state.manifest.get("state") not in ("finished", "failed", "interrupted", "stopped"):
        return False
    ended = seconds_of(state.manifest.get("ended"))
    return ended is None or ended >= (state.began or 0.0)


def expected_pause(state: RunState, recipe: Recipe) -> float:
    """How long it may take from the last record to the next one: several times the usual, and what is due now."""
    trained = state.trained[-50:]
    seconds = [record["seconds"] for record in trained if is_number(record.get("seconds"))]
    step_seconds = median(seconds) if seconds else 1.0
    usual = MUCH * step_seconds * recipe.log.every
    times = [float(record["time"]) for record in state.metrics if is_number(record.get("time"))]
    begun = state.began or 0.0
    gaps = sorted(after - before for before, after in pairwise(times) if before >= begun)
    # What happened once among many (a host that slept) is no measure; a validation or a checkpoint happens again.
    longest = 2 * (gaps[-2] if len(gaps) > MANY else max(gaps, default=0.0))
    return max(state.patience, usual, longest) + _due(state, recipe, step_seconds)


def _due(state: RunState, recipe: Recipe, step_seconds: float) -> float:
    """Seconds for a validation or a checkpoint that may be under way before the next record."""
    last = state.metrics[-1]["step"] if state.metrics else 0
    coming = range(last, last + recipe.log.every + 1)

    def comes(every: int) -> bool:
        return recipe.train.steps in coming or (every > 0 and any(step and step % every == 0 for step in coming))

    validation = MUCH * recipe.eval.batches * step_seconds if comes(recipe.eval.every) else 0.0
    saved = BYTES_SAVED * parameters(recipe.model).total / SAVING_RATE
    return validation + (LEAST_SAVING + saved if comes(recipe.checkpoint.every) else 0.0)


def _idle_devices(state: RunState) -> str:
    """On a GPU waiting for another rank looks like work: the one that does nothing is the one waited for."""
    busy: list[str] = []
    idle: list[str] = []
    for host, samples in state.devices.items():
        if samples.last.get("kind") != "gpu":
            continue
        for device in samples.last.get("devices") or []:
            if is_number(device.get("utilisation")):
                (idle if device["utilisation"] < 10 else busy).append(f"{host}'s GPU {device.get('index')}")
    return f"; {', '.join(idle[:4])} stands still while the others wait" if idle and len(idle) < len(busy) else ""


def loss_not_finite(state: RunState) -> Verdict | None:
    """The loss or the gradient is no number, now or in steps that were skipped."""
    if state.is_waiting or not state.trained:
        return None
    last = state.trained[-1]
    what = "go on from a checkpoint before it with a lower optim.learning_rate or a longer optim.warmup_steps"
    if not is_number(last.get("loss")) or (not is_number(last.get("grad_norm")) and not _is_overflow(state)):
        named = "gradient norm" if is_number(last.get("loss")) else "loss"
        return Verdict("not-finite", "wrong", f"the {named} is no finite number at step {last['step']}", what)
    recent = [record for record in state.trained[-20:] if is_number(record.get("nonfinite"))]
    if len(recent) > 1 and (skipped := recent[-1]["nonfinite"] - recent[0]["nonfinite"]) > 0:
        message = f"{skipped} of the last {last['step'] - recent[0]['step']} steps were skipped: not finite"
        return Verdict("not-finite", "warning", message, what)
    return None


def _is_overflow(state: RunState) -> bool:
    """Whether the gradient was too large for fp16's scale, which is lowered then: usual, unless it never ends."""
    skipped = [record.get("skipped") for record in state.trained[-2:]]
    before, now = (skipped[0] if len(skipped) > 1 else 0), skipped[-1]
    return is_number(before) and is_number(now) and now > before


def loss_spike(state: RunState) -> Verdict | None:
    """The loss stands far above where it was, and not for one record only."""
    if state.is_waiting:
        return None
    losses = [float(record["loss"]) for record in state.trained if is_number(record.get("loss"))]
    if len(losses) < LEAST_HISTORY:
        return None
    earlier, now = losses[-52:-2], losses[-2:]
    usual = median(earlier)
    spread = median(abs(loss - usual) for loss in earlier)
    if min(now) <= max(SPIKE * usual, usual + SPIKE_SPREADS * spread) or usual <= 0:
        return None
    message = f"the loss jumped to {now[-1]:.3g} from around {usual:.3g}"
    return Verdict("loss-spike", "warning", message, _against_spikes(state.recipe))


def _against_spikes(recipe: Recipe | None) -> str:
    steps = ["wait a little: most spikes pass"]
    if recipe is not None and not recipe.optim.clip:
        steps.append("set optim.clip")
    return "; ".join([*steps, "if it stays, go on from a checkpoint before it with a lower optim.learning_rate"])
