"""What every section is made of: the strict base class and the kinds of values."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class PathText:
    """Marks text that names a file. `kind`: "file" is relative to the file that wrote it; "model" too if it exists there, else it is a hub id;
    "data" is "file" unless it looks like `org/name` and does not exist;
    "template" is a file unless it holds a `{` of Jinja; "output" is relative to the working directory of the run."""

    kind: Literal["file", "data", "model", "template", "output"]
    word: str | None = None
    """A word that is no path."""


class Section(BaseModel):
    """What all sections share: unknown keys are refused, nothing is coerced, nothing can be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True, protected_namespaces=())


FilePath = Annotated[str, PathText("file"), Field(min_length=1)]
DataPath = Annotated[str, PathText("data"), Field(min_length=1)]
ModelPath = Annotated[str, PathText("model"), Field(min_length=1)]
OutputPath = Annotated[str, PathText("output"), Field(min_length=1)]
TemplateText = Annotated[str, PathText("template"), Field(min_length=1)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
Name = Annotated[str, Field(pattern=r"^[^\s./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Options = dict[str, Any]
