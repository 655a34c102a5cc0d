"""Costs that others measured and published, by name."""

from __future__ import annotations

from paceline.errors import ConfigError, nearest
from paceline.sim.costs.forms import LinearDraft, LinearPass, PassesDraft, RooflinePass, ShareDraft, TablePass
from paceline.sim.costs.model import CostModel

_STUDY = "arXiv 2601.11580, predictor.py of its simulator: fitted on InstructCoder, batches of 1 to 64"
_LLAMA_8B = LinearPass(fixed_s=5.88590713e-3, per_token_s=2.10103129e-5, per_kv_token_s=3.92645679e-8)
_NGRAM = ShareDraft(share=0.005875, of=_LLAMA_8B)
_EAGLE3 = LinearDraft(fixed_s=2.13526175e-3, per_guess_s=8.41429603e-7, per_kv_token_s=2.37768493e-9)
_EAGLE3_BY_LEVEL = LinearDraft(per_level_s=0.712e-3)
"""The same at three guesses, where it was measured: a head runs once per guess, so that nothing of it but
the question's bookkeeping can be constant."""
_OVERHEAD = 1.20683946e-3

# Weights, KV and overhead of a step as published. Fitted to what figure 1 of the study measured of n-gram and
# EAGLE-3 on GSM8K and InstructCoder: `per_token_s`, 60 % of the data sheet's arithmetic, and
# `request_overhead_s`, the host's. Not fitted: memory and compute overlap as the root of the sum of their
# squares; the head takes its published time per level; figure 4 says what sampling adds to a step with
# guesses, and what looking up n-grams takes. `benchmarks/study_costs.py` fits them again.
_OVERLAPPED = RooflinePass(
    read_s=5.88590713e-3, per_token_s=2.72e-5, per_kv_token_s=3.92645679e-8, sharpness=2.0
)
_HEAD = LinearDraft(fixed_s=0.1e-3, per_level_s=0.712e-3, per_kv_token_s=2.37768493e-9)
_LOOKED_UP = LinearDraft(fixed_s=0.045e-3, per_request_s=1.7e-6)

_SWIFTSPEC = "arXiv 2506.11309"

_PUBLISHED = {
    # The traces call the EAGLE-3 head "eagle".
    "llama3.1-8b@h100": CostModel(
        target=_LLAMA_8B,
        drafts={"ngram": _NGRAM, "eagle": _EAGLE3, "eagle3": _EAGLE3},
        step_overhead_s=_OVERHEAD,
        provenance={"source": _STUDY},
    ),
    "llama3.1-8b@h100-by-level": CostModel(
        target=_LLAMA_8B,
        drafts={"ngram": _NGRAM, "eagle": _EAGLE3_BY_LEVEL, "eagle3": _EAGLE3_BY_LEVEL},
        step_overhead_s=_OVERHEAD,
        provenance={"source": f"{_STUDY}; the head charged by level"},
    ),
    "llama3.1-8b@h100-calibrated": CostModel(
        target=_OVERLAPPED,
        drafts={"ngram": _LOOKED_UP, "eagle": _HEAD, "eagle3": _HEAD},
        step_overhead_s=_OVERHEAD,
        request_overhead_s=1.96e-5,
        provenance={"source": f"{_STUDY}; overlap, and two constants fitted to what its figure 1 measured"},
    ),
    "qwen2-72b@h800-6+2": CostModel(
        target=LinearPass(fixed_s=10.48e-3),
        drafts={"draft": PassesDraft(each=LinearPass(fixed_s=3.25e-3))},
        provenance={"source": f"{_SWIFTSPEC}, table 7, in parallel: int4, 6 devices and 2"},
    ),
    "qwen2-72b@h800-8": CostModel(
        target=LinearPass(fixed_s=10.34e-3),
        drafts={"draft": PassesDraft(each=LinearPass(fixed_s=3.73e-3))},
        provenance={"source": f"{_SWIFTSPEC}, table 7, in turn: int4, 8 devices for both"},
    ),
    "llama3-70b@h800-4+4": CostModel(
        target=TablePass(
            new_tokens=(4, 8, 16), seconds_at=(10.32e-3, 10.39e-3, 13.25e-3), per_token_s=0.4e-3
        ),
        drafts={"draft": PassesDraft(each=LinearPass(fixed_s=2.80e-3))},
        provenance={
            "source": f"{_SWIFTSPEC}, section 4.5: int4, 4 devices, the target alone; "
            "the drafter as in table 1, Llama-3-3B under vLLM on 4"
        },
    ),
}


def published(name: str) -> CostModel:
    """Raises ConfigError for a name that is not known, with the nearest one."""
    if name not in _PUBLISHED:
        raise ConfigError(f"no published costs are named {name!r}: {nearest(name, _PUBLISHED)}")
    return _PUBLISHED[name]
