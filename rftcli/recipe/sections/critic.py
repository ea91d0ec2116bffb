"""`models.critic`: the model that learns what an unfinished answer will be worth."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import NonNegative, PathText, Section, Text
from rftcli.recipe.sections.train import Optimizer


class CriticOptimizer(Optimizer):
    """The critic's own optimizer and schedule: the same keys as `train.optimizer`."""

    kind: Literal["adamw", "adamw_8bit"] = Field("adamw", description="Optimizer; `adamw_8bit` keeps its moments in 8 bits and needs a GPU.")
    lr: float = Field(1.0e-5, gt=0, le=1, description="Peak learning rate.")


class CriticModel(Section):
    """A backbone with a head of one number a token: the reward that is still to come."""

    from_: Annotated[str, PathText("model", word="policy"), Field(min_length=1)] = Field(
        "policy", alias="from", description="`policy` for the policy's weights before training and a new head, or a value or reward model's path."
    )
    head: Text | None = Field(
        None, description="Name of the value head among the weights of `from`, where it is not the model class's own; null: it is, or a new one."
    )
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer, description="The critic's own optimizer and schedule.")
    value_clip: Annotated[float, Field(gt=0)] | None = Field(
        0.2, description="How far a value may move from the one before the update until its loss counts both; null is off."
    )
    warmup_steps: NonNegative = Field(0, description="Steps over which the critic's learning rate rises from 0; as in its `optimizer`.")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Norm that the critic's gradient is cut to, over all its parameters and ranks; null is off."
    )
