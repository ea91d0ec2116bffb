"""The models that `rft rewards try` scores with: loaded whole in this process, on the GPU that is there or on the CPU.

Leaves out which completions are scored (`try_rewards`), and weights that a run would partition over ranks: there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from rftcli.errors import MachineError
from rftcli.models.classifier import Texts
from rftcli.models.load import load_tokenizer
from rftcli.recipe.sections import Recipe
from rftcli.rewards.scorers.desk import Local, Remote
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.runtime.environment import resolved_model
from rftcli.runtime.judges import Judges
from rftcli.runtime.scorers import made_scorers
from rftcli.runtime.world import SoloWorld


def load_scorers(specs: Sequence[ScorerSpec], device: str, folder: Path, say: Callable[[str], None], judges: Judges) -> dict[str, Remote | Local]:
    """Each by its name. `device`: "cuda" or "cpu". `folder`: where user modules are looked for. `judges`: with servers that have been
    started. UsageError for what is no such model, MachineError for a GPU that torch does not see."""
    if device == "cuda" and not torch.cuda.is_available():
        hint = "install torch for this GPU, or score on the CPU: `CUDA_VISIBLE_DEVICES= rft rewards try ...`"
        raise MachineError("there is a GPU, and this torch sees none", hint=hint)
    disable_progress_bar()
    set_verbosity_error()  # what transformers says of a checkpoint without a head is an error of ours
    models = [spec for spec in specs if spec.service is None]  # those with servers of their own are up already
    for spec in models:
        source = spec.target if spec.weights is None else spec.weights.given
        say(f"loading scorer `{spec.name}` ({spec.kind}, {source}) on the {'GPU' if device == 'cuda' else 'CPU'}")
    return made_scorers(specs, SoloWorld(), torch.device(device), [folder], lambda code, text: say(f"warning: {text}"), judges)


def text_in_front(recipe: Recipe) -> str:
    """What the policy's tokenizer puts in front of a prompt, which recorded prompts begin with. UsageError where it cannot be loaded."""
    policy = recipe.models.policy
    path = policy.tokenizer or policy.path
    revision = policy.revision if policy.tokenizer is None else None
    tokenizer = load_tokenizer(
        resolved_model(path), trust_remote_code=policy.trust_remote_code, revision=revision, options=dict(policy.tokenizer_options)
    )
    return Texts(tokenizer).front
