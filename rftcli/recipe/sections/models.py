"""`models`: which models take part and how they are loaded."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import ModelPath, Options, PathText, Section, Share, TemplateText, Text
from rftcli.recipe.sections.critic import CriticModel


class Chat(Section):
    """How messages become the text of a prompt."""

    template: TemplateText | None = Field(None, description="Chat template: Jinja text, or a file that holds it; null takes the tokenizer's own.")
    options: Options = Field({}, description="Names that the chat template reads, such as `enable_thinking`.")
    system: str | None = Field(None, description="System turn for message lists that have none.")
    prefill: Text | None = Field(None, description="Beginning of every answer, written for the model as the end of the prompt.")
    score_prefill: bool = Field(True, description="Whether rewards see the prefill in front of the completion.")


class PolicyModel(Section):
    """The model that is trained."""

    path: ModelPath = Field(description="Model to train: a directory, a hub id, or `builtin:<name>`.")
    trust_remote_code: bool = Field(False, description="Whether code that comes with the model may run.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of weights and activations; auto: float32 on a CPU, else bfloat16."
    )
    attention: Literal["auto", "eager", "sdpa"] = Field("auto", description="Attention implementation of the trainer.")
    dropout: Share = Field(0.0, description="Dropout probability in training; anything above 0 switches the on-policy shortcut off.")
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="Whether activations are computed again in the backward pass, which saves memory and costs time."
    )
    options: Options = Field({}, description="Further arguments of `from_pretrained`.")
    router_loss: float = Field(
        0.0, ge=0, description="Coefficient of the loss that balances a mixture of experts, within each answer's sequence; 0 is off."
    )
    chat: Chat = Field(default_factory=Chat, description="How messages become the text of a prompt.")


class ReferenceModel(Section):
    """The frozen model that the KL term compares with; loaded only when something needs it."""

    from_: Annotated[str, PathText("model", word="policy"), Field(min_length=1)] = Field(
        "policy", alias="from", description="`policy` for the policy as it was before training, or another model's path."
    )


class Models(Section):
    """The models of a run."""

    policy: PolicyModel = Field(description="The model that is trained.")
    reference: ReferenceModel = Field(
        default_factory=ReferenceModel, description="The frozen model that the KL term compares with; loaded only when something needs it."
    )
    critic: CriticModel | None = Field(None, description="The model that learns what answers will be worth; gae needs one. A mapping may be empty.")
