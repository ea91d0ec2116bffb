"""Engines that generate: requests in, finished completions out (`protocols.Sampler`). One file per engine; `table.SAMPLERS` lists them.

Engines never see rewards and never import the models room: they are given a module, a tokenizer and numbers. This file stays empty.
"""
