"""Megatron's flags of `--optimizer muon` and `dist_muon`, as keys of `[optim]`.

Megatron's scale mode "spectral" is max(rows, columns)^0.5 times `--muon-extra-scale-factor`; `match_rms_adamw` includes
the factor 0.2. Megatron orthogonalizes routers too, and with `--muon-tp-mode blockwise` each shard of a tensor rank.
"""

from __future__ import annotations

from steelyard.megatron.recipe_draft import Draft

NAMES = ("muon", "dist_muon")
MATCHED_RMS = 0.2
SCALES = {"spectral": "match_rms_adamw", "shape_scaling": "original"}


def muon(draft: Draft) -> None:
    """The keys of Muon."""
    given = draft.given
    draft.put("optim.name", "muon")
    momentum = given.real("--muon-momentum", "optim.muon_momentum")
    draft.put_or("optim.muon_momentum", momentum, 0.95)
    if momentum is None:
        draft.ask("optim.muon_momentum is 0.95; the default of some versions of Megatron is 0.9: is that intended?")
    draft.put("optim.muon_nesterov", given.switch("--muon-use-nesterov", "optim.muon_nesterov"))
    draft.put_or("optim.muon_ns_steps", given.whole("--muon-num-ns-steps", "optim.muon_ns_steps"), 5)
    _scale(draft)
    precision = given.text("--muon-fp32-matmul-prec", "optim.muon_precision")
    draft.put_or("optim.muon_precision", precision and ("fp32" if precision == "high" else "bf16"), "bf16")
    mode = given.text("--muon-tp-mode", "optim.name")
    if mode is not None:
        given.carried.pop("--muon-tp-mode")
        shards = mode == "blockwise" and (draft.get("parallel.tensor") or 1) > 1
        given.leave("--muon-tp-mode", "matrices are orthogonalized whole, on any layout", matters=shards)
    if draft.get("model.experts"):
        draft.ask("AdamW updates the routers, in Megatron it is Muon: is that intended?")


def _scale(draft: Draft) -> None:
    given = draft.given
    mode = given.text("--muon-scale-mode", "optim.muon_scale") or "spectral"
    factor = given.real("--muon-extra-scale-factor", "optim.muon_extra_scale_factor")
    factor = 1.0 if factor is None else factor
    if mode not in SCALES:
        draft.reject("optim.muon_scale", mode, f"the scale mode {mode} is not supported, only {' and '.join(SCALES)}")
        return
    draft.put_or("optim.muon_scale", (given.has("--muon-scale-mode") and SCALES[mode]) or None, SCALES[mode])
    draft.put("optim.muon_extra_scale_factor", round(factor / MATCHED_RMS, 12) if mode == "spectral" else factor)
