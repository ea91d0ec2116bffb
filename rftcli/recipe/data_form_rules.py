"""Rules across keys of one data set: which keys mean something for which kind of source; `rules` has the table.

What is left out: expressions, templates and files, which are looked at when the data is.
"""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.data_rules import sources
from rftcli.recipe.expand import DATA_FILES
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe


def meaningless_keys(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """`split` and `options` where nothing would read them."""
    for here, source in sources(recipe):
        file = source.path is not None and source.path.lower().endswith(DATA_FILES)
        if source.split is not None and (file or source.python is not None):
            what = "a file" if file else "a `python` source"
            yield Finding(
                path=(*here, "split"),
                message=f"means nothing for {what}",
                reason="it has no splits",
                hint="name the file of the split in `path`" if file else "give the function an option for it",
                reads=((*here, "path"), (*here, "python")),
            )
        if source.options and file:
            yield Finding(
                path=(*here, "options"),
                message="mean nothing for a file",
                reason="they would have no effect",
                hint="a `python` source, a folder and a data set of the hub take options",
                reads=((*here, "path"),),
                at_key=True,
            )


def streaming(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """A stream has no known length."""
    for index, source in enumerate(recipe.data.train):
        if source.streaming and recipe.train.steps is None:
            yield Finding(
                path=("data", "train", index, "streaming"),
                message="needs `train.steps`",
                reason="the rows of a stream are not counted, so `data_passes` has no length",
                reads=(("train", "steps"), ("train", "data_passes")),
            )
