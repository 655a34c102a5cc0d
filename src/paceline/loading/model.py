"""From a name to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.loading import checkpoint, checkpoint_tokenizer, convert, hub
from paceline.loading.chat_template import ChatTemplate
from paceline.loading.info import GenerationDefaults, ModelInfo, Provenance
from paceline.loading.source import resolve
from paceline.loading.tokenizer import Tokenizer
from paceline.models.spec import DecoderSpec, DecoderWeights


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. name: as the user gave it. weights: mapped from disk, in their stored types.

    eos_token_ids: every token that ends a generation. chat_template: None if the model has none.
    """

    name: str
    info: ModelInfo
    weights: DecoderWeights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def spec(self) -> DecoderSpec:
        return self.info.spec

    @property
    def vocab_size(self) -> int:
        """Ids below this have both a text and an embedding."""
        return min(self.tokenizer.vocab_size, self.info.spec.vocab_size)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.info.spec.context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.info.eos_token_ids

    @property
    def generation(self) -> GenerationDefaults:
        return self.info.generation

    @property
    def provenance(self) -> Provenance:
        return self.info.provenance

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, to be encoded with `add_special_tokens=False`.

        Raises RequestError if the model has no template or the template rejects the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"the model {self.name!r} has no chat template. Send a plain prompt, or use an "
                "instruction-tuned model."
            )
        return self.chat_template.render(messages, add_generation_prompt, tools, **variables)


def load(name: str) -> LoadedModel:
    """Load a model by name: `embedded`, a folder, a `.gguf` file, or a hub id (see `resolve`).

    Weights are memory-mapped in their stored types (float32, float16 or bfloat16); nothing is copied but
    what must be computed. Raises ModelError if the model is missing, damaged, unsafe or unsupported.
    """
    source = resolve(name)
    if source.kind == "hub":
        assert source.repo is not None
        folder, commit = hub.fetch(source.repo, source.revision)
        return _load_checkpoint(name, folder, source.repo, commit)
    assert source.path is not None
    if source.kind == "checkpoint":
        return _load_checkpoint(name, source.path, str(source.path.resolve()), None)
    folder = convert.converted(source.path, expected_sha256=source.sha256, source=str(source.path))
    return _load_converted(name, folder)


def _load_checkpoint(name: str, folder: Path, source: str, revision: str | None) -> LoadedModel:
    info, plan = checkpoint.read_checkpoint(folder, source, revision)
    tokenizer = checkpoint_tokenizer.read_tokenizer(folder)
    return _loaded(name, info, checkpoint.read_weights(folder, plan), tokenizer)


def _load_converted(name: str, folder: Path) -> LoadedModel:
    info = convert.read_info(folder)
    assert info is not None, folder
    weights = checkpoint.read_canonical(folder / convert.WEIGHTS, info.spec.num_layers)
    return _loaded(name, info, weights, Tokenizer.from_file(folder / convert.TOKENIZER))


def _loaded(name: str, info: ModelInfo, weights: DecoderWeights, tokenizer: Tokenizer) -> LoadedModel:
    template = ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None
    return LoadedModel(name, info, weights, tokenizer, template)
