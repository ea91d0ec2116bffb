"""The lines of a plan's text about which completions are asked for and trained on; what is off has none."""

from __future__ import annotations

from rftcli.plan.plan import Plan
from rftcli.plan.plan_sampling import LabelSampling


def sampling_rows(plan: Plan) -> list[tuple[str, str]]:
    rollout, curriculum = plan.rollout, plan.data.curriculum
    rows = [(f"label {label}", _label(own)) for label, own in rollout.by_label.items()]
    if rollout.first_token_temperature is not None:
        rows.append(("first token", f"temperature {rollout.first_token_temperature:g}"))
    if rollout.dynamic is not None:
        low, high = rollout.dynamic.low, rollout.dynamic.high
        within = "" if low is None else f" and a mean from {low:g} to {high:g}"
        text = f"groups without a spread of {rollout.dynamic.metric}{within}, at most {rollout.dynamic.max_extra_rollouts} extra rollouts a step"
        rows.append(("refill", text))
    if rollout.over_sample is not None:
        over = rollout.over_sample
        rows.append(("over-sampling", f"{over.factor:g} x the prompts, whole groups counted every {over.slice_tokens} tokens"))
    if rollout.partial is not None:
        until = "" if rollout.partial.budget_tokens is None else f"answers grow by {rollout.partial.budget_tokens} tokens a step; "
        rows.append(("partial", f"{until}the unfinished go on in the next step, tokens at most {rollout.partial.max_version_lag} updates old"))
    if rollout.keep is not None:
        kept = f"{rollout.keep.best} best and {rollout.keep.worst} worst of {rollout.samples_per_prompt} completions of a prompt"
        rows.append(("trained on", kept))
    if rollout.replay is not None:
        replay = rollout.replay
        rows.append(("replay", f"prompts without signal, after {replay.after_steps} steps, at most {replay.share:.0%} of a step"))
    if curriculum is not None:
        measured = f"rows with a pass rate from {curriculum.low:g} to {curriculum.high:g}, and {curriculum.share:.0%} of the others"
        rows.append(("curriculum", curriculum.target or measured))
    return rows


def _label(own: LabelSampling) -> str:
    filters = [f"{name} {getattr(own, name):g}" for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(own, name) != off]
    return ", ".join([f"{own.max_new_tokens} new tokens", f"temperature {own.temperature:g}", *filters])
