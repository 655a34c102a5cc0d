"""What is known about a model besides its weights and vocabulary; what the conversion cache stores."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.models.spec import DecoderSpec


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the model's authors recommend; None = they say nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Provenance:
    """Where a model came from.

    kind: "checkpoint" or "gguf". source: path or hub id. revision: the hub's commit, if it is known.
    fingerprint: sha256 of a GGUF file; for a folder, sha256 over its config and its weight files' names and
    sizes.
    """

    kind: str
    source: str
    fingerprint: str
    revision: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """eos_token_ids: every token that ends a generation. special_tokens: `bos_token` and the like, by the
    names that chat templates use."""

    spec: DecoderSpec
    provenance: Provenance
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: GenerationDefaults = GenerationDefaults()
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
