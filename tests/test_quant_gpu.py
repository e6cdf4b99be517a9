"""Casts on a CUDA device: every width of the specification, long offsets, streams and graphs, and products that take our scales."""

import pytest
from quant_arrays import FLAG_SETS, PUBLIC_FLAGS
from quant_fronts import QuantJax, QuantTorch
from test_quant_casts import check, quantized, samples

torch = pytest.importorskip("torch")

from tk_torch import quant as tq

pytestmark = pytest.mark.gpu

WIDTHS = (576, 2048, 2560, 3072, 4096, 6144, 7168)


@pytest.fixture(params=[QuantTorch, QuantJax])
def front(request):
    return request.param()


@pytest.mark.parametrize("H", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_width(front, H, dtype):
    x = samples((133, H), dtype)
    for flags in FLAG_SETS:
        named = dict(zip(PUBLIC_FLAGS, flags, strict=True))
        for fmt, g in (("e4m3", 128), ("e2m1", 32), ("e4m3", H), ("e5m6", H)):
            check(front, "per_token_cast", x, fmt, g, **named)
        check(front, "per_block_cast", x, "e4m3", (128, 128), **named)
        check(front, "per_block_cast", x, "e2m1", (32, 32), **named)
    if dtype == "bf16":
        even = samples((256, H), dtype)
        for n in (32, 128):
            check(front, "per_channel_cast", even, "e4m3", n, True)
            check(front, "per_channel_cast_and_transpose", even, "e4m3", n)


@pytest.mark.parametrize("H", WIDTHS)
def test_back_at_every_width(front, H):
    x = samples((133, H), "fp32")
    for fmt, block, flags in (("e4m3", (1, 128), FLAG_SETS[1]), ("e2m1", (1, 32), FLAG_SETS[5]), ("e2m1", (32, 32), FLAG_SETS[2])):
        given = quantized(x, fmt, block, flags)
        for out in ("bf16", "fp32"):
            check(front, "cast_back", given, out, block)
    codes = quantized(x, "e2m1", (1, 32), FLAG_SETS[2])
    for coarse in ((1, 128), (128, 128)):
        check(front, "per_block_cast_lossless", codes, "e4m3", (1, 32), coarse, round_sf=True)
    check(front, "per_token_cast", quantized(x, "e4m3", (128, 128), FLAG_SETS[0]), "e4m3", 128, (128, 128))


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_offsets_beyond_31_bits():
    """The first, the last and the wrapping rows are what they are alone."""
    rows, H = (1 << 31) // 7168 + 300, 7168
    x = torch.empty(rows, H, dtype=torch.bfloat16, device="cuda")
    block = torch.randn(1024, H, device="cuda").bfloat16()
    for start in range(0, rows, 1024):
        x[start : start + 1024] = block[: min(1024, rows - start)]
    for call, back in (
        (lambda t: tq.per_token_cast(t, "e4m3", 128), lambda p: tq.cast_back(p, "bf16", (1, 128))),
        (lambda t: tq.per_token_cast(t, "e2m1", 32, round_sf=True), lambda p: tq.cast_back(p, "bf16", (1, 32))),
        (lambda t: tq.per_block_cast(t, "e4m3", (128, 128)), lambda p: tq.cast_back(p, "bf16", (128, 128))),
    ):
        data, sf = call(x)
        whole = back((data, sf))
        for start in (0, rows // 1024 * 1024 - 1024):
            part = call(x[start : start + 1024])
            assert same_bytes(data[start : start + 1024], part[0])
            assert torch.equal(whole[start : start + 1024], back(part))
        del data, sf, whole


def test_streams_and_graphs():
    x = torch.randn(512, 7168, device="cuda").bfloat16()
    want = tq.per_token_cast(x, "e4m3", 128)
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = tq.per_token_cast(late, "e4m3", 128)
    side.synchronize()
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
    static = torch.zeros_like(x)
    tq.per_token_cast(static, "e2m1", 32, stochastic_cast=True, seed=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tq.per_token_cast(static, "e4m3", 128)
        drawn = tq.per_token_cast(static, "e2m1", 32, stochastic_cast=True, seed=4)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bytes(a, b) for a, b in zip(captured, want, strict=True))
    assert all(same_bytes(a, b) for a, b in zip(drawn, tq.per_token_cast(x, "e2m1", 32, stochastic_cast=True, seed=4), strict=True))


@pytest.mark.parametrize("weights", ["rows", "blocks"])
def test_scaled_matrix_product_of_torch(weights):
    """1 x 128 and 128 x 128 scales go straight into torch's scaled product; compared with an fp32 product of the same numbers."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    a, w = torch.randn(256, 1024, device="cuda").bfloat16(), torch.randn(512, 1024, device="cuda").bfloat16()
    qa, sa = tq.per_token_cast(a, "e4m3", 128, None, True)
    if weights == "rows":
        qw, sw = tq.per_token_cast(w, "e4m3", 128, None, True)
        kind, block, scale = ScalingType.BlockWise1x128, (1, 128), sw
    else:
        qw, sw = tq.per_block_cast(w, "e4m3", (128, 128))
        kind, block, scale = ScalingType.BlockWise128x128, (128, 128), sw.t()
    none = SwizzleType.NO_SWIZZLE
    y = scaled_mm(qa, qw.t(), sa, ScalingType.BlockWise1x128, scale, kind, none, none, output_dtype=torch.bfloat16)
    torch.backends.cuda.matmul.allow_tf32 = False
    want = tq.cast_back((qa, sa), "fp32", (1, 128)) @ tq.cast_back((qw, sw), "fp32", block).t()
    # bf16 of the result, and sums of FP8 products that tensor cores keep in some 14 bits
    assert (y.float() - want).abs().max() <= 2**-8 * want.abs().max()
    exact = a.float() @ w.float().t()
    assert ((want - exact) ** 2).sum() < 2e-3 * (exact**2).sum()


def test_microscaling_products():
    """MX and NVFP4 blocks against a product of elements and scales taken apart, which newer chips do in one instruction."""
    a, w = torch.randn(64, 512, device="cuda"), torch.randn(96, 512, device="cuda")
    for fmt, g, named in (("e4m3", 32, {"round_sf": True, "use_packed_ue8m0": True}), ("e2m1", 16, {"use_e4m3_sf": True})):
        parts = []
        for x in (a, w):
            data, sf = tq.per_token_cast(x, fmt, g, **named)
            scale = sf.view(torch.float8_e8m0fnu).float() if sf.dtype == torch.int32 else sf.float()
            elements = tq.unpack_from_e2m1fn_x2(data) if fmt == "e2m1" else data.float()
            parts.append((elements.unflatten(1, (-1, g)).double(), scale.double(), tq.cast_back((data, sf), "fp32", (1, g)).double()))
        (ea, sa, da), (ew, sw, dw) = parts
        emulated = torch.einsum("mbk,nbk,mb,nb->mn", ea, ew, sa, sw)
        assert torch.allclose(emulated, da @ dw.t(), rtol=1e-6, atol=1e-6)


def test_both_frameworks_on_one_device():
    x = samples((133, 7168), "bf16")
    results = [made().quant("per_token_cast", x, "e2m1", 32, round_sf=True) for made in (QuantTorch, QuantJax)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
