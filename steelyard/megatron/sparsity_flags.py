"""`[sparsity]`: MaskLLM's flags."""

from __future__ import annotations

from steelyard.megatron.recipe_draft import Draft

LEARNING = ("--gumbel-temperature-range", "--gumbel-scale-range", "--mask-only", "--weight-reg", "--prior-strength",
            "--lr-mult")  # fmt: skip
DEFAULT = "MaskLLM's default"
TEMPERATURE, SCALE, STRENGTH, MULTIPLE = [4.0, 0.05], [1e2, 5e2], 3.0, 10.0


def sparsity(draft: Draft) -> None:
    """Convert the flags of mask learning, if any is given."""
    given = draft.given
    if not any(given.has(flag) for flag in LEARNING):
        return
    draft.put("sparsity.method", "learned")
    frozen = given.switch("--mask-only", "sparsity.method")
    kept, group = given.whole("--N", "sparsity.pattern"), given.whole("--M", "sparsity.pattern")
    draft.put_or("sparsity.pattern", None if kept is None and group is None else f"{kept or 2}:{group or 4}", "2:4")
    for flag, key, default in (
        ("--gumbel-temperature-range", "sparsity.temperature", TEMPERATURE),
        ("--gumbel-scale-range", "sparsity.scale", SCALE),
    ):
        ends = given.numbers(flag, key)
        if ends and len(ends) != 2:
            draft.reject(key, ends, f"{flag} is not a first and a last value")
        draft.put(key, ends or default, "" if ends else DEFAULT)
    weight_reg = given.numbers("--weight-reg", "sparsity.weight_reg")
    # In MaskLLM it decays to zero; its continued runs give both ends.
    draft.put(
        "sparsity.weight_reg", [*weight_reg, 0.0][:2] if weight_reg else [0.0, 0.0], "" if weight_reg else DEFAULT
    )
    for flag, key, assumed in (
        ("--prior-strength", "sparsity.prior_strength", STRENGTH),
        ("--lr-mult", "sparsity.learning_rate_multiplier", MULTIPLE),
    ):
        value = given.real(flag, key)
        draft.put(key, assumed if value is None else value, DEFAULT if value is None else "")
    if given.switch("--hard", "sparsity.hard"):
        draft.put("sparsity.hard", True)
    _ask(draft, frozen)


def _ask(draft: Draft, frozen: bool) -> None:
    source = draft.get("train.init_from")
    if source is None:
        draft.put("sparsity.base", "BASE", "not known")
        draft.ask("the weights of the masks are not given: set sparsity.base to their checkpoint")
    if not frozen:
        draft.ask("without --mask-only MaskLLM also trains the weights; Steelyard freezes them in mask learning")
    if source and draft.get("sparsity.prior_strength"):
        draft.ask(
            f"MaskLLM starts from the masks in {source}: unless it holds learned logits, which are continued, "
            f"export them with steelyard mask export {source} prior.mask and set sparsity.prior"
        )
    if draft.get("optim.weight_decay"):
        draft.ask("MaskLLM applies weight decay to the logits; here it is 0 unless sparsity.weight_decay is set")
