"""`launch`, `profile`: how ranks are started, and what is measured while they work."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, Section

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Launch(Section):
    """How the ranks are started, on one machine or on many."""

    env: dict[EnvName, str] = Field(
        default_factory=dict, description="Environment variables that every rank gets, on every node, over what travels by itself."
    )
    timeout_minutes: float = Field(30.0, gt=0, le=1440, description="Minutes that a rank waits for the others in a collective before it fails.")


class Profile(Section):
    """Traces of some steps, for a person who looks for lost time."""

    steps: tuple[Count, ...] = Field((), description="Steps that are traced; none switches the profiler off.")
    tool: Literal["torch", "memory"] = Field(
        "torch", description="What is written to the attempt's `profile/`: a Chrome trace of time, or every allocation of GPU memory with its stack."
    )
    ranks: Literal["first", "all"] = Field("first", description="Whose steps are traced: rank 0's, or every rank's.")
