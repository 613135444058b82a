"""Answers written by the target itself: prompts in, conversations out, to stop and to start at will."""

from paceline.regenerate.command import regenerate
from paceline.regenerate.options import RegenerateOptions

__all__ = ["RegenerateOptions", "regenerate"]
