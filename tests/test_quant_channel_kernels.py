"""Casts with a scale for every channel, and scales of weights: kernels against the oracle, bit for bit."""

import numpy as np
import pytest
from quant_arrays import BF16, F8, normal, same, same_pair
from quant_fronts import FRONTS

import tk_core
from tk_core.ops.quant.channels import quantize_channels
from tk_core.ops.quant.weight_sf import launches, weight_sf_op
from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

KINDS = {"plain": {}, "round": {"round_sf": True}, "packed": {"round_sf": True, "use_packed_ue8m0": True}}
FLOATS = {"bf16": BF16, "f32": np.dtype(np.float32)}


def call(x, x_sf=None, pos=None, **attrs):
    return tk_core.call(quantize_channels, x, x_sf, pos, **attrs)


def wide(shape, dtype=np.float32, seed=0):
    """Channels of very different size, some all zero, zeros of both signs."""
    x = normal(shape, seed) * np.exp2(np.random.default_rng([seed, 7]).integers(-40, 40, shape[1])).astype(np.float32)
    x[:, ::17] = 0
    x[::3, ::17] = -0.0
    return x.astype(dtype)


# layouts of the scales of a quantized input: (block_k, oracle flags, as column-major storage)
INPUTS = {
    "f32": (128, {}, False),
    "f32-col": (32, {"use_tma_aligned_col_major_sf": True}, True),
    "packed": (32, {"round_sf": True, "use_packed_ue8m0": True}, False),
    "packed-col": (128, {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True}, True),
    "e4m3": (32, {"use_e4m3_sf": True}, False),
}


def quantized(shape, name, seed=0):
    """A quantized input for the oracle, its scales in storage orientation, and the attributes that tell of them."""
    block, flags, col = INPUTS[name]
    pair = q.per_token_cast(normal(shape, seed) * (3.0 if name == "e4m3" else 1.0), "e4m3", block, **flags)
    return pair, qf.sf_storage(pair[1]) if col else pair[1], {"x_block_k": block, "x_col": col}


def positions(Mo, M, seed=0):
    """Rows in any order and repeated, empty ones of every kind, one block with nothing but empty rows."""
    pos = np.random.default_rng(seed).integers(-1, M, Mo).astype(np.int32)
    pos[::7] = [-1, -5, M, 2**31 - 1, -(2**31)][seed % 5]
    pos[128:256] = -1
    return pos


