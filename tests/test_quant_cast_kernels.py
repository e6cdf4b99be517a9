"""The kernels of `quantize`, `quantize_rows` and `fake_quant` alone, to the bit of the oracle; results are poisoned before."""

import ml_dtypes
import numpy as np
import pytest
import torch
from quant_arrays import BF16, normal, same

from tk_core.device import arch_of
from tk_core.ops.quant.cast import fake_quant, quantize, quantize_rows
from tk_core.plan import Plan
from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

pytestmark = pytest.mark.anywhere
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {"bf16": BF16, "f32": np.dtype(np.float32)}
KINDS = {
    "plain": {},
    "round": {"round_sf": True},
    "packed": {"round_sf": True, "use_packed_ue8m0": True},
    "e4m3": {"use_e4m3_sf": True},
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def tensor(a, device):
    bits = np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy()
    return torch.from_numpy(bits).to(device).view(getattr(torch, a.dtype.name)).reshape(a.shape)


def array(t):
    name = str(t.dtype).removeprefix("torch.")
    bits = t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return bits.view(np.dtype(getattr(ml_dtypes, name, name))).reshape(tuple(t.shape))


def launch(op, tensors, attrs, wanted, outs=None):
    """Results of an operation as tensors; `outs` are written instead of fresh ones."""
    rule = op.forward
    types = [None if t is None else (tuple(t.shape), str(t.dtype).removeprefix("torch."), str(t.device)) for t in tensors]
    where = tensors[0].device
    target = "c" if where.type == "cpu" else arch_of(*torch.cuda.get_device_capability())
    named = dict(zip(rule.attrs, rule.attributes(attrs), strict=True))
    plan = Plan(rule, target, types, named, frozenset(wanted))
    values = [*tensors, *[None] * (plan.num_slots - len(tensors))]
    at = {name: i for i, name in enumerate(rule.slots)}
    for slot, shape, dtype in plan.outs:
        values[slot] = torch.empty(shape, dtype=getattr(torch, dtype), device=where)
        if values[slot].numel():
            values[slot].view(torch.uint8).fill_(0xA5)
    for name, out in (outs or {}).items():
        values[at[name]] = out
    flat = plan.flat or [None] * len(values)
    views = [v if v is None or shape is None else v.reshape(shape) for v, shape in zip(values, flat, strict=False)]
    for step in plan.steps:
        step.kernel.run(*step.gather([*views, *values[len(views) :]]), *step.scalars)
    return [values[at[name]] for name in wanted]


def run(op, arrays, device, wanted=("data", "sf"), **attrs):
    arrays = [*arrays, *[None] * (len(op.forward.ins) - len(arrays))]
    fmt, kind = attrs.get("fmt", "e4m3"), attrs.get("sf", "plain")
    if (fmt, kind == "e4m3") in qf.CLAMPS:
        attrs.setdefault("amax_clamp", float(qf.CLAMPS[fmt, kind == "e4m3"]))
    return [array(t) for t in launch(op, [None if a is None else tensor(a, device) for a in arrays], attrs, wanted)]


def stored(pair, col):
    return pair[0], qf.sf_storage(pair[1]) if col else pair[1]


def flags(kind, col):
    return {**KINDS[kind], "use_tma_aligned_col_major_sf": col}


def samples(M, H, dtype):
    """Rows of very different size, one of zeros of both signs, columns that are small."""
    x = normal((M, H)) * np.exp2(np.random.default_rng([M, H]).integers(-30, 30, (M, 1))).astype(np.float32)
    x[:, ::7] *= np.float32(1e-3)
    x[M // 2] = 0
    x[M // 2, ::3] = -0.0
    return x.astype(DTYPES[dtype])


def same_all(got, want):
    for a, b in zip(got, want, strict=True):
        same(a, b)


# ------------------------------------------------------------------ rows

ROWS = [
    ("e4m3", 128, "plain", False),
    ("e4m3", 32, "packed", True),
    ("e4m3", 64, "packed", False),
    ("e4m3", 16, "round", True),
    ("e4m3", "H", "e4m3", True),
    ("e2m1", 16, "e4m3", True),
    ("e2m1", 32, "round", False),
    ("e2m1", 128, "packed", True),
    ("e5m6", "H", "plain", False),
    ("e5m6", "H", "packed", True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROWS, ids=lambda c: "-".join(map(str, c)))
def test_rows(device, case, dtype):
    """192 columns are no multiple of every block; few rows and odd ones, and rows that fill the padding of a column."""
    fmt, g, kind, col = case
    g = 192 if g == "H" else g
    for M in (1, 5, 33, 130):
        x = samples(M, 192, dtype)
        got = run(quantize, [x], device, fmt=fmt, block_k=g, sf=kind, col=col)
        same_all(got, stored(q.per_token_cast(x, fmt, g, **flags(kind, col)), col))


@pytest.mark.parametrize("case", [("e2m1", 16), ("e4m3", 128)], ids=str)
def test_bytes_of_a_column(device, case):
    """Row counts around the 16 of its padding, of one block of threads and of more."""
    fmt, g = case
    for M in (1, 15, 16, 17, 130):
        x = samples(M, 576, "bf16")
        got = run(quantize, [x], device, fmt=fmt, block_k=g, sf="e4m3", col=True)
        same_all(got, stored(q.per_token_cast(x, fmt, g, **flags("e4m3", True)), True))


@pytest.mark.parametrize("case", [("e4m3", 128, "packed", True), ("e4m3", 7168, "plain", False), ("e5m6", 7168, "round", True)], ids=str)
def test_wide_rows(device, case):
    fmt, g, kind, col = case
    x = samples(9, 7168, "bf16")
    got = run(quantize, [x], device, fmt=fmt, block_k=g, sf=kind, col=col)
    same_all(got, stored(q.per_token_cast(x, fmt, g, **flags(kind, col)), col))


def test_e5m6_takes_rows_of_eight(device):
    x = samples(7, 24, "bf16")
    same_all(run(quantize, [x], device, fmt="e5m6", block_k=24), q.per_token_cast(x, "e5m6", 24))


def test_blocks_that_end_behind_the_row(device):
    x = samples(6, 576, "f32")
    same_all(run(quantize, [x], device), q.per_token_cast(x, "e4m3", 128))


# ------------------------------------------------------------------ blocks

BLOCKS = [
    ("e4m3", (128, 128), "plain", False),
    ("e4m3", (32, 32), "packed", True),
    ("e2m1", (32, 32), "round", True),
    ("e2m1", (128, 128), "packed", False),
    ("e4m3", (128, 32), "packed", True),
]


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks(device, case):
    fmt, (bm, bk), kind, col = case
    dtype = "f32" if (bm, fmt) == (32, "e4m3") else "bf16"
    for M in (1, 33, 300):
        x = samples(M, 192, dtype)
        got = run(quantize, [x], device, fmt=fmt, block_m=bm, block_k=bk, sf=kind, col=col)
        same_all(got, stored(q.per_block_cast(x, fmt, (bm, bk), **flags(kind, col)), col))


def test_wide_blocks(device):
    x = samples(130, 7168, "bf16")
    same_all(run(quantize, [x], device, block_m=128, sf="round"), q.per_block_cast(x, "e4m3", (128, 128), round_sf=True))


# ------------------------------------------------------------------ quantized input

INPUTS = {
    "e4m3-128x128-packed-col": ("e4m3", (128, 128), "packed", True),
    "e2m1-32x32-plain": ("e2m1", (32, 32), "plain", False),
    "e4m3-1x32-plain-col": ("e4m3", (1, 32), "plain", True),
    "e4m3-1x128-e4m3": ("e4m3", (1, 128), "e4m3", False),
}


def quantized(name, M, H):
    fmt, block, kind, col = INPUTS[name]
    x = samples(M, H, "f32")
    if kind == "e4m3":
        x = normal((M, H), 1) * np.float32(30)
    cast = q.per_token_cast(x, fmt, block[1], **flags(kind, col)) if block[0] == 1 else q.per_block_cast(x, fmt, block, **flags(kind, col))
    return cast, stored(cast, col), {"x_block_m": block[0], "x_block_k": block[1], "x_col": col}


@pytest.mark.parametrize("out", [("e4m3", 128, "packed", True), ("e2m1", 32, "plain", False)], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_quantized_input(device, name, out):
    fmt, g, kind, col = out
    for M in (5, 130):
        cast, arrays, about = quantized(name, M, 192)
        got = run(quantize, arrays, device, fmt=fmt, block_k=g, sf=kind, col=col, **about)
        same_all(got, stored(q.per_token_cast(cast, fmt, g, INPUTS[name][1], **flags(kind, col)), col))


def test_zeros_with_a_large_scale_stay_zeros(device):
    """The product of the scale and the factor overflows, and zero times it must not be NaN."""
    data = np.full((2, 32), 0x80, np.uint8).view(np.int8)  # 0 and -0 alternate
    sf = np.full((2, 2), 2.0**100, np.float32)
    codes, scales = run(quantize, [data, sf], device, fmt="e2m1", block_k=32, x_block_m=1, x_block_k=32)
    np.testing.assert_array_equal(codes, data)
    assert (scales == 2.0**-126).all()


# ------------------------------------------------------------------ one of the results, or known scales


def test_scales_only(device):
    x = samples(33, 192, "bf16")
    for kind, col in (("packed", True), ("plain", False)):
        (sf,) = run(quantize, [x], device, ("sf",), block_k=32, sf=kind, col=col)
        same(sf, stored(q.per_token_cast(x, "e4m3", 32, **flags(kind, col)), col)[1])


def test_data_only(device):
    x = samples(33, 192, "bf16")
    (data,) = run(quantize, [x], device, ("data",), block_k=128)
    same(data, q.per_token_cast(x, "e4m3", 128)[0])


def test_known_scales(device):
    x = samples(33, 192, "bf16")
    sf = q.per_token_cast(x, "e4m3", 128)[1]
    (data,) = run(quantize_rows, [x, sf], device, ("data",), block_k=128)
    same(data, q.per_token_cast_with_precomputed_sf(x, "e4m3", 128, sf))
    sf = q.per_token_cast(x, "e2m1", 16, use_e4m3_sf=True)[1]
    (data,) = run(quantize_rows, [x, sf], device, ("data",), fmt="e2m1", block_k=16, sf="e4m3")
    same(data, q.per_token_cast_with_precomputed_sf(x, "e2m1", 16, sf))
    sf = q.per_block_cast(x, "e4m3", (32, 32))[1]
    (data,) = run(quantize, [x, None, sf], device, ("data",), block_m=32, block_k=32)
    same(data, q.per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf))


def test_rows_with_leading_axes(device):
    x = samples(30, 192, "bf16").reshape(2, 3, 5, 192)
    data, sf = run(quantize_rows, [x], device, block_k=64, sf="packed")
    want = q.per_token_cast(x.reshape(30, 192), "e4m3", 64, **KINDS["packed"])
    same_all((data.reshape(30, -1), sf.reshape(30, -1)), want)


# ------------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_rounding(device, fmt):
    """The seed as a number and in memory."""
    x, seed = samples(33, 192, "bf16"), 0xFFFFFFFB
    named = {"fmt": fmt, "block_k": 32, "sf": "round", "stochastic": True}
    want = q.per_token_cast(x, fmt, 32, round_sf=True, stochastic_cast=True, seed=seed)
    same_all(run(quantize, [x], device, seed_value=seed - 2**32, **named), want)
    same_all(run(quantize, [x, None, None, np.array([seed], np.uint32)], device, **named), want)


# ------------------------------------------------------------------ fake quantization


@pytest.mark.parametrize("case", [("e4m3", 64, "plain", "bf16"), ("e2m1", 32, "round", "f32"), ("e2m1", 16, "e4m3", "bf16")], ids=str)
def test_fake_quant(device, case):
    fmt, g, kind, dtype = case
    for M in (1, 33):
        x = samples(M, 192, dtype)
        (y,) = run(fake_quant, [x], device, ("y",), fmt=fmt, block_k=g, sf=kind)
        same(y, q.fake_quant(x, fmt, g, **KINDS[kind]))


def test_fake_quant_in_place_of_a_part(device):
    x = samples(33, 256, "bf16")
    t = tensor(x, device)
    part = t[:, 64:]
    launch(fake_quant, [part], {"block_k": 64}, ("y",), {"y": part})
    same(array(t)[:, :64], x[:, :64])
    same(array(t)[:, 64:], q.fake_quant(x[:, 64:], "e4m3", 64))


# ------------------------------------------------------------------ memory


def test_rows_that_lie_apart(device):
    """x in whole vectors of 16 bytes, scales with any distance of their rows."""
    x = samples(33, 256, "bf16")
    part = tensor(x, device)[:, 64:]
    data, sf = launch(quantize, [part, None, None, None], {"block_k": 64}, ("data", "sf"))
    want = q.per_token_cast(x[:, 64:], "e4m3", 64)
    same_all((array(data), array(sf)), want)
    room = torch.full((33, 5), 7.0, device=device)
    room[:, 1:4] = sf
    (again,) = launch(quantize, [part, None, room[:, 1:4], None], {"block_k": 64}, ("data",))
    same(array(again), q.per_token_cast_with_precomputed_sf(x[:, 64:], "e4m3", 64, want[1]))
    cast, arrays, about = quantized("e4m3-1x32-plain-col", 130, 192)
    wide = torch.full((arrays[1].shape[0], 149), 7.0, device=device)
    wide[:, 3:135] = tensor(arrays[1], device)
    named = {"block_k": 128, "sf": "packed", "col": True, **about}
    got = launch(quantize, [tensor(arrays[0], device), wide[:, 3:135], None, None], named, ("data", "sf"))
    same_all(map(array, got), stored(q.per_token_cast(cast, "e4m3", 128, (1, 32), **flags("packed", True)), True))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("case", [(1, 128, "plain", False), (32, 32, "packed", True)], ids=str)
def test_what_is_not_finite_stays_in_its_block(device, case, bad):
    bm, bk, kind, col = case
    x = samples(70, 192, "f32")
    y = x.copy()
    y[40, 70] = bad
    named = {"block_m": bm, "block_k": bk, "sf": kind, "col": col}
    (data, sf), (data2, sf2) = run(quantize, [x], device, **named), run(quantize, [y], device, **named)
    i, j = 40 // bm, 70 // bk
    touched = np.zeros(data.shape, bool)
    touched[i * bm : (i + 1) * bm, j * bk : (j + 1) * bk] = True
    np.testing.assert_array_equal(data.view(np.uint8)[~touched], data2.view(np.uint8)[~touched])
    differ = sf.view(np.uint8).reshape(*sf.shape, -1) != sf2.view(np.uint8).reshape(*sf.shape, -1)
    assert {tuple(map(int, at)) for at in np.argwhere(differ)} <= ({(0, i, j)} if kind == "packed" else {(i, j, b) for b in range(4)})


def test_no_rows():
    x = torch.empty((0, 192), dtype=torch.bfloat16)
    data, sf = launch(quantize, [x, None, None, None], {"sf": "packed", "col": True, "block_k": 32}, ("data", "sf"))
    assert (tuple(data.shape), tuple(sf.shape)) == ((0, 192), (2, 0))


@pytest.mark.parametrize(
    ("attrs", "name"),
    [
        ({"fmt": "e3m4"}, "fmt"),
        ({"sf": "fp16"}, "sf"),
        ({"block_k": 96}, "block_k"),
        ({"block_m": 16}, "block_m"),
        ({"block_m": 32, "block_k": 192}, "block_m"),
        ({"fmt": "e5m6", "block_k": 64}, "fmt"),
        ({"fmt": "e5m6", "block_k": 192, "sf": "e4m3"}, "fmt"),
        ({"fmt": "e5m6", "block_k": 192, "stochastic": True}, "stochastic"),
    ],
)
def test_errors(attrs, name):
    with pytest.raises(ValueError, match=f"quantize: {name}"):
        run(quantize, [np.zeros((2, 192), BF16)], "cpu", **attrs)


def test_errors_of_shapes():
    x = np.zeros((4, 192), BF16)
    with pytest.raises(ValueError, match="quantize: x"):
        run(quantize, [x[:, :96]], "cpu")
    with pytest.raises(ValueError, match="quantize: given"):
        run(quantize, [x, None, np.ones((4, 3), np.float32)], "cpu", ("data",))
    with pytest.raises(ValueError, match="quantize: x_sf"):
        run(quantize, [np.zeros((4, 192), np.int8)], "cpu")
    with pytest.raises(ValueError, match="quantize: x_sf"):
        run(quantize, [np.zeros((4, 192), np.int8), np.ones((4, 3), np.float32)], "cpu", x_block_m=1, x_block_k=32)
    with pytest.raises(ValueError, match="quantize: x_sf"):
        run(quantize, [x, np.ones((4, 2), np.float32)], "cpu")
