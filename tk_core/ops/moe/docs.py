"""Docstrings of the gates, whose public functions differ from their declarations."""

_SHARED = """    use_shared_as_routed, num_shared_experts: bool and int; with True, 1 or 2 shared experts follow the routed ones, each with
        weight 1. With False there are none, whatever the number.
    routed_scaling_factor: c, a factor of the routed weights.
"""

_ROWS = """    mask: [T] bool; rows with False have indices -1, weights 0, scores 0. Their logits are not used, they may be NaN.
    fix_routing_mask: [T] bool; rows with True take the experts given, in any number of repetitions. An entry that names no expert is an
        empty slot: -1, weight 0.
    to_physical_map, logical_count: [L, D] i32 and [L] i32, L = E + shared experts: replicas of every expert, and how many there are. Row t
        takes number (ep_rank + 23333 t) mod logical_count[e].
"""

_TAIL = """
Raises:
    TypeError: a dtype or a kind is another one.
    ValueError: a shape or a number does not fit.

Numerics:
    fp32. Scores are within 2 ulp; indices and weights follow from them bit for bit, on CPU and GPU. Indices out of range count as -1.

Gradient:
    To logits, from topk_weights and scores_sum; the selection is a constant. Once in reverse mode.

Source:
    DeepSeek-V3 Technical Report, 2024.
"""

_TORCH = """
Returns:
    topk_idx [T, num_topk + shared] i64 and topk_weights, f32; with num_seqs a GateOutput, in which unmapped_topk_idx [T, num_topk] i64
    and scores_sum [num_seqs, E] f32, shares of the experts in the scores summed over the rows of every sequence, follow.
"""

_JAX = """
Returns:
    GateOutput: topk_idx [T, num_topk + shared] i32, topk_weights f32, unmapped_topk_idx [T, num_topk] i32, and scores_sum [num_seqs, E]
    f32, shares of the experts in the scores summed over the rows of every sequence; None without num_seqs.
"""

_TORCH_BUFFERS = """    unmapped_topk_idx: [T, num_topk] i64 to write the logical experts to, with any distance of its rows. Rows that
        fix_routing_mask names are read from it.
"""
_TORCH_LAST = """    scores: [T, E] f32 to write the scores to.
    num_seqs: sequences of T / num_seqs rows for scores_sum.
"""
_JAX_LAST = """    fixed_topk_idx: [T, num_topk] i32 or i64, what rows of fix_routing_mask take.
    num_seqs: sequences of T / num_seqs rows for scores_sum.
"""

_TOP2 = """Choose the experts of every token among the best groups of experts, and weigh them.

u = score(logits); experts: the largest u + bias (softmax: logits + bias) in the num_topk_groups groups whose two largest add up to most;
weight_k = u_k / (1e-20 + sum of u over the chosen) * c. Indices become those of physical experts of this TP rank, others -1.

Args:
    logits: [T, E] f32.
    bias: [E] f32, added for ranking only.
    num_topk: experts of a token, 1 to 32 with the shared ones.
    num_topk_groups, num_groups: equal numbers do not limit groups; E is a multiple of num_groups.
"""
_RANKS = """    num_ep_ranks, num_tp_ranks: ranks that share the E + D - 1 physical experts, the TP rank fastest. Experts of other TP ranks
        become -1 and keep their weight.
    scoring_func: "sigmoid", "sqrtsoftplus" or "softmax".
"""
_TOPK = """Choose the experts of every token by the logits of a router, and weigh them.

u = score(logits); experts: the largest u + bias (softmax: logits + bias), ties to the smaller index;
weight_k = u_k / (1e-20 + sum of u over the chosen) * c. Indices become those of physical experts.

Args:
    logits: [T, E] f32.
    num_topk: experts of a token, 1 to 32 with the shared ones.
"""
_TOPK_ROWS = """    scoring_func: "sqrtsoftplus", "sigmoid" or "softmax".
    bias: [E] f32, added for ranking only.
    image_bias, image_token_mask: [E] f32 and [T] bool; rows with True rank with image_bias instead of bias.
"""
_RANDOM = """    force_random: [T] bool; rows with True have distinct physical experts and weights at random, a function of ep_rank and
        the row, unmapped indices -1 and scores 0.
"""
_OUT = """    out: (topk_idx, topk_weights) to write to; not differentiable.
"""
_RANK = "    ep_rank: this rank among those that share the experts, an int{}.\n"
_TP_RANK = "    ep_rank, tp_rank: this rank, {}.\n"
_SCALAR = " or an i32 scalar array, as `jax.lax.axis_index` gives it"

TOP2_TORCH = _TOP2 + _SHARED + _TP_RANK.format("ints") + _RANKS + _ROWS + _TORCH_BUFFERS + _TORCH_LAST + _TORCH + _TAIL
TOP2_JAX = _TOP2 + _SHARED + _TP_RANK.format("ints" + _SCALAR.replace("an i32 scalar array", "i32 scalar arrays")) + _RANKS + _ROWS
TOP2_JAX += _JAX_LAST + _JAX + _TAIL
TOPK_TORCH = _TOPK + _SHARED + _RANK.format("") + _TOPK_ROWS + _ROWS + _TORCH_BUFFERS + _RANDOM + _OUT + _TORCH_LAST + _TORCH + _TAIL
TOPK_JAX = _TOPK + _SHARED + _RANK.format(_SCALAR) + _TOPK_ROWS + _ROWS + _RANDOM + _JAX_LAST + _JAX + _TAIL
