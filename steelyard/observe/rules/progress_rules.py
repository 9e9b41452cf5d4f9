"""Rules about training: errors, progress and loss."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from statistics import median

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.launch.backends import JobState
from steelyard.observe import flight_records
from steelyard.observe.error_scan import is_lost_peer
from steelyard.observe.host_logs import KEPT_LINES, is_number
from steelyard.observe.known_errors import advice
from steelyard.observe.rules import BYTES_SAVED, Verdict
from steelyard.observe.rules.node_rules import lost_nodes
from steelyard.observe.run_state import RunState, seconds_of
from steelyard.sizes.param_count import parameters

MUCH = 4.0  # times the usual duration
LEAST_SAVING = 60.0  # seconds allowed for any checkpoint
MANY = 20  # records
FIRST_STEP = 1200.0  # seconds from the start of the ranks to the first record: data is prepared, kernels are compiled
SAVING_RATE = 100e6  # bytes per second that a slow shared filesystem writes
AGREED_ERRORS = 30.0  # seconds: an error this much older than the last record did not stop the run
SPIKE, SPIKE_SPREADS, LEAST_HISTORY = 1.3, 8.0, 12


def errors(state: RunState) -> Verdict | None:
    """An error on standard error; the message has the first one."""
    if state.is_waiting:
        return None
    by_host = {host: reported for host in state.err if (reported := _errors(state, host) or _known_end(state, host))}
    if not by_host:
        return None

    def order(item: tuple[str, list[tuple[int, str]]]) -> tuple[bool, float]:
        host, reported = item
        return all(_is_consequence(text) for _, text in reported), state.written(host, reported[0][0])

    host, reported = min(by_host.items(), key=order)
    first = min((text for _, text in reported), key=_is_consequence)
    if _is_consequence(first) and lost_nodes(state):
        return None
    others = sum(map(len, by_host.values())) - 1
    more = f" (and {others} more{f' on {len(by_host)} hosts' if len(by_host) > 1 else ''})" if others else ""
    title, rest = first.partition("\n")[::2]
    message = f"{host}: {title}{more}" + (f"\n{rest}" if rest else "")
    what = advice(first) + f"read it in context: steelyard logs RUN --node {host} --stream err"
    finished = state.manifest.get("state") == "finished"
    if finished or (state.progressed or 0.0) > state.written(host, reported[-1][0]) + AGREED_ERRORS:
        message = message.replace(title, f"{title}; the run continued", 1)
        return Verdict("errors", "warning", message, what)
    return Verdict("errors", "wrong", message, what)


def _errors(state: RunState, host: str) -> list[tuple[int, str]]:
    """The errors of a host in this attempt."""
    reported = state.errors_of(host)
    if not reported:
        return []
    began = state.began or 0.0
    return reported[bisect_left(reported, began, key=lambda each: state.written(host, each[0])) :]


def _known_end(state: RunState, host: str) -> list[tuple[int, str]]:
    """The first message among the last lines of a failed run that `doctor explain` knows, if none has the form of an
    error, such as "Host key verification failed."."""
    has_failed = JobState.FAILED in state.job_states or state.manifest.get("state") == "failed"
    if state.is_live or not has_failed:
        return []
    log = state.err[host]
    found = next((line for line in log.last(KEPT_LINES) if advice(line)), None)
    return [] if found is None or log.error_scan is None else [(log.error_scan.scanned_to, found)]


def _is_consequence(text: str) -> bool:
    """Whether the error only follows from the failure of another rank, whose error is the one to report."""
    return is_lost_peer(text) or any(sign in text for sign in ("NCCL", "ChildFailedError", "srun: error", "SIGTERM"))


def no_progress(state: RunState) -> Verdict | None:
    """No step has ended for longer than steps, validation and checkpoints take in this run."""
    if not state.is_live or state.recipe is None:
        return None
    begun, progressed = state.began, state.progressed
    if (begun is None and progressed is None) or _has_recorded_end(state):
        return None
    since = state.now - max(begun or 0.0, progressed or 0.0)
    is_first = progressed is None or (begun or 0.0) > progressed
    allowed = FIRST_STEP if is_first else expected_pause(state, state.recipe)
    if since <= allowed:
        return None
    step = state.metrics[-1]["step"] if state.metrics else 0
    limit = f"expected at most {units.duration(allowed)}"
    message = f"no progress for {units.duration(since)} after step {step}, {limit}{_idle_devices(state)}"
    message += _hanging(state, max(begun or 0.0, progressed or 0.0))
    wait = f"the ranks time out after {state.recipe.parallel.timeout_minutes:g} minutes"
    what = f"dump the ranks' stacks: py-spy dump --pid PID on each host (pids: hosts/*.json); {wait}; then submit again"
    return Verdict("no-progress", "wrong", message, what)


def _hanging(state: RunState, since: float) -> str:
    """Which collective hangs, and which ranks have not entered it, from the ranks' flight records."""
    records = flight_records.read(state.path, since)
    if not records:
        return ""
    hosts = {rank: name for name, host in state.hosts.items() for rank in host.get("ranks") or []}
    found = flight_records.hang(records)
    if found is not None:
        return "\n" + flight_records.described(found, records, hosts)
    silent = sorted(set(hosts) - set(records))
    places = [f"{flight_records.named([rank], hosts)} is in {flight_records.place(records[rank])}" for rank in records]
    answers = f"{flight_records.named(silent, hosts)} did not answer; " if silent else ""
    return f"\n{answers}{'; '.join(places[:4])}"


