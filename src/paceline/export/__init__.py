"""A drafter and its serving folder: written whole, read strictly, compared with what was trained."""

from paceline.export.card import CardFacts, TauRow
from paceline.export.facts import read_facts
from paceline.export.folder import check_fits, compare, read, read_shape, write

__all__ = ["CardFacts", "TauRow", "check_fits", "compare", "read", "read_facts", "read_shape", "write"]
