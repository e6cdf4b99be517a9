"""Wrong arguments of the casts: the same words in both front ends."""

import ml_dtypes
import numpy as np
import pytest
from quant_arrays import BF16, normal
from quant_fixtures import torch, tq  # noqa: F401 - fixtures
from quant_fronts import FRONTS

from tk_core.reference import quant as q

X = normal((32, 128), 1).astype(BF16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZED = q.per_token_cast(X, "e4m3", 32)
FP4 = q.per_token_cast(X, "e2m1", 32, round_sf=True)
ROUNDED = {"round_sf": True, "use_packed_ue8m0": True}


@pytest.fixture(params=FRONTS)
def front(request):
    made = FRONTS[request.param]()
    made.jitted = False
    return made


ERRORS = [
    ("per_token_cast", (X.astype(np.float16), "e4m3", 32), {}, "TypeError: per_token_cast: x: expected dtype bfloat16 or float32, got float16"),
    ("per_token_cast", (X[0], "e4m3", 32), {}, r"ValueError: per_token_cast: x: expected shape (M, H), got (128,)"),
    ("per_token_cast", (X, "fp8", 32), {}, "ValueError: per_token_cast: fmt: expected 'e4m3' or 'e2m1' or 'e5m6', got 'fp8'"),
    ("per_token_cast", (X, 4, 32), {}, "TypeError: per_token_cast: fmt: expected a value of type str, got 4"),
    ("per_token_cast", (X, "e4m3", 48), {}, "ValueError: per_token_cast: num_per_channels: expected 16, 32, 64 or 128, or H, got 48 with H = 128"),
    ("per_token_cast", (X, "e4m3", 32.0), {}, "TypeError: per_token_cast: num_per_channels: expected an int, got 32.0 of type float"),
    ("per_token_cast", (X[:, :96].copy(), "e4m3", 32), {}, "ValueError: per_token_cast: x: expected H a positive multiple of 64, got H = 96"),
    ("per_token_cast", (X, "e4m3", 32), {"round_sf": 1}, "TypeError: per_token_cast: round_sf: expected a bool, got 1 of type int"),
    ("per_token_cast", (X, "e4m3", 32), {"use_packed_ue8m0": True}, "ValueError: per_token_cast: use_packed_ue8m0: expected round_sf=True"),
    ("per_token_cast", (X, "e4m3", 32), {"use_e4m3_sf": True, "round_sf": True}, "ValueError: per_token_cast: use_e4m3_sf: expected neither"),
    ("per_token_cast", (X, "e4m3", 32, (1, 32)), {}, "ValueError: per_token_cast: x_block_size: expected None"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32), {}, "ValueError: per_token_cast: x_block_size: expected the block size"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, (1, 64)), {}, "ValueError: per_token_cast: x_block_size: expected (1, 32) or"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, (1, 128)), {}, "ValueError: per_token_cast: x[1]: expected shape (32, 1), got (32, 4)"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, 32), {}, "TypeError: per_token_cast: x_block_size: expected a pair of ints"),
    ("per_token_cast", ((X, QUANTIZED[1]), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x[0]: expected dtype float8_e4m3fn or int8, got bfloat16"),
    ("per_token_cast", ((QUANTIZED[0], X), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x[1]: expected dtype float32 or int32 or"),
    ("per_token_cast", ((QUANTIZED[0],), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x: expected a pair (data, scales), got 1 items"),
    ("per_token_cast", ("x", "e4m3", 32), {}, "TypeError: per_token_cast: x: expected an array, got str"),
    ("per_token_cast", (X, "e5m6", 64), {}, "ValueError: per_token_cast: num_per_channels: expected H = 128 with fmt 'e5m6', got 64"),
    ("per_token_cast", (X, "e5m6", 128), {"stochastic_cast": True}, "ValueError: per_token_cast: stochastic_cast: expected False with fmt"),
    ("per_token_cast", (X, "e5m6", 128), {"use_e4m3_sf": True}, "ValueError: per_token_cast: use_e4m3_sf: expected False with fmt"),
    ("per_token_cast", (X, "e4m3", 32), {"stochastic_cast": True, "seed": 1.5}, "TypeError: per_token_cast: seed: expected an int, got 1.5"),
    ("per_token_cast_with_sf_only", (X, "e5m6", 128), {}, "ValueError: per_token_cast_with_sf_only: fmt: expected 'e4m3' or 'e2m1'"),
    ("per_token_cast_with_sf_only", (X, "e4m3", 32, True), {}, "TypeError: per_token_cast_with_sf_only: x_block_size: expected None: pass use_tma"),
    ("per_token_cast_with_sf_only", (X, "e4m3", 32, (1, 32)), {}, "ValueError: per_token_cast_with_sf_only: x_block_size: expected None, got"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1], True), {}, "TypeError: per_token_cast_with_precomputed_sf: x_block_size"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 64, QUANTIZED[1]), {}, "ValueError: per_token_cast_with_precomputed_sf: sf: expected shape (32, 2)"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1]), ROUNDED, "ValueError: per_token_cast_with_precomputed_sf: use_packed_ue8m0"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1]), {"use_e4m3_sf": True}, "TypeError: per_token_cast_with_precomputed_sf: sf: expected dtype float8_e4m3fn"),
    ("per_token_cast_to_e5m6", (X, 64), {}, "ValueError: per_token_cast_to_e5m6: num_per_channels: expected H = 128"),
    ("per_block_cast", (X, "e4m3", (64, 128)), {}, "ValueError: per_block_cast: block_size: expected 32 or 128 tokens and channels, got (64, 128)"),
    ("per_block_cast", (X, "e5m6", (32, 32)), {}, "ValueError: per_block_cast: fmt: expected 'e4m3' or 'e2m1'"),
    ("per_block_cast", (X, "e4m3", (32, 32, 1)), {}, "ValueError: per_block_cast: block_size: expected a pair of ints"),
    ("per_block_cast_with_precomputed_sf", (X, "e4m3", (32, 32), QUANTIZED[1]), {}, "ValueError: per_block_cast_with_precomputed_sf: sf: expected shape (1, 4)"),
    ("per_block_cast_lossless", (QUANTIZED, "e4m3", (1, 32), (1, 128)), {}, "TypeError: per_block_cast_lossless: x[0]: expected dtype int8"),
    ("per_block_cast_lossless", (FP4, "e2m1", (1, 32), (1, 128)), {}, "ValueError: per_block_cast_lossless: fmt: expected 'e4m3'"),
    ("per_block_cast_lossless", (FP4, "e4m3", (1, 32), (1, 16)), {}, "ValueError: per_block_cast_lossless: out_block_size: expected a multiple of"),
    ("per_channel_cast", (X, "e4m3", 32), {}, "ValueError: per_channel_cast: x: expected M a multiple of 128, got M = 32"),
    ("per_channel_cast", (X, "e2m1", 32), {}, "ValueError: per_channel_cast: fmt: expected 'e4m3', got 'e2m1'"),
    ("per_channel_cast", (X, "e4m3", 64), {}, "ValueError: per_channel_cast: num_per_tokens: expected 32 or 128, got 64"),
    ("per_channel_cast_fused", (X, "e4m3", 32), {}, "ValueError: per_channel_cast_fused: num_per_tokens: expected 128, got 32"),
    ("per_channel_cast_fused", (X, "e4m3", 128), {"pos_to_token": np.zeros(16, np.int8)}, "TypeError: per_channel_cast_fused: pos_to_token: expected dtype int32, got int8"),
    ("per_channel_cast_fused", (X, "e4m3", 128), {"pos_to_token": np.zeros(17, np.int32)}, "ValueError: per_channel_cast_fused: pos_to_token: expected Mo a multiple of 16, got Mo = 17"),
    ("per_channel_cast_and_transpose", (X.astype(np.float32), "e4m3", 32), {}, "TypeError: per_channel_cast_and_transpose: x: expected dtype bfloat16, got float32"),
    ("cast_back", (QUANTIZED, "fp16", (1, 32)), {}, "ValueError: cast_back: fmt: expected 'bf16' or 'fp32', got 'fp16'"),
    ("cast_back", (QUANTIZED, "bf16", (2, 32)), {}, "ValueError: cast_back: x_block_size: expected 1, 32 or 128 tokens"),
    ("cast_back", (QUANTIZED, "bf16", (1, 32), "e4m3"), {}, "ValueError: cast_back: x_special_fmt: expected 'e5m6', got 'e4m3'"),
    ("cast_back", (X, "bf16", (1, 32)), {}, "TypeError: cast_back: x: expected a pair (data, scales), got"),
    ("cast_back", ((np.zeros((2, 96), np.uint8), np.ones((2, 1), np.float32)), "bf16", (1, 64)), {}, "TypeError: cast_back: x[0]: expected dtype float8_e4m3fn or int8, or uint8 with"),
    ("per_token_cast_back", (QUANTIZED, "bf16", (1, 32)), {}, "TypeError: per_token_cast_back: num_per_channels: expected an int"),
    ("fake_quant", (X, "e5m6", 128), {}, "ValueError: fake_quant: fmt: expected 'e4m3' or 'e2m1'"),
    ("fake_quant", (normal((4, 192), 0), "e4m3", 128), {}, "ValueError: fake_quant: num_per_channels: expected a divisor of H = 192, got 128"),
    ("fake_quant", (X, "e4m3", 32), {"round_sf": True, "use_e4m3_sf": True}, "ValueError: fake_quant: use_e4m3_sf: expected neither"),
    ("cast", (X.astype(np.int32), "bf16"), {}, "TypeError: cast: x: expected dtype bfloat16 or float32 or float8_e4m3fn, got int32"),
    ("pack_to_e2m1fn_x2", (np.zeros((2, 3), np.int32),), {}, "ValueError: pack_to_e2m1fn_x2: codes: expected a last axis of even length, got (2, 3)"),
    ("unpack_from_e2m1fn_x2", (np.zeros((), np.int8),), {}, "ValueError: unpack_from_e2m1fn_x2: x: expected at least one axis, got ()"),
    ("unpack_from_e2m1fn_x2", (X,), {}, "TypeError: unpack_from_e2m1fn_x2: x: expected dtype int8 or uint8, got bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "named", "text"), ERRORS, ids=range(len(ERRORS)))
def test_errors_say_the_same(front, name, args, named, text):
    if name == "cast":
        args = (args[0], front.torch.bfloat16 if front.name == "torch" else "bfloat16")
    kind, _, message = text.partition(": ")
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[kind]) as info:
        front.quant(name, *args, **named)
    assert str(info.value).startswith(message)


