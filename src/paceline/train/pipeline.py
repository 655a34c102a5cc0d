"""From a target and its answers to a head on disk, stage by stage; what is done is not done again."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from paceline import __version__
from paceline.engine.llm import LLM
from paceline.engine.model_setup import ModelSetup
from paceline.errors import ConfigError, ModelError
from paceline.train.answers import sha256_of
from paceline.train.batches import split
from paceline.train.capture import bytes_to_come, capture
from paceline.train.checkpoint import Layout, write_head
from paceline.train.curves import METRICS, PICTURE, Metrics, draw, read_metrics
from paceline.train.generate import AnswerPlan, answer
from paceline.train.head_shape import default_capture, head_shape
from paceline.train.prompts import TrainingPrompt
from paceline.train.recipe import Recipe
from paceline.train.store import FeatureStore
from paceline.train.trainer import Data, Report, Trainer
from paceline.train.vocabulary import draft_vocabulary


@dataclass(frozen=True)
class Places:
    """Where things of one training lie. head: what is made of it."""

    out: Path
    answers: Path
    features: Path

    @property
    def head(self) -> Path:
        return self.out / "head"


def answer_stage(
    setup: ModelSetup,
    engine: Callable[[], LLM],
    prompts: Sequence[TrainingPrompt],
    places: Places,
    plan: AnswerPlan,
    *,
    quiet: bool,
) -> None:
    """The target answers the prompts. Raises as `generate.answer`."""
    total = len(prompts) + plan.invented
    with tqdm(total=total, desc="answering", unit="prompt", disable=quiet) as bar:

        def show(done: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(done - bar.n)

        answer(setup.model, engine, prompts, places.answers, plan, progress=show)


def check_capture(setup: ModelSetup, layers: tuple[int, ...]) -> None:
    """Raises ConfigError for layers, asked for by `--capture`, that the target does not have."""
    last = setup.model.spec.num_layers - 1
    if any(not 0 <= layer <= last for layer in layers) or len(set(layers)) < len(layers):
        raise ConfigError(
            f"--capture is {','.join(map(str, layers))}: give different layers of {setup.model.name}, from 0 "
            f"to {last}."
        )


def capture_stage(
    setup: ModelSetup, places: Places, capture_at: tuple[int, ...], longest: int, *, quiet: bool
) -> None:
    """The target reads its answers. Raises as `capture.capture`, and OSError for a full disk."""
    total = _count_lines(places.answers)
    spec = setup.model.spec
    layers = capture_at or default_capture(spec.num_layers)
    needed = bytes_to_come(places.answers, places.features, spec.hidden_size, len(layers), longest)
    places.features.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(places.features).free
    if needed > free:
        raise ConfigError(
            f"the features need {needed / 1e9:.1f} GB more and {places.features} has {free / 1e9:.1f} GB "
            "left: free some, give another folder with --features, or use fewer answers."
        )
    with tqdm(total=total, desc="capturing", unit="answer", disable=quiet) as bar:

        def show(tokens: int, lines: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(lines - bar.n)

        capture(setup, places.answers, places.features, layers, longest=longest, progress=show)


def train_stage(
    setup: ModelSetup,
    places: Places,
    recipe: Recipe,
    *,
    layout: Layout = "eagle3",
    quiet: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains on the captured features; the best head so far is in `places.head` all the time. Whether the
    training came to its end, or was stopped."""
    model = setup.model
    store = FeatureStore(places.features)
    assert store.meta is not None
    if store.meta.fingerprint != model.provenance.fingerprint:
        raise ModelError(
            f"{places.features} was captured from {store.meta.target}, not from {model.name}: name that "
            "target, or give another folder."
        )
    training, held_out = split(store, recipe.held_out, recipe.longest)
    if not training or not held_out:
        raise ConfigError(
            f"{places.features} has {len(training)} answers to train on and {len(held_out)} to hold out: "
            "generate more answers, or change --held-out."
        )
    vocabulary = draft_vocabulary(store, training, model.spec.vocab_size, recipe.draft_vocab_size)
    shape = head_shape(
        model.spec,
        len(vocabulary.ids),
        capture=store.meta.capture,
        intermediate_size=recipe.intermediate_size,
        num_kv_heads=recipe.num_kv_heads,
        norm_before_residual=recipe.norm_before_residual,
        fc_norm=recipe.fc_norm,
        norm_output=recipe.norm_output,
    )
    about = _provenance(setup, places, recipe, store, vocabulary.covered)

    def keep(parameters: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        training_record = {**about, "metrics": record}
        write_head(
            places.head, shape, parameters, vocabulary, training_record, target=model.name, layout=layout
        )

    places.out.mkdir(parents=True, exist_ok=True)
    report = Report(best=keep)
    data = Data(store, training, held_out, vocabulary)
    trainer = Trainer(shape, recipe, data, model.weights, places.out, device=setup.device, report=report)
    _run(trainer, places, quiet=quiet, stop=stop)
    return trainer.progress.done


def _run(trainer: Trainer, places: Places, *, quiet: bool, stop: Callable[[], bool]) -> None:
    metrics = Metrics(places.out / METRICS, trainer.progress.update)
    with tqdm(total=1.0, desc="training", disable=quiet, bar_format=_BAR) as bar:

        def updated(record: dict[str, Any]) -> None:
            metrics.add(record)
            speed = record["tokens"] / record["seconds"]
            accepted = " ".join(f"{share:.2f}" for share in record["alpha"])
            bar.set_postfix_str(
                f"loss {record['loss']:.3f}, accepted {accepted}, {speed:.0f} tok/s", refresh=False
            )
            bar.update(min(1.0, record["share"]) - bar.n)

        def evaluated(record: dict[str, Any]) -> None:
            metrics.add(record)
            if not quiet:
                numbers = record["acceptance"]["all"]
                text = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
                bar.write(f"update {record['update']}: {text}")
            draw(read_metrics(places.out / METRICS), places.out / PICTURE)

        trainer.report.update, trainer.report.evaluation = updated, evaluated
        try:
            trainer.run(stop)
        finally:
            metrics.close()


_BAR = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}] {postfix}"


def _provenance(
    setup: ModelSetup, places: Places, recipe: Recipe, store: FeatureStore, covered: float
) -> dict[str, Any]:
    answers = places.answers
    source = setup.model.provenance
    target = {"name": setup.model.name, "sha256": source.fingerprint, "revision": source.revision}
    return {
        "target": target,
        "precision": setup.precision,
        "data": {
            **store.describe(),
            "answers_sha256": sha256_of(answers) if answers.exists() else None,
            "draft_vocabulary_covers": round(covered, 5),
        },
        "recipe": asdict(recipe),
        "versions": {
            "paceline": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _count_lines(path: Path) -> int:
    if not path.exists():
        raise ConfigError(f"there is no file {path}: generate the target's answers first.")
    with path.open("rb") as file:
        return sum(1 for _ in file)


def check_fits(setup: ModelSetup) -> None:
    """Raises ConfigError for a target whose weights alone are more than the memory that is free."""
    spec = setup.model.spec
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
    count = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    needed = count * {"float32": 4, "bfloat16": 2, "int8": 1}[setup.precision]
    if needed > setup.free_bytes:
        free = setup.free_bytes / 1e9
        raise ConfigError(
            f"{setup.model.name} in {setup.precision} takes {needed / 1e9:.1f} GB and {free:.1f} GB are "
            "free: choose a smaller target, a smaller --dtype, or a machine with more memory."
        )
