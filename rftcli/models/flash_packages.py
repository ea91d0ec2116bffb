"""Packages that kinds of attention need, by kind of a recipe. Apart, so that it is known without torch."""

FLASH = {"flash_2": "flash_attn", "flash_3": "flash_attn_interface"}
