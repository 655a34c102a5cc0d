"""From a drafter's logits to candidates: processed logits / temperature + the Gumbel noise that the target
will use (arXiv 2408.07978), so that the likeliest is the one the target would choose of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core import sampling
from paceline.core.sampling import Unsampleable
from paceline.drafters.tree_drafter import Candidates, Leaf
from paceline.kernels import ops

_UNKNOWN = -1e9
"""Logit of a token that the drafter has no row for: finite, and out of every token's reach."""


def coupling(leaves: Sequence[Leaf]) -> tuple[list[float], list[int]]:
    """Temperatures and seeds of the noise that the target will use."""
    params = [leaf.sequence.params for leaf in leaves]
    temperatures = [0.0 if each.greedy else each.temperature or 0.0 for each in params]
    return temperatures, [each.seed or 0 for each in params]


class Ranking:
    """vocab_size: ids below it are tokens of the target's.  target_ids: the id of each place of a row of
    logits, where the drafter's vocabulary is another than the target's."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], target_ids: Tensor | None = None
    ) -> None:
        self._vocab = vocab_size
        self._eos = tuple(eos_token_ids)
        self._places: Tensor | None = None  # of a row that are tokens of the target's, where not all are
        if target_ids is not None and int(target_ids.max()) >= vocab_size:
            self._places = (target_ids < vocab_size).nonzero()[:, 0]
            target_ids = target_ids[self._places]
        self._target_ids = target_ids

    def covers(self, num_rows: int) -> bool:
        """Whether each of so many places of a row is a token of the target's."""
        return self._places is None and (self._target_ids is not None or num_rows <= self._vocab)

    def candidates(self, logits: Tensor, leaves: Sequence[Leaf]) -> list[Candidates]:
        """Of each leaf from its row of `logits`."""
        if self._target_ids is None:
            logits = logits[:, : self._vocab]
        elif self._places is not None:
            logits = logits[:, self._places]
        plain = [at for at, leaf in enumerate(leaves) if leaf.sequence.params.plain]
        if len(plain) == len(leaves):
            return self._plain(logits, leaves)
        found = {at: self._processed(logits[at], leaf) for at, leaf in enumerate(leaves) if at not in plain}
        if plain:
            found |= zip(plain, self._plain(logits[plain], [leaves[at] for at in plain]), strict=True)
        return [found[at] for at in range(len(leaves))]

    def _plain(self, logits: Tensor, leaves: Sequence[Leaf]) -> list[Candidates]:
        tokens, scores = ops.top_candidates(
            logits,
            *coupling(leaves),
            [len(leaf.sequence.tokens) + leaf.sequence.draft.tree.depth(leaf.node) for leaf in leaves],
            max(leaf.count for leaf in leaves),
            self._target_ids,
        )
        found = []
        for leaf, ids, values in zip(leaves, tokens.tolist(), scores.tolist(), strict=True):
            count = min(leaf.count, sum(token >= 0 for token in ids))
            found.append(Candidates(ids[:count], values[:count]))
        return found

    def _processed(self, logits: Tensor, leaf: Leaf) -> Candidates:
        sequence = leaf.sequence
        prefix = [*sequence.tokens, *sequence.path_tokens(leaf.node)]
        count = leaf.count
        if self._target_ids is not None:
            count = min(count, len(self._target_ids))
            logits = torch.full((self._vocab,), _UNKNOWN).index_copy_(
                0, self._target_ids.cpu(), logits.float().cpu()
            )
        row: sampling.Logits = logits.float().cpu().numpy()
        try:
            tokens, scores = sampling.candidates(
                row, sequence.params, prefix, sequence.num_prompt, self._eos, count
            )
        except Unsampleable:
            return Candidates()
        if self._target_ids is None:
            return Candidates(tokens, scores)
        known = [at for at, token in enumerate(tokens) if row[token] > _UNKNOWN]
        return Candidates([tokens[at] for at in known], [scores[at] for at in known])
