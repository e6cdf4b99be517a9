"""Wrong arguments of the routing functions: the same words in both front ends, for every argument of every function."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from moe_arrays import normal, routing
from moe_fronts import FRONTS, GATE, TOP2

from tk_core.reference import moe_mapping as mm

IDX = routing(4, 2, 4)
MAPS = mm.fused_mapping(IDX, 4, 2)
WHERE, OWNERS, SLOTS = MAPS.token_topk_to_pos, MAPS.pos_to_expert, MAPS.pos_to_token_topk
N = OWNERS.size
X, ROWS, W, MASK = normal((4, 8)), normal((N, 8)), normal((4, 2)), np.ones(4, bool)
PAIR = np.zeros((4, 128), ml_dtypes.float8_e4m3fn), np.ones((4, 1), np.float32)
PACKED = PAIR[0], np.ones((4, 1), np.int32)
OTHER = object()
LOGITS, BIAS, SCORES = normal((4, 6)), normal((6,)), np.abs(normal((4, 6)))
TABLE, COUNT = np.zeros((6, 3), np.int32), np.ones(6, np.int32)

# a call of every function that is right
RIGHT = {
    "topk_gate": {"scores": LOGITS, "num_topk": 2},
    "topk_sum_and_topk_group_idx": {"scores": normal((3, 4, 2)), "num_topk_sum": 2, "num_topk_groups": 2},
    "normalize_weight": {"topk_weights": W},
    "mask_indices_by_tp": {"indices": IDX, "n": 8, "num_ep_ranks": 4, "tp_rank": 1, "num_tp_ranks": 2},
    "group_count": {"group_idx": IDX, "num_groups": 4, "num_seqs": 2},
    "aux_fi": {"topk_idx": IDX, "num_experts": 4, "num_aux_topk": 2},
    "unique_group_indices": {"group_indices": IDX, "num_groups": 4},
    "inplace_unique_group_indices": {"group_indices": IDX, "num_groups": 4},
    "get_fused_mapping": {"topk_idx": IDX, "num_experts": 4, "num_expanded_tokens": 9, "alignment": 2, "force_no_sync": False},
    "fused_mapping": {"topk_idx": IDX, "num_experts": 4, "alignment": 2, "num_expanded_tokens": None, "expert_capacity": None},
    "max_num_expanded_tokens": {"num_tokens": 4, "num_topk": 2, "num_experts": 4, "alignment": 2},
    "psum_num_tokens_per_expert": {"topk_idx": IDX, "expert_start": MAPS.expert_start, "expert_end": MAPS.expert_end},
    "expand_to_fused": {"x": X, "token_topk_to_pos": WHERE, "pos_to_expert": OWNERS},
    "expand_to_fused_with_sf": {
        "x": PAIR, "num_per_channels": 128, "token_topk_to_pos": WHERE, "pos_to_expert": OWNERS, "use_tma_aligned_col_major_sf": False,
    },
    "expand_topk_weights": {"topk_weights": W, "token_topk_to_pos": WHERE, "pos_to_token_topk": SLOTS},
    "grouped_gemm": {
        "x": normal((N, 64)).astype(ml_dtypes.bfloat16), "w": normal((4, 64, 128)).astype(ml_dtypes.bfloat16), "pos_to_expert": OWNERS,
        "expert_start": MAPS.expert_start, "expert_end": MAPS.expert_end,
    },
    "reduce_fused": {"x": ROWS, "topk_weights": W, "token_topk_to_pos": WHERE, "fp8_format": "", "sf": None},
    "reduce_fused_backward": {
        "grad_out": X, "x": ROWS, "topk_weights": W, "token_topk_to_pos": WHERE, "pos_to_token_topk": SLOTS, "x_sf": normal((N,)),
        "need_grad_x": True, "need_grad_weights": True,
    },
    "scores_sum": {"scores": SCORES, "mask": MASK, "num_seqs": 2},
    "load_balance_loss": {
        "scores_sum": normal((2, 6)), "counts": np.ones((2, 6), np.int32), "num_rows": 2, "num_aux_topk": 2, "alpha": 0.1,
    },
    "update_expert_bias": {"bias": BIAS, "counts": COUNT, "gamma": 0.1},
    "moe_topk_gate_backward": {
        "scores": SCORES, "topk_idx": IDX, "topk_weights": W, "grad_topk_weights": W, "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid", "mask": None, "grad_scores_sum": None,
    },
    "top2_sum_gate": {
        "logits": LOGITS, "bias": BIAS, "num_topk": 2, **TOP2, "mask": None, "fix_routing_mask": None, "to_physical_map": None,
        "logical_count": None, "num_seqs": None,
    },
    "moe_topk_gate": {
        "logits": LOGITS, "num_topk": 2, **GATE, "mask": None, "bias": None, "image_bias": None, "image_token_mask": None,
        "fix_routing_mask": None, "to_physical_map": None, "logical_count": None, "force_random": None, "num_seqs": None,
    },
}  # fmt: skip

GATES = ("top2_sum_gate", "moe_topk_gate")
# a function, or several; what is changed in the call; the kind of the error and how its text goes on after the name
ERRORS = [
    ("topk_gate", {"scores": LOGITS[0]}, "ValueError: scores: expected shape (T, E), got (6,)"),
    ("topk_gate", {"scores": LOGITS.astype(np.float16)}, "TypeError: scores: expected dtype float32, got float16"),
    ("topk_gate", {"scores": LOGITS.astype(np.float64)}, "TypeError: scores: expected dtype float32, got float64"),
    ("topk_gate", {"scores": "x"}, "TypeError: scores: expected a float32 array of shape"),
    ("topk_gate", {"scores": LOGITS[:, :0]}, "ValueError: scores: expected 1 to 8192 experts, got 0"),
    ("topk_gate", {"num_topk": 7}, "ValueError: num_topk: expected 1 to 6, got 7"),
    ("topk_gate", {"num_topk": 0}, "ValueError: num_topk: expected 1 to 6, got 0"),
    ("topk_gate", {"num_topk": 1.0}, "TypeError: num_topk: expected a value of type int, got 1.0 of type float"),
    ("topk_gate", {"num_topk": True}, "TypeError: num_topk: expected a value of type int, got True of type bool"),
    ("topk_sum_and_topk_group_idx", {"scores": LOGITS}, "ValueError: scores: expected shape (T, G, Eg), got (4, 6)"),
    ("topk_sum_and_topk_group_idx", {"scores": normal((2, 33, 2))}, "ValueError: scores: expected 1 to 32 groups, got 33"),
    ("topk_sum_and_topk_group_idx", {"num_topk_sum": 3}, "ValueError: num_topk_sum: expected 1 or 2, and at most 2 experts of a group, go"),
    ("topk_sum_and_topk_group_idx", {"scores": normal((3, 4, 1))}, "ValueError: num_topk_sum: expected 1 or 2, and at most 1 experts"),
    ("topk_sum_and_topk_group_idx", {"num_topk_groups": 5}, "ValueError: num_topk_groups: expected 1 to 4, got 5"),
    ("topk_sum_and_topk_group_idx", {"num_topk_groups": None}, "TypeError: num_topk_groups: expected a value of type int, got None"),
    ("normalize_weight", {"topk_weights": normal((3, 33))}, "ValueError: topk_weights: expected 1 to 32 weights a row, got 33"),
    ("normalize_weight", {"topk_weights": None}, "TypeError: topk_weights: expected a float32 array of shape"),
    ("normalize_weight", {"topk_weights": IDX.astype(np.int32)}, "TypeError: topk_weights: expected dtype float32, got int32"),
    ("mask_indices_by_tp", {"indices": IDX[0]}, "ValueError: indices: expected shape (T, K), got (2,)"),
    ("mask_indices_by_tp", {"indices": W}, "TypeError: indices: expected dtype int32 or int64, got float32"),
    ("mask_indices_by_tp", {"n": 3}, "ValueError: n: expected at least one expert for every rank, got 3"),
    ("mask_indices_by_tp", {"n": 2**31}, "ValueError: n: expected at least one expert for every rank, got 2147483648"),
    ("mask_indices_by_tp", {"num_ep_ranks": 0}, "ValueError: num_ep_ranks: expected at least 1, got 0"),
    ("mask_indices_by_tp", {"tp_rank": 2}, "ValueError: tp_rank: expected 0 to 1, got 2"),
    ("mask_indices_by_tp", {"tp_rank": -1}, "ValueError: tp_rank: expected 0 to 1, got -1"),
    ("mask_indices_by_tp", {"tp_rank": 1.0}, "TypeError: tp_rank: expected an int"),
    ("mask_indices_by_tp", {"num_tp_ranks": 0}, "ValueError: num_tp_ranks: expected at least 1, in 32 bits, got 0"),
    ("mask_indices_by_tp", {"num_tp_ranks": 2**31}, "ValueError: num_tp_ranks: expected at least 1, in 32 bits, got 2147483648"),
    ("group_count", {"group_idx": IDX[:, 0]}, "ValueError: group_idx: expected shape (T, K), got (4,)"),
    ("group_count", {"group_idx": IDX[:, :0]}, "ValueError: group_idx: expected at least one slot a token, got (4, 0)"),
    ("group_count", {"group_idx": IDX.astype(np.int8)}, "TypeError: group_idx: expected dtype int32 or int64, got int8"),
    ("group_count", {"num_groups": 0}, "ValueError: num_groups: expected at least 1, got 0"),
    ("group_count", {"num_groups": 2**40}, "ValueError: num_groups: expected at most 2146435072 counts"),
    ("group_count", {"num_seqs": 3}, "ValueError: num_seqs: expected a positive number that divides 4 rows, got 3"),
    ("group_count", {"num_seqs": 0}, "ValueError: num_seqs: expected a positive number that divides 4 rows, got 0"),
    ("aux_fi", {"topk_idx": X}, "TypeError: topk_idx: expected dtype int32 or int64, got float32"),
    ("aux_fi", {"topk_idx": [1]}, "TypeError: topk_idx: expected a int32 or int64 array of shape (T, K), got list"),
    ("aux_fi", {"num_experts": 0}, "ValueError: num_experts: expected at least 1, got 0"),
    ("aux_fi", {"num_aux_topk": 0}, "ValueError: num_aux_topk: expected at least 1, got 0"),
    ("aux_fi", {"num_aux_topk": 2.0}, "TypeError: num_aux_topk: expected a value of type int, got 2.0"),
    (("unique_group_indices", "inplace_unique_group_indices"), {"num_groups": 129}, "ValueError: num_groups: expected 1 to 128, got 129"),
    (("unique_group_indices", "inplace_unique_group_indices"), {"num_groups": 0}, "ValueError: num_groups: expected 1 to 128, got 0"),
    (("unique_group_indices", "inplace_unique_group_indices"), {"group_indices": W}, "TypeError: group_indices: expected dtype int"),
    (("unique_group_indices", "inplace_unique_group_indices"), {"group_indices": IDX[0]}, "ValueError: group_indices: expected shape (T,"),
    (("unique_group_indices", "inplace_unique_group_indices"), {"group_indices": None}, "TypeError: group_indices: expected a"),
    ("inplace_unique_group_indices", {"group_indices": "x"}, "TypeError: group_indices: expected an array to write to, got str"),
    (("get_fused_mapping", "fused_mapping"), {"topk_idx": IDX[None]}, "ValueError: topk_idx: expected shape (T, K), got (1, 4, 2)"),
    (("get_fused_mapping", "fused_mapping"), {"topk_idx": IDX[:, :0]}, "ValueError: topk_idx: expected at least one slot a token"),
    (("get_fused_mapping", "fused_mapping"), {"topk_idx": W}, "TypeError: topk_idx: expected dtype int32 or int64, got float32"),
    (("get_fused_mapping", "fused_mapping"), {"topk_idx": None}, "TypeError: topk_idx: expected a int32 or int64 array"),
    (("get_fused_mapping", "fused_mapping"), {"num_experts": 1025}, "ValueError: num_experts: expected 1 to 1024, got 1025"),
    (("get_fused_mapping", "fused_mapping"), {"num_experts": 0}, "ValueError: num_experts: expected 1 to 1024, got 0"),
    (("get_fused_mapping", "fused_mapping"), {"num_experts": 4.0}, "TypeError: num_experts: expected an int, got 4.0 of type float"),
    (("get_fused_mapping", "fused_mapping"), {"alignment": 0}, "ValueError: alignment: expected at least 1, got 0"),
    (("get_fused_mapping", "fused_mapping"), {"alignment": "16"}, "TypeError: alignment: expected an int, got '16' of type str"),
    (("get_fused_mapping", "fused_mapping"), {"num_expanded_tokens": 1.5}, "TypeError: num_expanded_tokens: expected an int, got 1.5"),
    (("get_fused_mapping", "fused_mapping"), {"num_expanded_tokens": 2**31}, "ValueError: num_expanded_tokens: expected 0 to 2146435072"),
    ("get_fused_mapping", {"num_expanded_tokens": -1}, "ValueError: num_expanded_tokens: expected "),
    ("fused_mapping", {"num_expanded_tokens": -1}, "ValueError: num_expanded_tokens: expected 0 to 2146435072, got -1"),
    ("get_fused_mapping", {"force_no_sync": 1}, "TypeError: force_no_sync: expected a bool, got 1 of type int"),
    ("fused_mapping", {"expert_capacity": 3}, "ValueError: expert_capacity: expected not negative, in whole alignments, got 3"),
    ("fused_mapping", {"expert_capacity": 0}, "ValueError: expert_capacity: expected at least 1, got 0"),
    ("fused_mapping", {"expert_capacity": 2.0}, "TypeError: expert_capacity: expected an int, got 2.0"),
    ("fused_mapping", {"expert_capacity": 2, "num_expanded_tokens": 8}, "ValueError: expert_capacity: expected None where num_expanded_"),
    ("fused_mapping", {"alignment": 2**30, "num_expanded_tokens": 8}, "ValueError: alignment: expected at most 2146435072 rows in the unl"),
    ("max_num_expanded_tokens", {"num_tokens": 4.0}, "TypeError: num_tokens: expected an int, got 4.0 of type float"),
    ("max_num_expanded_tokens", {"num_tokens": -1}, "ValueError: num_tokens: expected at least 0, in 32 bits, got -1"),
    ("max_num_expanded_tokens", {"num_topk": None}, "TypeError: num_topk: expected an int, got None of type NoneType"),
    ("max_num_expanded_tokens", {"num_experts": 0}, "ValueError: num_experts: expected at least 1, in 32 bits, got 0"),
    ("max_num_expanded_tokens", {"alignment": 0}, "ValueError: alignment: expected at least 1, in 32 bits, got 0"),
    ("psum_num_tokens_per_expert", {"topk_idx": IDX[0]}, "ValueError: topk_idx: expected shape (T, K), got (2,)"),
    ("psum_num_tokens_per_expert", {"expert_start": IDX}, "TypeError: expert_start: expected dtype int32, got int64"),
    ("psum_num_tokens_per_expert", {"expert_start": COUNT[:0], "expert_end": None}, "ValueError: E: expected at least 1, got 0"),
    ("psum_num_tokens_per_expert", {"expert_end": MAPS.expert_end[1:]}, "ValueError: expert_end: expected shape (E,) with E = 4, got (3,)"),
    ("expand_to_fused", {"x": X[:3]}, "ValueError: token_topk_to_pos: expected shape (T, K) with T = 3, got (4, 2)"),
    ("expand_to_fused", {"x": X.astype(np.float64)}, "TypeError: x: expected dtype bfloat16 or float32 or float16 or float8_e4m3fn or int"),
    (("expand_to_fused", "expand_topk_weights", "reduce_fused", "reduce_fused_backward", "expand_to_fused_with_sf"),
     {"token_topk_to_pos": WHERE.astype(np.int64)}, "TypeError: token_topk_to_pos: expected dtype int32, got int64"),
    (("expand_to_fused", "expand_topk_weights", "reduce_fused", "reduce_fused_backward", "expand_to_fused_with_sf"),
     {"token_topk_to_pos": WHERE[0]}, "ValueError: token_topk_to_pos: expected shape (T, K), got (2,)"),
    (("expand_to_fused", "expand_topk_weights", "reduce_fused", "reduce_fused_backward", "expand_to_fused_with_sf"),
     {"token_topk_to_pos": None}, "TypeError: token_topk_to_pos: expected a int32 array of shape (T, K), got None"),
    (("expand_to_fused", "expand_to_fused_with_sf"), {"pos_to_expert": OWNERS[None]}, "ValueError: pos_to_expert: expected shape (N,), go"),
    (("expand_to_fused", "expand_to_fused_with_sf"), {"pos_to_expert": ROWS}, "TypeError: pos_to_expert: expected dtype int32, got float3"),
    ("expand_to_fused_with_sf", {"x": X}, "TypeError: x: expected a pair (data, scales), got "),
    ("expand_to_fused_with_sf", {"x": PAIR[:1]}, "TypeError: x: expected a pair (data, scales), got 1 items"),
    ("expand_to_fused_with_sf", {"x": (X, PAIR[1])}, "TypeError: x: expected dtype float8_e4m3fn or int8, got float32"),
    ("expand_to_fused_with_sf", {"x": (PAIR[0], WHERE.astype(bool))}, "TypeError: sf: expected dtype float32 or int32 or float8_e4m3fn, g"),
    ("expand_to_fused_with_sf", {"x": (PAIR[0], None)}, "TypeError: sf: expected a float32 or int32 or float8_e4m3fn array"),
    ("expand_to_fused_with_sf", {"x": (PAIR[0], PAIR[1][:3])}, "ValueError: sf: expected shape (T, S) with T = 4, got (3, 1)"),
    ("expand_to_fused_with_sf", {"num_per_channels": 32}, "ValueError: sf: expected 4 columns of scales for 128 channels, got 1"),
    ("expand_to_fused_with_sf", {"x": (PAIR[0], WHERE)}, "ValueError: sf: expected 1 columns of scales for 128 channels, got 2"),
    ("expand_to_fused_with_sf", {"num_per_channels": 64}, "ValueError: num_per_channels: expected 32 or 128, got 64"),
    ("expand_to_fused_with_sf", {"num_per_channels": "32"}, "TypeError: num_per_channels: expected a value of type int, got '32' of type"),
    ("expand_to_fused_with_sf", {"use_tma_aligned_col_major_sf": 1}, "TypeError: use_tma_aligned_col_major_sf: expected a bool, got 1"),
    ("expand_topk_weights", {"topk_weights": X}, "ValueError: token_topk_to_pos: expected shape (T, K) with K = 8, got (4, 2)"),
    ("expand_topk_weights", {"topk_weights": IDX.astype(np.int32)}, "TypeError: topk_weights: expected dtype float32, got int32"),
    (("expand_topk_weights", "reduce_fused_backward"), {"pos_to_token_topk": ROWS}, "TypeError: pos_to_token_topk: expected dtype int32"),
    ("expand_topk_weights", {"pos_to_token_topk": WHERE}, "ValueError: pos_to_token_topk: expected shape (N,), got (4, 2)"),
    ("grouped_gemm", {"x": ROWS}, "TypeError: x: expected dtype bfloat16, got float32"),
    ("grouped_gemm", {"x": normal((N, 32)).astype(ml_dtypes.bfloat16), "w": normal((4, 32, 64)).astype(ml_dtypes.bfloat16)},
     "ValueError: w: expected H a positive multiple of 64, got 32"),
    ("grouped_gemm", {"w": normal((4, 64, 96)).astype(ml_dtypes.bfloat16)}, "ValueError: w: expected F a positive multiple of 64, got 96"),
    ("grouped_gemm", {"w": normal((4, 64, 64))}, "TypeError: w: expected dtype bfloat16, got float32"),
    ("grouped_gemm", {"w": normal((0, 64, 64)).astype(ml_dtypes.bfloat16), "expert_start": COUNT[:0], "expert_end": COUNT[:0]},
     "ValueError: w: expected at least one expert, got 0"),
    ("grouped_gemm", {"x": normal((0, 64)).astype(ml_dtypes.bfloat16), "pos_to_expert": OWNERS[:0]},
     "ValueError: x: expected at least one row, got 0"),
    ("grouped_gemm", {"pos_to_expert": OWNERS[1:]}, "ValueError: pos_to_expert: expected shape (N,) with N = "),
    ("grouped_gemm", {"expert_start": MAPS.expert_start[1:]}, "ValueError: expert_start: expected shape (E,) with E = 4, got (3,)"),
    ("grouped_gemm", {"expert_end": MAPS.expert_end.astype(np.int64)}, "TypeError: expert_end: expected dtype int32, got int64"),
    ("reduce_fused", {"x": ROWS[0]}, "ValueError: x: expected shape (N, H), got (8,)"),
    ("reduce_fused", {"x": PAIR[0]}, "TypeError: x: expected dtype bfloat16 or float32 or float16, got float8_e4m3fn"),
    ("reduce_fused", {"x": (ROWS,)}, "TypeError: x: expected an array or a pair (x, x_sf), got 1 items"),
    ("reduce_fused", {"x": (ROWS, None)}, "TypeError: x[1]: expected a float32 array of shape (N,), got None"),
    ("reduce_fused", {"x": (ROWS, BIAS)}, f"ValueError: x_sf: expected shape (N,) with N = {N}, got (6,)"),
    ("reduce_fused", {"topk_weights": W[:3]}, "ValueError: token_topk_to_pos: expected shape (T, K) with T = 3, got (4, 2)"),
    ("reduce_fused", {"topk_weights": W.astype(np.float16)}, "TypeError: topk_weights: expected dtype float32, got float16"),
    ("reduce_fused", {"fp8_format": "e5m2"}, "ValueError: fp8_format: expected '' or 'e4m3', got e5m2"),
    ("reduce_fused", {"fp8_format": None}, "TypeError: fp8_format: expected a value of type str, got None of type NoneType"),
    ("reduce_fused", {"sf": BIAS[:1]}, "ValueError: sf: expected one number, and only where the output is E4M3, got 1 of them"),
    ("reduce_fused", {"sf": BIAS[:2], "fp8_format": "e4m3"}, "ValueError: sf: expected one number, and only where the output is E4M3, got"),
    ("reduce_fused", {"sf": 1.5, "fp8_format": "e4m3"}, "TypeError: sf: expected a float32 array of shape"),
    ("reduce_fused_backward", {"grad_out": X[:, :4]}, f"ValueError: x: expected shape (N, H) with H = 4, got ({N}, 8)"),
    ("reduce_fused_backward", {"grad_out": PAIR[0]}, "TypeError: grad_out: expected dtype bfloat16 or float32 or float16"),
    ("reduce_fused_backward", {"x": None}, "TypeError: x: expected an array, for the gradient of the weights, got None"),
    ("reduce_fused_backward", {"x": ROWS[:-1]}, f"ValueError: pos_to_token_topk: expected shape (N,) with N = {N - 1}, got ({N},)"),
    ("reduce_fused_backward", {"topk_weights": W[:3]}, "ValueError: topk_weights: expected shape (T, K) with T = 4, got (3, 2)"),
    ("reduce_fused_backward", {"x_sf": BIAS}, f"ValueError: x_sf: expected shape (N,) with N = {N}, got (6,)"),
    ("reduce_fused_backward", {"need_grad_x": 1}, "TypeError: need_grad_x: expected a bool, got 1 of type int"),
    ("reduce_fused_backward", {"need_grad_weights": None}, "TypeError: need_grad_weights: expected a bool, got None"),
    ("scores_sum", {"scores": SCORES[0]}, "ValueError: scores: expected shape (T, E), got (6,)"),
    ("scores_sum", {"scores": SCORES[:, :0]}, "ValueError: scores: expected 1 to 8192 experts, got 0"),
    ("scores_sum", {"mask": MASK[1:]}, "ValueError: mask: expected shape (T,) with T = 4, got (3,)"),
    ("scores_sum", {"mask": MASK.astype(np.int8)}, "TypeError: mask: expected dtype bool, got int8"),
    ("scores_sum", {"num_seqs": 3}, "ValueError: num_seqs: expected a positive divisor of 4 rows, got 3"),
    ("scores_sum", {"num_seqs": 2.0}, "TypeError: num_seqs: expected a value of type int, got 2.0"),
    ("load_balance_loss", {"scores_sum": BIAS}, "ValueError: scores_sum: expected shape (B, E), got (6,)"),
    ("load_balance_loss", {"scores_sum": None}, "TypeError: scores_sum: expected a float32 array, got NoneType"),
    ("load_balance_loss", {"scores_sum": LOGITS.astype(np.float16)}, "TypeError: scores_sum: expected dtype float32, got float16"),
    ("load_balance_loss", {"counts": [1, 2]}, "TypeError: counts: expected a int32 or int64 array, got list"),
    ("load_balance_loss", {"counts": LOGITS[:2]}, "TypeError: counts: expected dtype int32 or int64, got float32"),
    ("load_balance_loss", {"num_rows": 2.0}, "TypeError: num_rows: expected a int32 or int64 array, got float"),
    ("load_balance_loss", {"num_rows": True}, "TypeError: num_rows: expected a int32 or int64 array, got bool"),
    ("load_balance_loss", {"counts": COUNT}, "ValueError: counts: expected shape (2, 6), got (6,)"),
    ("load_balance_loss", {"num_rows": COUNT}, "ValueError: num_rows: expected an int or shape (2,), got (6,)"),
    ("load_balance_loss", {"num_aux_topk": 0}, "ValueError: num_aux_topk: expected at least 1, got 0"),
    ("load_balance_loss", {"num_aux_topk": True}, "TypeError: num_aux_topk: expected an int, got True of type bool"),
    ("load_balance_loss", {"alpha": "1"}, "TypeError: alpha: expected a float, got '1' of type str"),
    ("update_expert_bias", {"bias": LOGITS}, "ValueError: bias: expected shape (E,), got (4, 6)"),
    ("update_expert_bias", {"bias": "x"}, "TypeError: bias: expected a float32 array, got str"),
    ("update_expert_bias", {"counts": BIAS}, "TypeError: counts: expected dtype int32 or int64, got float32"),
    ("update_expert_bias", {"counts": COUNT[1:]}, "ValueError: counts: expected shape (..., 6), got (5,)"),
    ("update_expert_bias", {"gamma": None}, "TypeError: gamma: expected a float, got None of type NoneType"),
    ("moe_topk_gate_backward", {"scores": SCORES[0]}, "ValueError: scores: expected shape (T, E), got (6,)"),
    ("moe_topk_gate_backward", {"topk_idx": IDX[1:]}, "ValueError: topk_idx: expected shape (T, K) with T = 4, got (3, 2)"),
    ("moe_topk_gate_backward", {"topk_idx": W}, "TypeError: topk_idx: expected dtype int32 or int64, got float32"),
    ("moe_topk_gate_backward", {"topk_weights": X}, "ValueError: topk_weights: expected shape (T, K) with K = 2, got (4, 8)"),
    ("moe_topk_gate_backward", {"grad_topk_weights": X}, "ValueError: grad_topk_weights: expected shape (T, K) with K = 2, got (4, 8)"),
    ("moe_topk_gate_backward", {"routed_scaling_factor": "1"}, "TypeError: routed_scaling_factor: expected a value of type float, got '1'"),
    ("moe_topk_gate_backward", {"scoring_func": "identity"}, "ValueError: scoring_func: expected 'sigmoid' or 'sqrtsoftplus' or 'softmax'"),
    ("moe_topk_gate_backward", {"scoring_func": 1}, "TypeError: scoring_func: expected a str, got 1 of type int"),
    ("moe_topk_gate_backward", {"mask": MASK}, "ValueError: grad_scores_sum: expected an array where there is a mask, got None"),
    ("moe_topk_gate_backward", {"mask": MASK[1:], "grad_scores_sum": LOGITS[:2]}, "ValueError: mask: expected shape (T,) with T = 4"),
    ("moe_topk_gate_backward", {"grad_scores_sum": LOGITS[:3]}, "ValueError: grad_scores_sum: expected a positive number of rows that div"),
    (GATES, {"logits": LOGITS[0]}, "ValueError: logits: expected shape (T, E), got (6,)"),
    (GATES, {"logits": LOGITS.astype(ml_dtypes.bfloat16)}, "TypeError: logits: expected dtype float32, got bfloat16"),
    (GATES, {"logits": None}, "TypeError: logits: expected a float32 array of shape (T, E), got None"),
    ("top2_sum_gate", {"bias": None}, "TypeError: bias: expected a float32 array of shape (E,), got None"),
    (GATES, {"bias": BIAS[1:]}, "ValueError: bias: expected shape (E,) with E = 6, got (5,)"),
    (GATES, {"num_topk": 7}, "ValueError: num_topk: expected 1 to 6, got 7"),
    (GATES, {"num_topk": "2"}, "TypeError: num_topk: expected a value of type int, got '2' of type str"),
    (GATES, {"use_shared_as_routed": 1}, "TypeError: use_shared_as_routed: expected a bool, got 1 of type int"),
    (GATES, {"use_shared_as_routed": True, "num_shared_experts": 3}, "ValueError: num_shared_experts: expected 1 or 2 with use_shared_as_"),
    (GATES, {"use_shared_as_routed": True, "num_shared_experts": 0}, "ValueError: num_shared_experts: expected 1 or 2 with use_shared_as_"),
    (GATES, {"num_shared_experts": None}, "TypeError: num_shared_experts: expected an int, got None of type NoneType"),
    ("top2_sum_gate", {"use_shared_as_routed": True, "num_shared_experts": 1}, "ValueError: num_shared_experts: expected 0 without a to_p"),
    (GATES, {"routed_scaling_factor": None}, "TypeError: routed_scaling_factor: expected a value of type float, got None"),
    (GATES, {"ep_rank": -1}, "ValueError: ep_rank: expected at least 0, in 32 bits, got -1"),
    (GATES, {"ep_rank": 2**31}, "ValueError: ep_rank: expected at least 0, in 32 bits, got 2147483648"),
    (GATES, {"ep_rank": 0.0}, "TypeError: ep_rank: expected an int"),
    (GATES, {"scoring_func": "relu"}, "ValueError: scoring_func: expected 'sigmoid' or 'sqrtsoftplus' or 'softmax', got 'relu'"),
    (GATES, {"scoring_func": "identity"}, "ValueError: scoring_func: expected 'sigmoid' or 'sqrtsoftplus' or 'softmax', got 'identity'"),
    (GATES, {"scoring_func": None}, "TypeError: scoring_func: expected a str, got None of type NoneType"),
    ("top2_sum_gate", {"num_groups": 2}, "ValueError: num_groups: expected with num_topk_groups zero, or both positive, got (2, 0)"),
    ("top2_sum_gate", {"num_groups": 2, "num_topk_groups": 3}, "ValueError: num_topk_groups: expected 0 to 2, got 3"),
    ("top2_sum_gate", {"num_groups": 4, "num_topk_groups": 2}, "ValueError: num_groups: expected at most 32, and a divisor of 6 experts,"),
    ("top2_sum_gate", {"num_groups": 6, "num_topk_groups": 2}, "ValueError: num_groups: expected at least two experts a group, got 6"),
    ("top2_sum_gate", {"num_groups": 3, "num_topk_groups": 1, "num_topk": 3}, "ValueError: num_topk: expected at most the 2 experts of 1"),
    ("top2_sum_gate", {"num_groups": 2.0}, "TypeError: num_groups: expected an int, got 2.0"),
    ("top2_sum_gate", {"num_topk_groups": None}, "TypeError: num_topk_groups: expected an int, got None"),
    ("top2_sum_gate", {"num_ep_ranks": 7}, "ValueError: num_ep_ranks: expected 1 to 6 experts, got 7"),
    ("top2_sum_gate", {"tp_rank": 1}, "ValueError: tp_rank: expected 0 to 0, got 1"),
    ("top2_sum_gate", {"tp_rank": "0"}, "TypeError: tp_rank: expected an int"),
    ("top2_sum_gate", {"num_tp_ranks": 0}, "ValueError: num_tp_ranks: expected at least 1, in 32 bits, got 0"),
    (GATES, {"mask": MASK[1:]}, "ValueError: mask: expected shape (T,) with T = 4, got (3,)"),
    (GATES, {"mask": MASK.astype(np.uint8)}, "TypeError: mask: expected dtype bool, got uint8"),
    (GATES, {"fix_routing_mask": MASK}, "ValueError: "),
    (GATES, {"to_physical_map": TABLE}, "ValueError: logical_count: expected an array, as to_physical_map and logical_count go together,"),
    (GATES, {"logical_count": COUNT}, "ValueError: to_physical_map: expected an array, as to_physical_map and logical_count go together,"),
    (GATES, {"to_physical_map": TABLE[1:], "logical_count": COUNT}, "ValueError: to_physical_map: expected 6 rows, got 5"),
    (GATES, {"to_physical_map": TABLE, "logical_count": COUNT[1:]}, "ValueError: logical_count: expected 6 rows, got 5"),
    (GATES, {"to_physical_map": TABLE[:, :0], "logical_count": COUNT}, "ValueError: to_physical_map: expected at least one column, got 0"),
    (GATES, {"to_physical_map": IDX, "logical_count": COUNT}, "TypeError: to_physical_map: expected dtype int32, got int64"),
    (GATES, {"num_seqs": 0}, "ValueError: num_seqs: expected at least 1, got 0"),
    (GATES, {"num_seqs": 3}, "ValueError: num_seqs: expected a positive divisor of 4 rows, got 3"),
    (GATES, {"num_seqs": 2.0}, "TypeError: num_seqs: expected an int, got 2.0 of type float"),
    ("moe_topk_gate", {"image_bias": BIAS}, "ValueError: image_token_mask: expected an array, as image_bias and image_token_mask go toget"),
    ("moe_topk_gate", {"image_token_mask": MASK}, "ValueError: image_bias: expected an array, as image_bias and image_token_mask go toget"),
    ("moe_topk_gate", {"image_bias": BIAS[1:], "image_token_mask": MASK}, "ValueError: image_bias: expected 6 rows, got 5"),
    ("moe_topk_gate", {"image_bias": BIAS, "image_token_mask": MASK[1:]}, "ValueError: image_token_mask: expected 4 rows, got 3"),
    ("moe_topk_gate", {"force_random": MASK[1:]}, "ValueError: force_random: expected 4 rows, got 3"),
    ("moe_topk_gate", {"force_random": COUNT}, "TypeError: force_random: expected dtype bool, got int32"),
]  # fmt: skip
CASES = [(name, *rest) for names, *rest in ERRORS for name in ([names] if isinstance(names, str) else names)]


def check(front, name, changes, text):
    # JAX takes NumPy arrays as they are
    args = {**RIGHT[name], **changes}
    kind, _, message = text.partition(": ")
    with pytest.raises((TypeError, ValueError)) as info:
        getattr(front.m, name)(**(front.put(args) if front.name == "torch" else args))
    assert type(info.value).__name__ == kind
    assert str(info.value).startswith(f"{name}: {message}"), str(info.value)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(("name", "changes", "text"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_errors_say_the_same(front, name, changes, text):
    if front == "jax" and name == "inplace_unique_group_indices":
        return
    check(FRONTS[front](), name, changes, text)


WRITTEN = {"unmapped_topk_idx", "scores", "out", "fixed_topk_idx"}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", RIGHT)
def test_every_argument_is_judged(front, name):
    """The list above has all of them, and what it calls right is right."""
    front = FRONTS[front]()
    if front.name == "jax" and name == "inplace_unique_group_indices":
        return
    function = getattr(front.m, name)
    function(**(front.put(RIGHT[name]) if front.name == "torch" else RIGHT[name]))
    changed = {argument for case in CASES if case[0] == name for argument in case[1]}
    own = set(inspect.signature(function).parameters)
    assert own - changed <= (WRITTEN if name in (*GATES, "moe_topk_gate_backward", "reduce_fused") else set())


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fix_routing_mask": MASK}, "ValueError: fixed_topk_idx: expected an array, as fix_routing_mask and fixed_topk_idx go together"),
        ({"fixed_topk_idx": IDX}, "ValueError: fix_routing_mask: expected an array, as fix_routing_mask and fixed_topk_idx go together"),
        ({"fixed_topk_idx": IDX[1:], "fix_routing_mask": MASK}, "ValueError: fixed_topk_idx: expected 4 rows, got 3"),
        ({"fixed_topk_idx": IDX, "fix_routing_mask": MASK[1:]}, "ValueError: fix_routing_mask: expected 4 rows, got 3"),
        ({"fixed_topk_idx": X, "fix_routing_mask": MASK}, "TypeError: fixed_topk_idx: expected dtype int32 or int64, got float32"),
    ],
)
def test_errors_of_fixed_routing_in_jax(name, changes, text):
    check(FRONTS["jax"](), name, changes, text)


# ------------------------------------------------------------------ what PyTorch writes to


def dense(*shape, dtype="float32"):
    import torch

    return torch.ones(shape, dtype=getattr(torch, dtype))


INT64 = "int64"
BUFFERS = [
    ("unmapped_topk_idx", lambda: [1], "TypeError: unmapped_topk_idx: expected an array to write to, got list"),
    ("unmapped_topk_idx", lambda: dense(4, 2, dtype="int32"), "TypeError: unmapped_topk_idx: expected dtype int64, got int32"),
    ("unmapped_topk_idx", lambda: dense(4, 8, dtype=INT64)[:, :3], "ValueError: unmapped_topk_idx: expected shape (4, 2), got (4, 3)"),
    ("unmapped_topk_idx", lambda: dense(5, 8, dtype=INT64)[:, :2], "ValueError: unmapped_topk_idx: expected shape (4, 2), got (5, 2)"),
    ("unmapped_topk_idx", lambda: dense(4, 8, dtype=INT64)[:, ::4], "ValueError: unmapped_topk_idx: expected dense rows to write to, got"),
    ("unmapped_topk_idx", lambda: dense(1, 2, dtype=INT64).expand(4, 2), "ValueError: unmapped_topk_idx: expected dense rows to write to"),
    ("unmapped_topk_idx", lambda: None, "ValueError: unmapped_topk_idx: expected an array, from which rows of fix_routing_mask are read"),
    ("scores", lambda: dense(4, 6, dtype="float64"), "TypeError: scores: expected dtype float32, got float64"),
    ("scores", lambda: dense(4, 12)[:, :6], "ValueError: scores: expected a contiguous array to write to, got strides (12, 1)"),
    ("scores", lambda: dense(6), "ValueError: scores: expected shape (4, 6), got (6,)"),
    ("scores", lambda: dense(4, 6).to("meta"), "ValueError: scores: expected device cpu, got meta"),
    ("out", lambda: dense(4, 2), "TypeError: out: expected a pair (topk_idx, topk_weights), got Tensor"),
    ("out", lambda: (dense(4, 2), dense(4, 2)), "TypeError: out[0]: expected dtype int64, got float32"),
    ("out", lambda: (dense(4, 2, dtype=INT64), dense(4, 3)), "ValueError: out[1]: expected shape (4, 2), got (4, 3)"),
    ("out", lambda: (dense(4, 8, dtype=INT64)[:, :2], None), "ValueError: out[0]: expected a contiguous array to write to, got strides (8"),
]


@pytest.mark.parametrize(("argument", "make", "text"), BUFFERS)
def test_errors_of_the_buffers_of_a_gate(argument, make, text):
    fixed = {"fix_routing_mask": MASK} if argument == "unmapped_topk_idx" else {}
    check(FRONTS["torch"](), "moe_topk_gate", {argument: make(), **fixed}, text)
    if argument != "out":
        check(FRONTS["torch"](), "top2_sum_gate", {argument: make(), **fixed}, text)


def test_errors_of_other_results_of_the_caller():
    front = FRONTS["torch"]()
    for wrong in (dense(6, 4, dtype=INT64).t(), dense(4, 8, dtype=INT64)[:, ::2], dense(4, 8, dtype=INT64)[:, :3]):
        text = "ValueError: group_indices: expected a contiguous array to write to, got strides"
        check(front, "inplace_unique_group_indices", {"group_indices": wrong}, text)
    for name, H in (("reduce_fused", 8), ("moe_topk_gate_backward", 6)):
        check(front, name, {"out": "x"}, "TypeError: out: expected an array to write to, got str")
        check(front, name, {"out": dense(4, H, dtype="float16")}, "TypeError: out: expected dtype float32, got float16")
        check(front, name, {"out": dense(5, H)}, f"ValueError: out: expected shape (4, {H}), got (5, {H})")
        check(front, name, {"out": dense(4, 2 * H)[:, ::2]}, "ValueError: out: expected a contiguous array to write to, got strides")
