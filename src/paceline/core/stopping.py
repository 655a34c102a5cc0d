"""Where a request ends within the tokens of one verdict."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import FinishReason, Request
from paceline.core.work import Verdict


def cut(
    request: Request, verdict: Verdict, eos_token_ids: Sequence[int], context_length: int
) -> tuple[int, FinishReason | None]:
    """How many of the verdict's tokens count, and why the request ends there if it does.

    Token by token as without speculation; at one and the same token a stop outranks the length.
    """
    params = request.params
    left = request.tokens_left(context_length)
    for count, token in enumerate(verdict.tokens, 1):
        ends = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
        if (ends and request.num_output + count > params.min_tokens) or count == verdict.stop_at:
            return count, FinishReason.STOP
        if count == left:
            return count, FinishReason.LENGTH
    return len(verdict.tokens), None
