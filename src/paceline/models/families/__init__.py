"""From a checkpoint's config to a `DecoderSpec`, and the names of its weights."""

from paceline.models.families.blueprint import Blueprint
from paceline.models.families.names import (
    assemble,
    checkpoint_name,
    gguf_name,
    is_norm,
    layer_name,
    weight_shapes,
)
from paceline.models.families.rope import rope_parameters, rope_spec
from paceline.models.families.table import (
    ACTIVATIONS,
    FAMILIES,
    Family,
    blueprint,
    supported,
    whole_number,
)

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "Blueprint",
    "Family",
    "assemble",
    "blueprint",
    "checkpoint_name",
    "gguf_name",
    "is_norm",
    "layer_name",
    "rope_parameters",
    "rope_spec",
    "supported",
    "weight_shapes",
    "whole_number",
]