def _has_recorded_end(state: RunState) -> bool:
    """Whether the manifest has the end of this attempt. Until the ranks connect, that of the previous one."""
    if state.manifest.get("state") not in ("finished", "failed", "interrupted", "stopped"):
        return False
    ended = seconds_of(state.manifest.get("ended"))
    return ended is None or ended >= (state.began or 0.0)


def expected_pause(state: RunState, recipe: Recipe) -> float:
    """Seconds allowed until the next record: several times the usual, plus a validation or checkpoint that is due."""
    trained = state.trained[-50:]
    seconds = [record["seconds"] for record in trained if is_number(record.get("seconds"))]
    step_seconds = median(seconds) if seconds else 1.0
    usual = MUCH * step_seconds * recipe.log.every
    times = [float(record["time"]) for record in state.metrics if is_number(record.get("time"))]
    begun = state.began or 0.0
    gaps = sorted(after - before for before, after in pairwise(times) if before >= begun)
    # Ignore a single outlier (such as a suspended host); validations and checkpoints occur more than once.
    longest = 2 * (gaps[-2] if len(gaps) > MANY else max(gaps, default=0.0))
    return max(state.patience, usual, longest) + _due(state, recipe, step_seconds)


def _due(state: RunState, recipe: Recipe, step_seconds: float) -> float:
    """Seconds for a validation or a checkpoint that may run before the next record."""
    last = state.metrics[-1]["step"] if state.metrics else 0
    coming = range(last, last + recipe.log.every + 1)

    def comes(every: int) -> bool:
        return recipe.train.steps in coming or (every > 0 and any(step and step % every == 0 for step in coming))

    validation = MUCH * recipe.eval.batches * step_seconds if comes(recipe.eval.every) else 0.0
    saved = BYTES_SAVED * parameters(recipe.model).total / SAVING_RATE
    return validation + (LEAST_SAVING + saved if comes(recipe.checkpoint.every) else 0.0)


def _idle_devices(state: RunState) -> str:
    """Names idle GPUs. A GPU that waits in a collective shows as busy, so the others wait for the idle one."""
    busy: list[str] = []
    idle: list[str] = []
    for host, samples in state.devices.items():
        if samples.last.get("kind") != "gpu":
            continue
        for device in samples.last.get("devices") or []:
            if is_number(device.get("utilisation")):
                (idle if device["utilisation"] < 10 else busy).append(f"{host}'s GPU {device.get('index')}")
    return f"; {', '.join(idle[:4])} is idle while the others wait" if idle and len(idle) < len(busy) else ""


def loss_not_finite(state: RunState) -> Verdict | None:
    """The loss or the gradient norm is not finite, now or in skipped steps."""
    if state.is_waiting or not state.trained:
        return None
    last = state.trained[-1]
    what = "resume from an earlier checkpoint with a lower optim.learning_rate or a longer optim.warmup_steps"
    if not is_number(last.get("loss")) or (not is_number(last.get("grad_norm")) and not _is_overflow(state)):
        named = "gradient norm" if is_number(last.get("loss")) else "loss"
        return Verdict("not-finite", "wrong", f"the {named} is not finite at step {last['step']}", what)
    recent = [record for record in state.trained[-20:] if is_number(record.get("nonfinite"))]
    if len(recent) > 1 and (skipped := recent[-1]["nonfinite"] - recent[0]["nonfinite"]) > 0:
        message = (
            f"{skipped} of the last {last['step'] - recent[0]['step']} steps were skipped: loss or gradient not finite"
        )
        return Verdict("not-finite", "warning", message, what)
    return None


def _is_overflow(state: RunState) -> bool:
    """Whether the gradient overflowed at the current fp16 loss scale, which is then lowered. This is normal."""
    skipped = [record.get("skipped") for record in state.trained[-2:]]
    before, now = (skipped[0] if len(skipped) > 1 else 0), skipped[-1]
    return is_number(before) and is_number(now) and now > before


def loss_spike(state: RunState) -> Verdict | None:
    """The loss is far above its recent values for more than one record."""
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
    steps = ["wait: most spikes pass"]
    if recipe is not None and not recipe.optim.clip:
        steps.append("set optim.clip")
    return "; ".join([*steps, "if it stays, resume from an earlier checkpoint with a lower optim.learning_rate"])