# ------------------------------------------------------------------ straight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("npt", [32, 128])
@pytest.mark.parametrize("shape", [(1, 64), (32, 64), (384, 64), (130, 192), (1100, 192)])
def test_bf16(shape, npt, kind):
    x = wide(shape, BF16)
    same_pair(call(x, num_per_tokens=npt, sf=kind), q.per_channel_cast(x, "e4m3", npt, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_f32(kind):
    x = wide((257, 320))
    same_pair(call(x, sf=kind), q.per_channel_cast(x, "e4m3", 128, **KINDS[kind]))


def test_of_real_width():
    x = wide((256, 7168), BF16)
    same_pair(call(x, sf="plain"), q.per_channel_cast(x, "e4m3", 128))


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("name", INPUTS)
def test_quantized_input(name, kind):
    pair, x_sf, about = quantized((133, 384), name)
    want = q.per_channel_cast(pair, "e4m3", 32, num_per_channels=about["x_block_k"], **KINDS[kind])
    same_pair(call(pair[0], x_sf, num_per_tokens=32, sf=kind, **about), want)


def test_the_order_of_roundings():
    """6.8: the input's scale first, then the factor."""
    x = np.zeros((32, 64), np.uint8)
    x[:2] = [[0x78], [0x74]]
    sf = np.full((32, 2), np.uint32(0x3C1A441B).view(np.float32))
    data, _ = call(x.view(F8), sf, num_per_tokens=32, x_block_k=32)
    assert set(data.view(np.uint8)[1]) == {0x7A}


def test_clamp():
    x = wide((128, 64), BF16)
    for clamp in (1e-4, 1.0, 1e20):
        same_pair(call(x, amax_clamp=clamp), q.per_channel_cast(x, "e4m3", 128, amax_clamp=clamp))


# ------------------------------------------------------------------ gathered


@pytest.mark.parametrize("kind", ["plain", "round"])
@pytest.mark.parametrize("seed", range(5))
def test_gather(seed, kind):
    x = wide((200, 192), BF16, seed)
    pos = positions(400, 200, seed)
    same_pair(call(x, None, pos, sf=kind), q.per_channel_cast_fused(x, "e4m3", 128, **KINDS[kind], pos_to_token=pos))


@pytest.mark.parametrize("name", ["f32", "packed-col"])
def test_gather_of_quantized_rows(name):
    pair, x_sf, about = quantized((150, 256), name)
    pos = positions(336, 150)
    want = q.per_channel_cast_fused(pair, "e4m3", 128, num_per_channels=about["x_block_k"], pos_to_token=pos)
    same_pair(call(pair[0], x_sf, pos, **about), want)


def test_gather_without_rows():
    x, pos = np.zeros((0, 64), BF16), np.full(48, 3, np.int32)
    same_pair(call(x, None, pos), q.per_channel_cast(np.zeros((48, 64), np.float32), "e4m3", 128))


def test_empty_rows_are_zeros_whatever_a_block_holds():
    x = np.full((1, 64), -np.inf, BF16)
    data, _ = call(x, None, np.array([-1] * 31 + [0], np.int32), num_per_tokens=32)
    assert not data.view(np.uint8)[:31].any()


# ------------------------------------------------------------------ transposed


@pytest.mark.parametrize("kind", ["plain", "round", "packed"])
@pytest.mark.parametrize("npt", [32, 128])
@pytest.mark.parametrize("M", [128, 640])
def test_transpose(M, npt, kind):
    x = wide((M, 192), BF16)
    data, sf = q.per_channel_cast(x, "e4m3", npt, **KINDS[kind])
    same_pair(call(x, num_per_tokens=npt, sf=kind, transpose=True), (data.T, sf))


@pytest.mark.parametrize("dtype", ["f32", "e4m3"])
def test_transpose_of_other_inputs(dtype):
    x, x_sf, about = (wide((256, 320)), None, {}) if dtype == "f32" else quantized((256, 256), "f32")
    block = about.get("x_block_k")
    data, sf = q.per_channel_cast(x, "e4m3", 128, num_per_channels=block)
    same_pair(call(x[0] if block else x, x_sf, transpose=True, **about), (data.T, sf))


# ------------------------------------------------------------------ everywhere


def test_not_a_number_stays_in_its_block():
    x = wide((256, 64), BF16)
    good = call(x)
    x[130, 5], x[131, 9], x[132, 9] = np.nan, np.inf, -np.inf
    data, sf = call(x)
    rest = np.ones((2, 64), bool)
    rest[1, [5, 9]] = False
    np.testing.assert_array_equal(sf[rest], good[1][rest])
    cells = rest.repeat(128, axis=0)
    np.testing.assert_array_equal(data.view(np.uint8)[cells], good[0].view(np.uint8)[cells])


def test_no_rows():
    for transpose, shape in ((False, (0, 64)), (True, (64, 0))):
        data, sf = call(np.zeros((0, 64), BF16), transpose=transpose)
        assert data.shape == shape
        assert sf.shape == (0, 64)
    assert call(np.zeros((0, 64), BF16), sf="packed")[1].shape == (0, 64)


def test_same_bits_again():
    x, pos = wide((300, 192), BF16), positions(400, 300)
    same_pair(call(x, None, pos), call(x, None, pos))


@pytest.mark.parametrize(
    ("error", "match", "x", "x_sf", "attrs"),
    [
        (ValueError, "num_per_tokens", np.zeros((4, 64), BF16), None, {"num_per_tokens": 64}),
        (ValueError, "multiple of 64", np.zeros((4, 32), BF16), None, {}),
        (ValueError, "sf", np.zeros((4, 64), BF16), None, {"sf": "e4m3"}),
        (ValueError, "multiple of 128 rows", np.zeros((64, 64), BF16), None, {"transpose": True}),
        (ValueError, "x_sf", np.zeros((4, 64), F8), None, {}),
        (ValueError, "x_sf", np.zeros((4, 64), BF16), np.ones((4, 1), np.float32), {}),
        (ValueError, "x_block_k", np.zeros((4, 64), F8), np.ones((4, 1), np.float32), {}),
        (ValueError, "x_sf", np.zeros((4, 64), F8), np.ones((4, 1), np.float32), {"x_block_k": 32}),
        (TypeError, "x", np.zeros((4, 64), np.float16), None, {}),
    ],
)
def test_errors(error, match, x, x_sf, attrs):
    with pytest.raises(error, match=match):
        call(x, x_sf, **attrs)


def cases():
    """One of each kind of kernel, with channels that do not fill the last block of threads: arrays, attributes, what the oracle says."""
    x, pos = wide((384, 576), BF16), positions(400, 384)
    pair, x_sf, about = quantized((384, 384), "f32")
    block = about["x_block_k"]
    transposed = q.per_channel_cast(x, "e4m3", 32, True)
    return {
        "straight": ((x, None, None), {}, q.per_channel_cast(x, "e4m3", 128)),
        "packed": ((x, None, None), {"sf": "packed", "num_per_tokens": 32}, q.per_channel_cast(x, "e4m3", 32, **KINDS["packed"])),
        "gather": ((x, None, pos), {"sf": "round"}, q.per_channel_cast_fused(x, "e4m3", 128, True, None, pos)),
        "transpose": ((x, None, None), {"sf": "round", "num_per_tokens": 32, "transpose": True}, (transposed[0].T, transposed[1])),
        "quantized": ((pair[0], x_sf, None), about, q.per_channel_cast(pair, "e4m3", 128, num_per_channels=block)),
        "quantized gather": ((pair[0], x_sf, pos), about, q.per_channel_cast_fused(pair, "e4m3", 128, False, block, pos)),
    }


@pytest.mark.anywhere
@pytest.mark.parametrize("front", FRONTS)
def test_both_front_ends(front):
    for arrays, attrs, want in cases().values():
        same_pair(FRONTS[front]().forward(quantize_channels, arrays, **attrs), want)


# ------------------------------------------------------------------ scales of weights


def powers(shape, seed=0):
    return np.exp2(np.random.default_rng([seed, *shape]).integers(-126, 128, shape)).astype(np.float32)


def cast_weights(scales, block_size):
    """As front ends do: launches of the planned sizes, and matrices as weights of one."""
    results, rest = [], [s.reshape(-1, *s.shape[-2:]) for s in scales]
    for count in launches(len(scales)):
        some, rest = rest[:count], rest[count:]
        got = tk_core.call(weight_sf_op(count), *some, block_size=block_size)
        results += [(got[2 * w], got[2 * w + 1]) for w in range(count)]
    return results


@pytest.mark.parametrize("block_size", [32, 128])
def test_weights(block_size):
    """Lists of every length, matrices and stacks of them, sizes that are no multiple of four blocks."""
    k = 128 // block_size
    shapes = [(k, k), (3 * k, 2, 4 * k), (4 * k, 16), (2, 5 * k, 7 * k), (16, 8), (9 * k, 3 * k)]
    shapes = [s if s[0] != 3 * k or len(s) < 3 else (3, 2 * k, 4 * k) for s in shapes]
    for count in (1, 3, 11):
        scales = [powers(shapes[i % len(shapes)], i) for i in range(count)]
        want = q.batched_transpose_weight_sf(scales, block_size, [True] * count)
        for scale, got, (sf0, sf1) in zip(scales, cast_weights(scales, block_size), want, strict=True):
            lead = scale.shape[:-2]
            same(got[0].reshape(*lead, *got[0].shape[1:]), qf.sf_storage(sf0))
            same(got[1].reshape(*lead, *got[1].shape[1:]), sf1)


@pytest.mark.anywhere
@pytest.mark.parametrize("front", FRONTS)
def test_weights_in_both_front_ends(front):
    scales = [powers((2, 3, 5)), powers((1, 4, 2))]
    got = FRONTS[front]().forward(weight_sf_op(2), scales, block_size=128)
    want = q.batched_transpose_weight_sf(scales, 128, [True, True])
    for a, b in zip(got, [a for sf0, sf1 in want for a in (qf.sf_storage(sf0), sf1)], strict=True):
        same(a, b)


def test_only_the_exponent_of_a_weights_scale_is_read():
    scales = np.array([[1.0, -1.5], [np.float32(2**-149), np.inf]], np.float32)
    rows, columns = tk_core.call(weight_sf_op(1), scales[None].repeat(1, 0), block_size=128)
    assert rows[0, 0, ::128].view(np.uint32).tolist() == [0x7F7F, 0xFF00]
    assert columns[0, 0, ::128].view(np.uint32).tolist() == [0x007F, 0xFF7F]


def test_launches():
    for count in range(70):
        sizes = launches(count)
        assert sum(sizes) == count
        assert len(sizes) <= count // 8 + 3
    assert {size for count in range(70) for size in launches(count)} == {1, 2, 4, 8}


@pytest.mark.parametrize(("shape", "block_size"), [((1, 1, 1), 64), ((1, 3, 4), 32), ((1, 0, 1), 128), ((0, 1, 1), 128)])
def test_errors_of_weights(shape, block_size):
    with pytest.raises(ValueError, match="weight_sf"):
        tk_core.call(weight_sf_op(1), np.ones(shape, np.float32), block_size=block_size)
