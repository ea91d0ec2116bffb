"""rft: reinforcement fine-tuning of language, vision-language and diffusion models from one YAML recipe."""

__version__ = "0.1.0"
