"""The loop: what it learns, that it can be interrupted, and what it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError, EngineError, ModelError
from paceline.execution.forward_batch import Segment, SlotTables, build_batch, tree_paths
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel
from paceline.loading.heads import load_head
from paceline.models.torch_head import TorchHead
from paceline.train import acceptance
from paceline.train.batches import packed, split
from paceline.train.capture import capture
from paceline.train.checkpoint import write_head
from paceline.train.head_shape import head_shape
from paceline.train.recipe import Recipe
from paceline.train.start import STARTS
from paceline.train.store import FeatureStore
from paceline.train.trainer import Data, Report, Trainer, learning_rate
from paceline.train.unroll import Continue, HeadPass
from paceline.train.vocabulary import draft_vocabulary

from .support import setup_of, tiny_target, write_own_answers

RECIPE = Recipe(
    steps=3,
    draft_vocab_size=200,
    batch_tokens=120,
    epochs=3,
    learning_rate=3e-3,
    held_out=0.2,
    evaluate_every=1000.0,
    ema=0.9,
    bf16=False,
)


@dataclasses.dataclass
class World:
    model: LoadedModel
    store: FeatureStore

    def data(self, recipe: Recipe) -> Data:
        training, held_out = split(self.store, recipe.held_out, recipe.longest)
        vocabulary = draft_vocabulary(
            self.store, training, self.model.spec.vocab_size, recipe.draft_vocab_size
        )
        return Data(self.store, training, held_out, vocabulary)

    def trainer(self, folder: Path, recipe: Recipe = RECIPE, report: Report | None = None) -> Trainer:
        data = self.data(recipe)
        shape = head_shape(
            self.model.spec,
            len(data.vocabulary.ids),
            capture=self.store.meta.capture,
            fc_norm=recipe.fc_norm,
            norm_output=recipe.norm_output,
            norm_before_residual=recipe.norm_before_residual,
        )
        return Trainer(shape, recipe, data, self.model.weights, folder, report=report)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("trainer")
    model = tiny_target(folder)
    answers = write_own_answers(folder / "answers.jsonl", model, 80)
    capture(setup_of(model), answers, folder / "store", (2, 4, 5))
    return World(model, FeatureStore(folder / "store"))


def after(updates: int) -> Callable[[], bool]:
    """Stops after so many updates."""
    asked = iter(range(10_000))
    # The loop asks once before each epoch and once after each update.
    return lambda: next(asked) >= updates


@pytest.mark.parametrize("start", ["fit", "target", "random"])
def test_a_trained_head_beats_the_untrained(world: World, tmp_path: Path, start: Any) -> None:
    """On the training answers, whose exceptions it may learn by heart."""
    recipe = dataclasses.replace(RECIPE, start=start, epochs=30, loss="kl")
    trainer = world.trainer(tmp_path, recipe)
    trainer.data = dataclasses.replace(trainer.data, held_out=trainer.data.training)
    before = trainer.evaluate()["acceptance"]["all"]["k3"]
    trainer.run()
    assert trainer.evaluate()["acceptance"]["all"]["k3"] > before + 0.5


def test_the_fit_is_a_head_already(world: World, tmp_path: Path) -> None:
    """Untrained, it agrees with the target more than the other starts."""
    batch = packed(world.store, world.data(RECIPE).training)
    shares = {}
    for start in STARTS:
        recipe = dataclasses.replace(RECIPE, start=start)  # type: ignore[arg-type]
        alphas = world.trainer(tmp_path / start, recipe).loss(batch, 0, 1)[1]
        shares[start] = float(alphas[0].mean())
    assert shares["fit"] > 1.2 * max(shares["target"], shares["random"]), shares


def test_resumed_is_the_same_as_uninterrupted(world: World, tmp_path: Path) -> None:
    whole = world.trainer(tmp_path / "whole")
    whole.run()
    total = whole.progress.update
    assert total > 8
    for stop in (1, total // 2, total - 1):
        world.trainer(tmp_path / "parts").run(after(stop))
    parts = world.trainer(tmp_path / "parts")
    assert 0 < parts.progress.update <= total
    parts.run()
    assert parts.progress.update == total
    for name, tensor in whole.parameters.items():
        assert torch.equal(tensor, parts.parameters[name]), name
        assert torch.equal(whole.average[name], parts.average[name]), name


def test_a_state_of_another_recipe_is_refused(world: World, tmp_path: Path) -> None:
    world.trainer(tmp_path).run(after(2))
    with pytest.raises(ModelError, match="another recipe"):
        world.trainer(tmp_path, dataclasses.replace(RECIPE, steps=2))


def test_thinning_is_the_weighted_loss_in_the_mean(world: World, tmp_path: Path) -> None:
    group = world.data(RECIPE).training[:6]
    batch = packed(world.store, group)
    weighted = world.trainer(tmp_path / "w", dataclasses.replace(RECIPE, thin=False))
    want, alphas = weighted.loss(batch, 0, 3)
    thinned = world.trainer(tmp_path / "t")
    losses = [float(thinned.loss(batch, seed, 3)[0].detach()) for seed in range(150)]
    assert sum(losses) / len(losses) == pytest.approx(float(want.detach()), rel=0.03)
    counts = [len(alpha) for alpha in alphas]
    assert counts[0] == len(batch.rows)
    assert counts[1] == len(batch.rows) - len(group)


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(learning_rate=1.0 - 1e-9, warmup=0.1, final_rate=0.1)
    rates = [learning_rate(recipe, share / 100) for share in range(101)]
    assert rates[10] == pytest.approx(1.0, abs=1e-3)
    assert rates[1:11] == sorted(rates[1:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert len(set(rates)) > 95
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize(
    "flags",
    [
        {"fc_norm": True, "norm_output": True},
        {"fc_norm": False, "norm_before_residual": True},
    ],
    ids=["3.1", "normed residual"],
)
def test_the_engine_runs_what_was_trained(
    world: World, tmp_path: Path, layout: Any, flags: dict[str, bool]
) -> None:
    """The written head, loaded, gives the trainer's logits: over a prompt, and two steps beyond."""
    recipe = dataclasses.replace(RECIPE, **flags)
    trainer = world.trainer(tmp_path / "run", recipe)
    trainer.run(after(3))
    rounded = {name: tensor.bfloat16().float() for name, tensor in trainer.average.items()}
    vocabulary = trainer.data.vocabulary
    write_head(
        tmp_path / "head", trainer.shape, rounded, vocabulary, {}, target=world.model.name, layout=layout
    )
    loaded = load_head(tmp_path / "head", world.model)
    assert loaded.spec.capture == world.store.meta.capture
    assert loaded.weights.target_ids is not None
    assert torch.equal(loaded.weights.target_ids, vocabulary.ids)

    one = trainer.data.held_out[0]
    batch = packed(world.store, [one])
    context, last = batch.context, batch.rows[-3]
    ahead = [int(token) for token in context.next_tokens[int(last) + 1 : int(last) + 3]]
    head = HeadPass(trainer.shape, rounded, world.model.weights.embed.float())
    steps = head.unroll(
        context, last[None], 3, lambda step, _: Continue(torch.tensor([0]), torch.tensor([ahead[step - 1]]))
    )
    want = torch.cat([step.normed @ rounded["lm_head.weight"].t() for step in steps])

    engine = TorchHead(loaded.spec, loaded.weights)
    spec = loaded.spec
    kv = KVCache(1, 64, spec.num_kv_heads, spec.head_dim, engine.kv_dtype)
    tables = SlotTables(1, 64)
    tables.write(0, 0, range(64))
    count = int(last) + 1
    known = Segment(0, 0, context.next_tokens[:count].tolist(), wanted=True)
    logits, fed = engine.forward(
        build_batch([known], tables), engine.fuse(context.features[:count].float()), kv
    )
    got = [logits[-1]]
    paths = tree_paths([-1, 0], [count, count + 1])
    for step in (0, 1):
        node = Segment(0, count, (), True, tree_tokens=[ahead[step]], tree_paths=[paths[step]])
        logits, fed = engine.forward(build_batch([node], tables), fed[-1:].clone(), kv)
        got.append(logits[-1])
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-3, atol=2e-3)


