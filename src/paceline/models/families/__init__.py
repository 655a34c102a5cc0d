"""From a checkpoint's config to a `DecoderSpec`, and the names of its weights."""

from paceline.models.families.blueprint import Blueprint
from paceline.models.families.names import (
    assemble,
    checkpoint_name,
    gguf_name,
    is_norm,
    weight_shapes,
)
from paceline.models.families.table import FAMILIES, Family, blueprint, supported

__all__ = [
    "FAMILIES",
    "Blueprint",
    "Family",
    "assemble",
    "blueprint",
    "checkpoint_name",
    "gguf_name",
    "is_norm",
    "supported",
    "weight_shapes",
]
