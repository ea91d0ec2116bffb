"""`models`: which models take part and how they are loaded."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, ModelPath, Name, NonNegative, Options, PathText, Section, Share, TemplateText, Text
from rftcli.recipe.sections.critic import CriticModel
from rftcli.recipe.sections.quantise import Quantise
from rftcli.recipe.sections.scorers import ScorerModel
from rftcli.recipe.sections.teacher import TeacherModel


class Chat(Section):
    """How messages become the text of a prompt."""

    template: TemplateText | None = Field(None, description="Chat template: Jinja text, or a file that holds it; null takes the tokenizer's own.")
    options: Options = Field({}, description="Names that the chat template reads, such as `enable_thinking`; `{column: NAME}` takes a row's own.")
    system: str | None = Field(None, description="System turn for message lists that have none.")
    prefill: Text | None = Field(None, description="Beginning of every answer, written for the model as the end of the prompt.")
    score_prefill: bool = Field(True, description="Whether rewards see the prefill in front of the completion.")


class Lora(Section):
    """A low-rank adapter that is trained in place of the model's own weights."""

    rank: Count = Field(32, description="Rank of the update of every adapted matrix.")
    alpha: float = Field(64.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: Share = Field(0.0, description="Dropout in front of the adapter; anything above 0 switches the on-policy shortcut off.")
    targets: Text | tuple[Text, ...] = Field(
        "all-linear", description="Modules that are adapted: all-linear (all but the output head), a list of name endings, or one regular expression."
    )
    save_also: tuple[Text, ...] = Field((), description="Name endings of modules that are trained whole beside the adapter.")
    start_from: ModelPath | None = Field(
        None, description="Existing adapter to go on from: a directory or a hub id; the reference is then a frozen copy of it."
    )
    options: Options = Field({}, description="Further arguments of peft's LoraConfig, such as `use_rslora`, `use_dora` or `exclude_modules`.")


class Ema(Section):
    """A running mean of the trained weights, in float32."""

    decay: float = Field(0.992, gt=0, lt=1, description="Share of the old mean that stays after each applied update.")
    evaluate: bool = Field(False, description="Whether every evaluation also scores the mean, as `NAME@ema` beside `NAME`.")
    export: bool = Field(False, description="Whether `final/` holds the mean in place of the live weights.")


class PolicyModel(Section):
    """The model that is trained."""

    path: ModelPath = Field(description="Model to train: a directory, a hub id, or `builtin:<name>`.")
    revision: Text | None = Field(
        None, description="Branch, tag or commit of a hub id; null is the newest. Either way the plan and the manifest hold the commit."
    )
    tokenizer: ModelPath | None = Field(None, description="Another tokenizer than the model's own: a directory or a hub id.")
    tokenizer_options: Options = Field({}, description="Further arguments of the tokenizer's `from_pretrained`, such as `padding_side: left`.")
    add_tokens: tuple[Text, ...] = Field(
        (), description="Tokens that are added to the vocabulary; the embeddings grow with it and checkpoints hold both."
    )
    trust_remote_code: bool = Field(False, description="Whether code that comes with the model may run.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of weights and activations; auto: bfloat16 on a GPU from Ampere on, else float32."
    )
    attention: Literal["auto", "eager", "sdpa", "varlen", "flash_2", "flash_3"] = Field(
        "auto",
        description="Attention implementation of the trainer; `varlen` (torch's) and `flash_*` (flash-attn) take packed rows without a mask; `auto` "
        "is `varlen` on a GPU where answers end at different lengths or prompts are shared, else `sdpa`.",
    )
    quantise: Quantise | None = Field(None, description="Frozen weights in 4 or 8 bits below a LoRA adapter; null keeps `dtype`.")
    dropout: Share = Field(0.0, description="Dropout probability in training; anything above 0 switches the on-policy shortcut off.")
    freeze: tuple[Text, ...] = Field(
        (), description="Parameters that are not trained, as shell patterns over their whole names: `model.embed_tokens.*`, `*.layers.0.*`."
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="Whether activations are computed again in the backward pass, which saves memory and costs time."
    )
    options: Options = Field({}, description="Further arguments of `from_pretrained`.")
    router_loss: float = Field(
        0.0, ge=0, description="Coefficient of the loss that balances a mixture of experts, within each answer's sequence; 0 is off."
    )
    lora: Lora | None = Field(None, description="A low-rank adapter is trained in place of all weights; a mapping, which may be empty, is on.")
    ema: Ema | None = Field(None, description="A running mean of the weights is kept; a mapping, which may be empty, is on.")
    chat: Chat = Field(default_factory=Chat, description="How messages become the text of a prompt.")


class Refresh(Section):
    """How the reference follows the policy."""

    every: NonNegative = Field(0, description="Steps between two refreshes; 0 is never.")
    mix: float = Field(0.6, gt=0, le=1, description="Reference = mix x policy + (1 - mix) x reference, weight by weight; 1 copies the policy.")


class ReferenceModel(Section):
    """The frozen model that the KL term compares with; loaded only when something needs it."""

    from_: Annotated[str, PathText("model", word="policy"), Field(min_length=1)] = Field(
        "policy", alias="from", description="`policy` for the policy as it was before training, or another model's path."
    )
    refresh: Refresh = Field(default_factory=Refresh, description="How the reference follows the policy.")
    offload: Literal["auto"] | bool = Field(
        "auto", description="Whether a reference model waits in CPU memory between uses; auto: where the device would be too full."
    )
    shard: Literal["auto"] | bool = Field(
        "auto", description="Whether a reference model is partitioned over the ranks; auto: where no device holds it whole."
    )


class Models(Section):
    """The models of a run."""

    policy: PolicyModel = Field(description="The model that is trained.")
    reference: ReferenceModel = Field(
        default_factory=ReferenceModel, description="The frozen model that the KL term compares with; loaded only when something needs it."
    )
    critic: CriticModel | None = Field(None, description="The model that learns what answers will be worth; gae needs one. A mapping may be empty.")
    scorers: dict[Name, ScorerModel] = Field({}, description="Name to a model or service that reward parts use as `model: NAME`.")
    teacher: TeacherModel | None = Field(None, description="The model that the policy is distilled from; a `path` or a `server`.")
