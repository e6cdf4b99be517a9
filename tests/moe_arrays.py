"""Shapes, inputs and judges that the tests of the MoE operations share."""

import numpy as np

from tk_core.reference import moe_mapping as mm

# (E, K) of topk_gate
TOPK_SHAPES = [(72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6), (256, 8), (1, 1), (33, 32), (384, 8)]
# (G, Gk, E, S, K) of the gates
GATE_SHAPES = [
    *((0, 0, 72, 1, 6), (0, 0, 32, 2, 6), (0, 0, 64, 2, 6), (0, 0, 96, 2, 6), (0, 0, 16, 2, 6), (0, 0, 36, 2, 6)),
    *((0, 0, 108, 2, 6), (0, 0, 128, 2, 6), (0, 0, 144, 2, 6), (8, 8, 256, 2, 8), (8, 4, 256, 2, 8)),
]
SCORING = ("sigmoid", "sqrtsoftplus", "softmax")


def normal(shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def routing(tokens, topk, experts, seed=0, empty=0.3, dtype=np.int64):
    """Distinct experts a token, a share of the slots -1, some rows without any."""
    rng = np.random.default_rng([seed, tokens, topk, experts])
    idx = np.argsort(rng.random((tokens, max(experts, topk))), axis=1)[:, :topk]
    idx[(idx >= experts) | (rng.random(idx.shape) < empty)] = -1
    idx[rng.random(tokens) < 0.1] = -1
    return idx.astype(dtype)


def physical_map(num_logical, num_columns, num_physical, seed=0):
    """A random map and random counts."""
    rng = np.random.default_rng([seed, num_logical, num_columns])
    to_physical = rng.integers(0, num_physical, (num_logical, num_columns)).astype(np.int32)
    return to_physical, rng.integers(1, num_columns + 1, num_logical).astype(np.int32)


def same(a, b):
    """Same dtype, shape and bytes."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def difference(x, y):
    """Relative squared difference."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    total = (x**2 + y**2).sum()
    return ((x - y) ** 2).sum() / total if total else 0.0


def gradient(function, x, step=1e-6):
    """Central differences of a scalar function of an fp64 array."""
    result = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        high, low = x.copy(), x.copy()
        high[i] += step
        low[i] -= step
        result[i] = (function(high) - function(low)) / (2 * step)
    return result


def check_mapping(topk_idx, num_experts, alignment, mapping, packed=True):
    """Consistency of a mapping (its first seven results), whatever the order of rows and whatever was dropped."""
    pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, start, end, sizes = mapping[:7]
    num_topk = topk_idx.shape[1]
    rows = pos_to_expert.size
    assert all(part.dtype == np.int32 for part in mapping[:7])
    assert pos_to_token.shape == pos_to_token_topk.shape == (rows,)
    assert token_topk_to_pos.shape == topk_idx.shape
    assert start.shape == end.shape == sizes.shape == (num_experts,)
    assert (start[:1] == 0).all()
    assert (start[1:] == end[:-1]).all()
    assert (end - start == sizes).all()
    assert (end <= rows).all()
    if packed:
        assert ((sizes % alignment == 0) | (end == rows)).all()
    padding = pos_to_expert < 0
    for part in (pos_to_expert, pos_to_token, pos_to_token_topk):
        assert ((part == -1) == padding).all()
    (valid,) = np.nonzero(~padding)
    slots = pos_to_token_topk[valid]
    assert (slots // max(num_topk, 1) == pos_to_token[valid]).all()
    assert (topk_idx.reshape(-1)[slots] == pos_to_expert[valid]).all()
    assert (token_topk_to_pos.reshape(-1)[slots] == valid).all()
    assert (token_topk_to_pos >= 0).sum() == valid.size
    assert (token_topk_to_pos[(topk_idx < 0) | (topk_idx >= num_experts)] == -1).all()
    for e in range(num_experts):
        segment = pos_to_expert[start[e] : end[e]]
        count = (topk_idx == e).sum()
        kept = min(count, segment.size)
        assert (segment[:kept] == e).all()
        assert (segment[kept:] == -1).all()
        assert (np.diff(pos_to_token_topk[start[e] : start[e] + kept]) > 0).all()
    assert (pos_to_expert[end[-1] :] == -1).all()


def check_random_rows(topk_idx, topk_weights, num_physical):
    """What a gate may leave in rows that are routed at random."""
    assert (topk_idx >= 0).all()
    assert (topk_idx < num_physical).all()
    assert all(np.unique(row).size == row.size for row in topk_idx)
    assert (topk_weights > 0).all()
    assert (topk_weights <= 1).all()


def moved(topk_idx, num_experts, alignment, rows=None):
    """token_topk_to_pos, pos_to_expert, pos_to_token_topk of a routing."""
    m = mm.fused_mapping(topk_idx, num_experts, alignment, rows)
    return m.token_topk_to_pos, m.pos_to_expert, m.pos_to_token_topk
