"""rft: reinforcement fine-tuning of language models from one YAML recipe."""

__version__ = "0.1.0"
