"""Pydantic's plugins, which no recipe needs. Looking for them reads the metadata of every installed package, and takes longer than checking a recipe."""

from __future__ import annotations

import os

from pydantic import TypeAdapter

SWITCH = "PYDANTIC_DISABLE_PLUGINS"


def look_for_none() -> None:
    """Pydantic looks once a process, when it builds its first model: that is done here, without any. What this process starts may have them,
    and so may whoever has set the variable."""
    if SWITCH in os.environ:
        return
    os.environ[SWITCH] = "__all__"
    try:
        TypeAdapter(bool)
    finally:
        del os.environ[SWITCH]
