"""From a name on the command line to a decoder's spec and weights, its tokenizer and its chat template."""

from paceline.loading.chat_template import ChatTemplate
from paceline.loading.info import GenerationDefaults, ModelInfo, Provenance
from paceline.loading.model import LoadedModel, load
from paceline.loading.source import Source, resolve
from paceline.loading.tokenizer import TextStream, Tokenizer, check_same_vocabulary

__all__ = [
    "ChatTemplate",
    "GenerationDefaults",
    "LoadedModel",
    "ModelInfo",
    "Provenance",
    "Source",
    "TextStream",
    "Tokenizer",
    "check_same_vocabulary",
    "load",
    "resolve",
]