def test_clamps_are_judged():
    from tk_core.config import get_amax_clamp_for_quant, set_amax_clamp_for_quant

    assert [get_amax_clamp_for_quant(f, s) for f in ("e4m3", "e2m1") for s in (False, True)] == [1e-4, 0.875, 6 * 2.0**-126, 6 * 2.0**-9]
    for args, kind in (
        (("e5m6", False, 1.0), ValueError),
        (("e4m3", False, 447 * 2.0**-126), ValueError),
        (("e2m1", True, 5 * 2.0**-9), ValueError),
        (("e4m3", False, float("inf")), ValueError),
        (("e4m3", False, float("nan")), ValueError),
        (("e4m3", 0, 1.0), TypeError),
        (("e4m3", False, "1"), TypeError),
    ):
        with pytest.raises(kind, match="set_amax_clamp_for_quant: "):
            set_amax_clamp_for_quant(*args)


@pytest.mark.parametrize(
    ("sf", "size", "flags", "outs", "text"),
    [
        ([np.ones((1, 1), np.float64)], 128, [False], [None], r"TypeError: sf\[0\]: expected dtype float32"),
        ([np.ones((1,), np.float32)], 128, [False], [None], r"ValueError: sf\[0\]: expected shape"),
        ([np.ones((1, 1), np.float32)], 32, [False], [None], r"ValueError: sf\[0\]: expected a weight of multiples of 128"),
        ([np.ones((1, 1), np.float32)], 64, [False], [None], r"ValueError: block_size: expected 32 or 128"),
        ([np.ones((1, 1), np.float32)], 128, [], [None], r"ValueError: transpose_sf1s: expected 1 entries"),
        ([np.ones((1, 1), np.float32)], 128, [0], [None], r"TypeError: transpose_sf1s\[0\]: expected a bool"),
        ([np.ones((1, 1), np.float32)], 128, [False], [], r"ValueError: outs: expected 1 entries"),
        ([np.ones((1, 1), np.float32)], 128, [False], [1], r"TypeError: outs\[0\]: expected None or a pair"),
        ([np.full((1, 1), 3, np.float32)], 128, [False], [None], r"ValueError: sf\[0\]: expected powers of two"),
    ],
)
def test_errors_of_weights(torch, tq, sf, size, flags, outs, text):
    kind, _, message = text.partition(": ")
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[kind], match="batched_transpose_weight_sf: " + message):
        tq.batched_transpose_weight_sf([torch.from_numpy(s) for s in sf], size, flags, outs, check=True)
