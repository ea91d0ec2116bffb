"""The sections of a recipe: every supported key with its type, range, default and one sentence of meaning. Defaults live here and nowhere else.

What is left out: reading YAML (`read`), rules across keys (`rules`), keys and values that the language has but this version lacks (`not_yet`).

How to add a key: one line here with a `description`; if it was in `not_yet.KEYS`, delete it there. How to add a value of a `Literal`: add it to the
table of the room that does the work, here, and delete it from `not_yet.VALUES`. A key that may be null has null as its default, because null in
a file takes back what a parent recipe wrote; where null says something else than the default does, it is kept (`kinds.null_has_a_meaning`).
Annotations are read at run time, so they are not postponed. One file a group of sections; `Recipe` ties them together.
"""

from pydantic import Field

from rftcli.recipe.sections.algorithm import Advantage, Algorithm, Kl, KlController
from rftcli.recipe.sections.base import Name, PathText, Section, Text
from rftcli.recipe.sections.critic import CriticModel, CriticOptimizer
from rftcli.recipe.sections.data import Columns, Data, DataSource, EvalSource, SetSampling, TrainSource
from rftcli.recipe.sections.launch import Launch, Profile
from rftcli.recipe.sections.loss import Correction, EntropyController, Loss, Reject
from rftcli.recipe.sections.models import Chat, Ema, Lora, Models, PolicyModel, ReferenceModel, Refresh
from rftcli.recipe.sections.quantise import Quantise
from rftcli.recipe.sections.rewards import CombineFunction, Overlong, Reward, RewardPart, RewardShaping
from rftcli.recipe.sections.rollout import HfEngine, Rollout
from rftcli.recipe.sections.run import Checkpoint, EarlyStop, Eval, KeepBest, Samples, Track, Wandb
from rftcli.recipe.sections.sampling import Curriculum, Dynamic, Keep, LabelSampling, OverSample, Replay
from rftcli.recipe.sections.scorers import JudgeScore, Placement, ScorerModel
from rftcli.recipe.sections.sglang import SglangEngine
from rftcli.recipe.sections.supervised import Supervised, SupervisedColumns, SupervisedSource
from rftcli.recipe.sections.teacher import TeacherModel
from rftcli.recipe.sections.train import Batch, DeepSpeed, NonFinite, Offload, Optimizer, Precision, Train
from rftcli.recipe.sections.vllm import VllmEngine, VllmServer, VllmStart


class Recipe(Section):
    """What a person wants, whole. `models.policy.path`, one data path, one reward and `train.steps` are enough."""

    name: Name | None = Field(
        None,
        description="Name of the run and of its directory, which may hold {date}, {time}, {model}, {recipe} and {seed}; null takes the name of the "
        "recipe's file.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Key of everything random: order of the data, samples, dropout.")
    extends: tuple[Text, ...] = Field(
        (),
        description="Recipes this one builds on, left to right: mappings merge, lists replace, null removes; a path is relative to this file, "
        "a name without a file is a shipped recipe.",
    )
    models: Models = Field(description="The models of the run.")
    data: Data = Field(description="What the run trains on and is evaluated on.")
    rollout: Rollout = Field(default_factory=Rollout, description="How completions are sampled for training.")
    rewards: dict[Text, Reward] = Field(description="Label of a row to the weighted parts that score it; `default` serves rows without a label.")
    reward_shaping: RewardShaping = Field(default_factory=RewardShaping, description="What happens to rewards before the advantage.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="The mathematics of the update.")
    batch: Batch = Field(default_factory=Batch, description="How the completions of a step are cut into updates.")
    train: Train = Field(default_factory=Train, description="How long and how fast the policy is trained.")
    eval: Eval = Field(default_factory=Eval, description="When and how the evaluation sets are evaluated.")
    samples: Samples = Field(default_factory=Samples, description="What of the training completions stays on disk.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When checkpoints are written and what stays of them.")
    track: Track = Field(default_factory=Track, description="Trackers beside the run's own event file.")
    launch: Launch = Field(default_factory=Launch, description="How the ranks are started.")
    profile: Profile = Field(default_factory=Profile, description="Traces of some steps.")


__all__ = [
    "Advantage",
    "Algorithm",
    "Batch",
    "Chat",
    "Checkpoint",
    "Columns",
    "CombineFunction",
    "Correction",
    "CriticModel",
    "CriticOptimizer",
    "Curriculum",
    "Data",
    "DataSource",
    "DeepSpeed",
    "Dynamic",
    "EarlyStop",
    "Ema",
    "EntropyController",
    "Eval",
    "EvalSource",
    "HfEngine",
    "JudgeScore",
    "Keep",
    "KeepBest",
    "Kl",
    "KlController",
    "LabelSampling",
    "Launch",
    "Lora",
    "Loss",
    "Models",
    "NonFinite",
    "Offload",
    "Optimizer",
    "OverSample",
    "Overlong",
    "PathText",
    "Placement",
    "PolicyModel",
    "Precision",
    "Profile",
    "Quantise",
    "Recipe",
    "ReferenceModel",
    "Refresh",
    "Reject",
    "Replay",
    "Reward",
    "RewardPart",
    "RewardShaping",
    "Rollout",
    "Samples",
    "ScorerModel",
    "Section",
    "SetSampling",
    "SglangEngine",
    "Supervised",
    "SupervisedColumns",
    "SupervisedSource",
    "TeacherModel",
    "Track",
    "Train",
    "TrainSource",
    "VllmEngine",
    "VllmServer",
    "VllmStart",
    "Wandb",
]
