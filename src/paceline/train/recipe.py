"""How a head is trained, as data; it is written beside the head."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.train.losses import LOSSES, Loss
from paceline.train.start import STARTS, Start


@dataclass(frozen=True, slots=True)
class Recipe:
    """steps: of the training-time test. ramp: share of the training over which they grow from one to all: the
    later ones learn from a head that already knows the first. decay: weight of a step against the one before
    it. thin: instead of weighting, let a share `decay` of the rows go on to each next step: the same gradient
    in the mean, for less work. loss: see `losses`. start: see `start.start_parameters`.
    intermediate_size, num_kv_heads: 0 = the target's. train_lm_head: or leave it as it is in the target.

    batch_tokens: answer tokens per update. epochs: passes over the data, or minutes: wall time, if not 0.
    learning_rate: its height after `warmup` (share of the training), from where it falls as a cosine to
    `final_rate` of it. ema: decay of the averaged weights, which are what is evaluated and written; 0 = none.
    held_out: share of the prompts that is not trained on. evaluate_every: minutes. patience: evaluations
    without a better one after which training stops; 0 = never. longest: tokens of a sequence.
    bf16: products in bfloat16 (weights and their sums stay float32).
    """

    steps: int = 5
    ramp: float = 0.15
    decay: float = 0.8
    thin: bool = True
    loss: Loss = "lk_hybrid"
    start: Start = "fit"
    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    num_kv_heads: int = 0
    train_lm_head: bool = True
    norm_before_residual: bool = False
    fc_norm: bool = True
    norm_output: bool = False
    batch_tokens: int = 1024
    epochs: int = 4
    minutes: float = 0.0
    learning_rate: float = 5e-4
    final_rate: float = 0.05
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.99
    seed: int = 0
    held_out: float = 0.03
    evaluate_every: float = 5.0
    evaluate_sequences: int = 96
    patience: int = 0
    longest: int = 2048
    bf16: bool = True

    def __post_init__(self) -> None:
        above_0, share, whole = "above 0", "from 0 to 1", "a whole number from 0 on"
        checks = {
            "steps": (1 <= self.steps <= 16, "from 1 to 16"),
            "ramp": (0 <= self.ramp <= 1, share),
            "decay": (0 < self.decay <= 1, "above 0, 1 at most"),
            "loss": (self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            "start": (self.start in STARTS, f"one of {', '.join(STARTS)}"),
            "draft_vocab_size": (self.draft_vocab_size >= 1, above_0),
            "intermediate_size": (self.intermediate_size >= 0, whole),
            "num_kv_heads": (self.num_kv_heads >= 0, whole),
            "batch_tokens": (self.batch_tokens >= 1, above_0),
            "epochs": (self.epochs >= 1, above_0),
            "minutes": (self.minutes >= 0, "0, for epochs, or above"),
            "learning_rate": (0 < self.learning_rate < 1, "between 0 and 1"),
            "final_rate": (0 <= self.final_rate <= 1, share),
            "warmup": (0 <= self.warmup < 1, "from 0 to below 1"),
            "weight_decay": (0 <= self.weight_decay < 1, "from 0 to below 1"),
            "clip": (self.clip > 0, above_0),
            "ema": (0 <= self.ema < 1, "from 0 to below 1"),
            "held_out": (0 < self.held_out < 1, "between 0 and 1"),
            "evaluate_every": (self.evaluate_every > 0, above_0),
            "evaluate_sequences": (self.evaluate_sequences >= 1, above_0),
            "patience": (self.patience >= 0, whole),
            "longest": (self.longest >= 8, "8 at least"),
        }
        for name, (good, wanted) in checks.items():
            if not good:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is {getattr(self, name)!r}: it must be {wanted}.")
