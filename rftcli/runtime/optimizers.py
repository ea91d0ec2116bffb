"""Optimizers by kind, made for one module: parameter groups with and without weight decay, and a switch that leaves everything alone.

An update that is not finite has to change neither weights nor moments, on every ZeRO stage. DeepSpeed's own check covers some of them; so every
optimizer here is `guarded`: its step does nothing while `skip` is set, which all ranks set alike. Leaves out schedules and clipping (the learner).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rftcli.errors import MachineError, RftError
from rftcli.plan.plan import LearnerPlan

Groups = list[dict[str, Any]]
"""Parameter groups as torch takes them."""
_SHOWN_NAMES = 6
"""So many parameter names an error lists."""


def make_optimizer(module: nn.Module, plan: LearnerPlan) -> Any:
    """A guarded optimizer over the trained parameters. RftError when a `no_decay` pattern matches none, MachineError for a missing package."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return OPTIMIZERS[plan.kind](module, named, plan)


@cache
def guarded(kind: type) -> type:
    """`kind` with a `skip` switch. Still a subclass, because DeepSpeed asks for classes."""

    class Guarded(kind):
        skip = False

        def step(self, closure: Any = None) -> Any:
            return None if self.skip else super().step(closure)

    Guarded.__name__ = Guarded.__qualname__ = f"Guarded{kind.__name__}"
    return Guarded


def decay_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, no_decay: tuple[str, ...]) -> Groups:
    """Up to two groups: with and without weight decay. A pattern matches a whole name, as in a shell: `*norm*`."""
    named = list(named)
    unmatched = [pattern for pattern in no_decay if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in named)]
    if unmatched:
        shown = ", ".join(name for name, _ in named[:_SHOWN_NAMES])
        raise RftError(f"train.optimizer.no_decay: `{unmatched[0]}` matches no trained parameter", hint=f"names are like these: {shown}")
    spared = {name for name, _ in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in no_decay)}
    groups = [
        {"params": [parameter for name, parameter in named if name not in spared], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(module: nn.Module) -> set[str]:
    """Names of the weights that Muon is for: matrices inside the model, neither embeddings nor the output head."""
    ends = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    heads = [layer.get_output_embeddings() for layer in module.modules() if isinstance(layer, PreTrainedModel)]
    ends |= {id(head.weight) for head in heads if head is not None}
    return {name for name, parameter in module.named_parameters() if parameter.ndim == 2 and id(parameter) not in ends}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the groups marked `muon`, AdamW for the others; one state, one list of groups.

    Updates of matrices are scaled to AdamW's root mean square by default (arXiv:2502.16982), so that one learning rate serves both.
    """

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, muon: Mapping[str, Any]) -> None:
        super().__init__(groups, {"lr": lr})
        self._muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=lr, **{"adjust_lr_fn": "match_rms_adamw", **muon})
        self._adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr, betas=betas, eps=eps, fused=True)
        self._share()

    def _share(self) -> None:
        """Both work on this optimizer's own groups and state, so that saving, loading and the learning rate see one optimizer."""
        for optimizer, wanted in ((self._muon, True), (self._adamw, False)):
            groups = [group for group in self.param_groups if group["muon"] is wanted]
            for group in groups:
                for name, value in optimizer.defaults.items():
                    group.setdefault(name, value)
            optimizer.param_groups, optimizer.state = groups, self.state

    def step(self, closure: Any = None) -> None:
        self._muon.step()
        self._adamw.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _adamw(module: nn.Module, named: list[tuple[str, nn.Parameter]], plan: LearnerPlan) -> Any:
    groups = decay_groups(named, plan.weight_decay, plan.no_decay)
    return guarded(torch.optim.AdamW)(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps, fused=True, **plan.options)


def _adamw_8bit(module: nn.Module, named: list[tuple[str, nn.Parameter]], plan: LearnerPlan) -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MachineError("adamw_8bit needs the package `bitsandbytes`", hint="pip install 'rftcli[quantise]'") from error
    groups = decay_groups(named, plan.weight_decay, plan.no_decay)
    return guarded(AdamW8bit)(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps, **plan.options)


def _muon(module: nn.Module, named: list[tuple[str, nn.Parameter]], plan: LearnerPlan) -> Any:
    if not hasattr(torch.optim, "Muon"):
        raise MachineError(f"muon needs torch 2.9 or newer, this is {torch.__version__}", hint="pip install --upgrade torch")
    matrices = hidden_matrices(module)
    decayed = decay_groups(named, plan.weight_decay, plan.no_decay)
    names = {id(parameter): name for name, parameter in named}
    groups: Groups = []
    for group in decayed:
        for wanted in (True, False):
            members = [parameter for parameter in group["params"] if (names[id(parameter)] in matrices) is wanted]
            if members:
                groups.append({**group, "params": members, "muon": wanted})
    return guarded(MuonWithAdamW)(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps, muon=plan.options)


Factory = Callable[[nn.Module, list[tuple[str, nn.Parameter]], LearnerPlan], Any]

# How to add one: a function that returns a guarded optimizer and a row here, its name in `recipe.sections.train`, its options in
# `recipe.update_rules`, its bytes in `plan.memory`, and where it may not run in `plan.compile_precision`.
OPTIMIZERS: dict[str, Factory] = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "muon": _muon}
