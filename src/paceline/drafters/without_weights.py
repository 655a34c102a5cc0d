"""Factories of the drafters that have no weights, apart from them: what they are made from names tensors."""

from __future__ import annotations

from paceline.drafters.materials import Materials
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.ngram import configured as configured_ngram
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.suffix import configured as configured_suffix


def ngram(materials: Materials) -> NgramDrafter:
    return configured_ngram(materials.speculation)


def suffix(materials: Materials) -> SuffixDrafter:
    """Raises ConfigError if the file of past outputs cannot be used."""
    return configured_suffix(materials.speculation, materials.vocabulary, materials.target_vocab_size)
