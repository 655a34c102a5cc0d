"""The kernels of a small pass in Triton, for CUDA tensors of any device.

`kernels.ops` imports this when it first meets one, so that nobody else needs Triton. Checked in Triton's
interpreter and compiled for sm_90; never run on a GPU so far.
"""

from paceline.kernels.triton.attention import takes_tree, tree_attention
from paceline.kernels.triton.dense import add_rms_norm, gated_activation, gated_linear, rms_norm, rope_store
from paceline.kernels.triton.sampling import coupled_argmax, top_candidates

__all__ = [
    "add_rms_norm",
    "coupled_argmax",
    "gated_activation",
    "gated_linear",
    "rms_norm",
    "rope_store",
    "takes_tree",
    "top_candidates",
    "tree_attention",
]