def test_greedy_chains_follow_the_heads_own_tokens(world: World, tmp_path: Path) -> None:
    """Against one chain after the other, and the stepped length against stepping by hand."""
    trainer = world.trainer(tmp_path)
    trainer.run(after(12))
    ids = trainer.data.vocabulary.ids
    head = HeadPass(trainer.shape, trainer.average, world.model.weights.embed.float())
    batch = packed(world.store, trainer.data.held_out[:4])
    with torch.no_grad():
        found = acceptance.greedy_chains(head, batch, ids, 3)
    for one, got in zip(trainer.data.held_out[:4], found, strict=True):
        alone = packed(world.store, [one])
        answer = world.store.answer(one).tolist()
        for row in range(len(alone.rows)):
            guesses: list[int] = []

            def go_on(_: int, done: Any, guesses: list[int] = guesses) -> Continue:
                guesses.append(int(ids[(done.normed @ head.p["lm_head.weight"].t()).argmax()]))
                return Continue(torch.tensor([0]), torch.tensor([guesses[-1]]))

            with torch.no_grad():
                head.unroll(alone.context, alone.rows[row : row + 1], 4, go_on)
            want = [guess == token for guess, token in zip(guesses, answer[row + 1 :], strict=False)]
            right = [*want, False].index(False)
            assert int(got.first[row].sum()) == min(right, 3)


def test_stepped_acceptance_length() -> None:
    first = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    one = acceptance.Accepted("a", first)
    # Three tokens from the first row; then none accepted; then two of which one accepted and the end.
    assert acceptance.acceptance_length([one], 3) == pytest.approx((3 + 1 + 2) / 3)
    assert acceptance.acceptance_length([one], 1) == pytest.approx((2 + 2 + 2) / 3)
    numbers = acceptance.summary([one], (1, 3))["all"]
    assert numbers["step1"] == pytest.approx(4 / 6, abs=1e-4)
    assert numbers["step2"] == pytest.approx(3 / 4)


def test_a_recipe_out_of_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--learning-rate is 2.0: it must be between 0 and 1"):
        Recipe(learning_rate=2.0)
    with pytest.raises(ConfigError, match=r"--loss is 'mse': it must be one of kl, lk_hybrid, lk_alpha"):
        Recipe(loss="mse")  # type: ignore[arg-type]


def test_a_training_that_diverges_says_so_and_keeps_its_last_state(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path)
    trainer.run(after(2))
    with torch.no_grad():
        trainer.parameters["norm.weight"][0] = float("nan")
    with pytest.raises(EngineError, match="lower --learning-rate"):
        trainer.run()
    assert trainer.progress.update == 2
