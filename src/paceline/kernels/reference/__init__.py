"""The kernels in plain torch: the specification that every other implementation is tested against."""

from paceline.kernels.reference.attention import Bucket, SlotPlan, plan_slots, slot_attention
from paceline.kernels.reference.dense import (
    add_rms_norm,
    apply_rope,
    gated_activation,
    gated_linear,
    linear,
    rms_norm,
    rope_store,
    store_kv,
)
from paceline.kernels.reference.sampling import coupled_argmax, top_candidates
from paceline.kernels.reference.tree import TreePlan, plan_tree, tree_attention

__all__ = [
    "Bucket",
    "SlotPlan",
    "TreePlan",
    "add_rms_norm",
    "apply_rope",
    "coupled_argmax",
    "gated_activation",
    "gated_linear",
    "linear",
    "plan_slots",
    "plan_tree",
    "rms_norm",
    "rope_store",
    "slot_attention",
    "store_kv",
    "top_candidates",
    "tree_attention",
]
