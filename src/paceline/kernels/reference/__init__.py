"""The kernels in plain torch: the specification that every other implementation is tested against."""

from paceline.kernels.reference.attention import Bucket, SlotPlan, plan_slots, slot_attention
from paceline.kernels.reference.dense import apply_rope, gated_activation, linear, rms_norm, store_kv
from paceline.kernels.reference.sampling import coupled_argmax, top_candidates

__all__ = [
    "Bucket",
    "SlotPlan",
    "apply_rope",
    "coupled_argmax",
    "gated_activation",
    "linear",
    "plan_slots",
    "rms_norm",
    "slot_attention",
    "store_kv",
    "top_candidates",
]
