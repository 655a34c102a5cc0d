"""The training loop: batches, schedule, averaged weights, evaluation, checkpoints."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import EngineError, ModelError, shown
from paceline.models.spec import DecoderWeights
from paceline.train import acceptance
from paceline.train.batches import Batch, epoch, packed, sample_pairs
from paceline.train.head_shape import HeadShape, Parameters
from paceline.train.losses import LossRows, head_loss, target_rows
from paceline.train.recipe import Recipe
from paceline.train.start import start_parameters
from paceline.train.store import FeatureStore, StoredSequence
from paceline.train.unroll import Continue, HeadPass, Step
from paceline.train.vocabulary import DraftVocabulary

DEPTHS = (3, 5)
"""Chains that are evaluated."""

_STATE = "state.pt"

_SAMPLE = 20_000
"""Pairs that the start is fitted to."""


@dataclass
class Progress:
    """Where the training stands; with the parameters, all that a resumed one needs."""

    update: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    evaluated_at: float = 0.0
    best: float = 0.0
    since_best: int = 0
    done: bool = False


@dataclass(frozen=True)
class Data:
    """What is trained on. training, held_out: sequences of `store`."""

    store: FeatureStore
    training: Sequence[StoredSequence]
    held_out: Sequence[StoredSequence]
    vocabulary: DraftVocabulary


@dataclass
class Report:
    """What the loop tells the outside. Each is called with a JSON-like record."""

    update: Callable[[dict[str, Any]], None] = field(default=lambda _: None)
    evaluation: Callable[[dict[str, Any]], None] = field(default=lambda _: None)
    best: Callable[[Parameters, dict[str, Any]], None] = field(default=lambda *_: None)


class Trainer:
    """Trains one head. folder: where the state is kept; a state found there is continued.

    Raises ModelError if the state is of another recipe, shape or amount of data.
    """

    def __init__(
        self,
        shape: HeadShape,
        recipe: Recipe,
        data: Data,
        weights: DecoderWeights,
        folder: Path,
        *,
        device: str = "cpu",
        report: Report | None = None,
    ) -> None:
        self.shape, self.recipe, self.data, self.folder = shape, recipe, data, folder
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self.report = report or Report()
        ids = data.vocabulary.ids
        head = weights.embed if weights.lm_head is None else weights.lm_head
        self._embed = weights.embed.to(self.device)
        self._final_norm = weights.final_norm.to(self.device, torch.float32)
        self._target_head = head[ids].to(self.device, self.dtype)
        self._members, self._ids = data.vocabulary.members.to(self.device), ids.to(self.device)
        sample = sample_pairs(data.store, data.training, _SAMPLE, recipe.seed)
        started = start_parameters(shape, weights, ids, recipe.start, recipe.seed, sample)
        self.parameters = {name: tensor.to(self.device) for name, tensor in started.items()}
        for name, tensor in self.parameters.items():
            tensor.requires_grad_(recipe.train_lm_head or name != "lm_head.weight")
        self.average = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
        self.progress = Progress()
        self._optimizer = _optimizer(self.parameters, recipe)
        self._updates_per_epoch = sum(1 for _ in epoch(data.training, recipe.batch_tokens, 0))
        self._load()

    # ------------------------------------------------------------ the loop

    def run(self, stop: Callable[[], bool] = lambda: False) -> Progress:
        """Trains to the end of the recipe, or until `stop` says so between two updates; the state is written
        either way, so that another run goes on from there."""
        started = time.monotonic() - self.progress.seconds
        try:
            while not self.progress.done and not stop():
                groups = list(epoch(self.data.training, self.recipe.batch_tokens, self._epoch_seed()))
                for group in groups[self.progress.batch :]:
                    self._update(packed(self.data.store, group).to(self.device))
                    self.progress.batch += 1
                    self.progress.seconds = time.monotonic() - started
                    self._look(started)
                    if self.progress.done or stop():
                        break
                if self.progress.batch == len(groups):
                    self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        finally:
            self._save()
        return self.progress

    def _epoch_seed(self) -> int:
        return self.recipe.seed * 1000 + self.progress.epoch

    def _look(self, started: float) -> None:
        """Evaluates when it is time, and sees whether this is the end."""
        progress, recipe = self.progress, self.recipe
        over = self._share_done() >= 1
        if over or progress.seconds - progress.evaluated_at >= recipe.evaluate_every * 60:
            self.evaluate()
            progress.evaluated_at = progress.seconds = time.monotonic() - started
            progress.done = over or bool(recipe.patience and progress.since_best >= recipe.patience)
            self._save()

    def _share_done(self) -> float:
        if self.recipe.minutes:
            return self.progress.seconds / (60 * self.recipe.minutes)
        return self.progress.update / (self.recipe.epochs * self._updates_per_epoch)

    # ------------------------------------------------------------ one update

    def _update(self, batch: Batch) -> None:
        progress, began = self.progress, time.monotonic()
        rate = learning_rate(self.recipe, self._share_done())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, alphas = self.loss(batch, progress.update, num_steps(self.recipe, self._share_done()))
        if not torch.isfinite(loss):
            raise EngineError(
                f"the loss is {float(loss.detach())} at update {progress.update + 1}: lower --learning-rate "
                "and begin anew with another --out."
            )
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.clip)
        self._optimizer.step()
        progress.update += 1
        self._follow()
        self.report.update(
            {
                "update": progress.update,
                "share": round(self._share_done(), 5),
                "epoch": progress.epoch,
                "loss": round(float(loss.detach()), 5),
                "alpha": [round(float(alpha.mean()), 4) for alpha in alphas],
                "rate": rate,
                "gradient": round(float(norm), 4),
                "tokens": len(batch.rows),
                "seconds": round(time.monotonic() - began, 4),
            }
        )

    def loss(self, batch: Batch, seed: int, count: int) -> tuple[Tensor, list[Tensor]]:
        """The batch's loss per row of step 0, and the rows' alphas of each of `count` steps. seed: of the
        thinning."""
        recipe = self.recipe
        head = HeadPass(self.shape, self._in_product_type(self.parameters), self._embed)
        with torch.no_grad():
            target = target_rows(
                batch.finals,
                batch.lse,
                batch.best,
                self._final_norm,
                self.shape.norm_eps,
                self._target_head,
                self._members,
            )
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + seed)

        def go_on(step: int, done: Step) -> Continue:
            keep = batch.goes_on(done.rows, step)
            if recipe.thin:
                keep &= (torch.rand(len(keep), generator=generator) < recipe.decay).to(keep.device)
            kept = keep.nonzero().flatten()
            return Continue(kept, batch.ahead(done.rows[kept], step))

        steps = head.unroll(batch.context, batch.rows, count, go_on)
        targets = torch.cat([batch.target_of[done.rows + 1 + s] for s, done in enumerate(steps)])
        weight = 1.0 if recipe.thin else recipe.decay
        counts = [len(done.rows) for done in steps]
        weights = torch.cat([torch.full((n,), weight**s / counts[0]) for s, n in enumerate(counts)])
        normed = torch.cat([done.normed for done in steps])
        rows = LossRows(targets, weights.to(self.device))
        total, alpha = head_loss(normed, head.p["lm_head.weight"], target, rows, recipe.loss)
        return total, list(torch.split(alpha, counts))

    def _in_product_type(self, parameters: Parameters) -> Parameters:
        return {
            name: tensor.to(self.dtype) if tensor.dim() == 2 else tensor
            for name, tensor in parameters.items()
        }

    @torch.no_grad()
    def _follow(self) -> None:
        """The averaged weights follow; at first they are the plain mean of few updates."""
        decay = min(self.recipe.ema, self.progress.update / (10 + self.progress.update))
        for name, tensor in self.parameters.items():
            self.average[name].lerp_(tensor, 1 - decay)

    # ------------------------------------------------------------ evaluation

    def evaluate(self) -> dict[str, Any]:
        """Acceptance of the averaged weights on the held-out answers; reported, and kept if the best."""
        head = HeadPass(self.shape, self._in_product_type(self.average), self._embed)
        accepted = []
        apart = max(1, len(self.data.held_out) // self.recipe.evaluate_sequences)
        chosen = self.data.held_out[::apart][: self.recipe.evaluate_sequences]
        for group in epoch(chosen, self.recipe.batch_tokens, 0):
            batch = packed(self.data.store, group).to(self.device)
            accepted += acceptance.greedy_chains(head, batch, self._ids, max(DEPTHS))
        numbers = acceptance.summary(accepted, DEPTHS)
        progress = self.progress
        record = {"update": progress.update, "seconds": round(progress.seconds, 1), "acceptance": numbers}
        length = numbers["all"][f"k{DEPTHS[-1]}"]
        progress.since_best += 1
        if length > progress.best:
            progress.best, progress.since_best = length, 0
            self.report.best(self.average, record)
        self.report.evaluation(record)
        return record

    # ------------------------------------------------------------ state

    def _identity(self) -> dict[str, Any]:
        recipe = asdict(self.recipe)
        return {"shape": asdict(self.shape), "recipe": recipe, "sequences": len(self.data.training)}

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "identity": json.dumps(self._identity()),
            "progress": asdict(self.progress),
            "parameters": {name: tensor.detach() for name, tensor in self.parameters.items()},
            "average": self.average,
            "optimizer": self._optimizer.state_dict(),
        }
        fresh = self.folder / f"{_STATE}.new"
        try:
            torch.save(state, fresh)
        except (OSError, RuntimeError) as error:  # torch has its own error for a full disk
            raise EngineError(
                f"cannot write {fresh} ({str(error).splitlines()[0]}): free some space and run the command "
                "again, which goes on from the last state."
            ) from error
        os.replace(fresh, self.folder / _STATE)

    def _load(self) -> None:
        path = self.folder / _STATE
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:  # a damaged pickle may ask its reader for anything
            raise ModelError(
                f"cannot read {path} ({shown(error)}): delete it to start the training anew."
            ) from error
        if state["identity"] != json.dumps(self._identity()):
            raise ModelError(
                f"{path} is the state of a training with another recipe, head or data: "
                "give another folder, or delete this file to start anew."
            )
        self.progress = Progress(**state["progress"])
        with torch.no_grad():
            for name, tensor in state["parameters"].items():
                self.parameters[name].copy_(tensor)
                self.average[name].copy_(state["average"][name])
        self._optimizer.load_state_dict(state["optimizer"])


def learning_rate(recipe: Recipe, share: float) -> float:
    """share: of the training that is done, 0 .. 1."""
    if share < recipe.warmup:
        return recipe.learning_rate * max(share / recipe.warmup, 0.01)
    left = (1 - share) / (1 - recipe.warmup)
    shape = 0.5 * (1 - math.cos(math.pi * min(1.0, max(0.0, left))))
    return recipe.learning_rate * (recipe.final_rate + (1 - recipe.final_rate) * shape)


def num_steps(recipe: Recipe, share: float) -> int:
    """Of the training-time test, when `share` of the training is done."""
    if share >= recipe.ramp:
        return recipe.steps
    return min(recipe.steps, 1 + int(recipe.steps * share / recipe.ramp))


def _optimizer(parameters: Parameters, recipe: Recipe) -> torch.optim.AdamW:
    trained = [tensor for tensor in parameters.values() if tensor.requires_grad]
    matrices = [tensor for tensor in trained if tensor.dim() == 2]
    vectors = [tensor for tensor in trained if tensor.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
