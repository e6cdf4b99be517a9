"""Casts beside other libraries: microscaling views, DLPack, scales as matrix products take them; the public names."""

import numpy as np
from quant_arrays import same
from quant_fixtures import jax, jq, torch, tq  # noqa: F401 - fixtures


def test_microscaling_views(torch, tq):
    """Row-major packed scales are plain E8M0 scales, and data are elements of the MX formats."""
    x = torch.randn(16, 256)
    data, sf = tq.per_token_cast(x, "e4m3", 32, round_sf=True, use_packed_ue8m0=True)
    scales = sf.view(torch.float8_e8m0fnu)
    assert scales.shape == (16, 8)
    product = data.float().unflatten(-1, (8, 32)) * scales.float().unsqueeze(-1)
    assert torch.equal(product.flatten(-2), tq.cast_back((data, sf), "fp32", (1, 32)))


def test_dlpack_both_ways(torch, tq, jax, jq):
    x = torch.randn(16, 256)
    data, sf = tq.per_token_cast(x, "e4m3", 128)
    there = jax.dlpack.from_dlpack(data), jax.dlpack.from_dlpack(sf)
    same(np.asarray(jq.cast_back(there, "fp32", (1, 128))), tq.cast_back((data, sf), "fp32", (1, 128)).numpy())
    back = tuple(torch.from_dlpack(a) for a in jq.per_token_cast(jax.numpy.asarray(x.numpy()), "e4m3", 128))
    assert torch.equal(back[0].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(back[1], sf)
    fp4, sf4 = tq.per_token_cast(x, "e2m1", 32, round_sf=True)
    bits = jax.dlpack.from_dlpack(fp4)
    assert bits.dtype == np.int8
    same(np.asarray(jq.cast_back((bits, jax.dlpack.from_dlpack(sf4)), "fp32", (1, 32))), tq.cast_back((fp4, sf4), "fp32", (1, 32)).numpy())
    native = jq.unpack_from_e2m1fn_x2(bits).astype("float4_e2m1fn")
    packed = jax.lax.bitcast_convert_type(native.reshape(16, 128, 2), "uint8")
    same(np.asarray(packed).view(np.int8), fp4.numpy())


def test_deep_gemm_scales(torch, tq):
    """1 x 128 scales column-major with strides (1, align(M, 4)), 128 x 128 scales row-major, and weight scales by rows."""
    a, sa = tq.per_token_cast(torch.randn(13, 256), "e4m3", 128, None, True)
    assert sa.shape == (13, 2)
    assert sa.stride() == (1, 16)
    assert a.is_contiguous()
    w = torch.randn(256, 256)
    b, sb = tq.per_block_cast(w, "e4m3", (128, 128), round_sf=True)
    assert sb.shape == (2, 2)
    assert sb.is_contiguous()
    ((sf0, sf1),) = tq.batched_transpose_weight_sf([sb], 128, [False], [None])
    assert sf0.stride() == (1, 256)
    assert sf1.stride() == (1, 256)
    assert torch.equal(tq.cast_back((b, sf0), "fp32", (1, 128)), tq.cast_back((b, sb), "fp32", (128, 128)))
    turned = b.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    assert torch.equal(tq.cast_back((turned, sf1), "fp32", (1, 128)), tq.cast_back((b, sb), "fp32", (128, 128)).t())


def test_public_names():
    """Every name of the area, with a docstring of all sections."""
    import inspect

    from tk_jax import quant as jax_quant
    from tk_torch import quant as torch_quant

    for module in (torch_quant, jax_quant):
        for name in module.__all__:
            if name != "QuantTensor":
                text = inspect.getdoc(getattr(module, name))
                assert all(section in (text or "") for section in ("Args:", "Returns:", "Raises:") if not name.startswith("set_")), name
    assert set(jax_quant.__all__) - set(torch_quant.__all__) == {"sf_logical"}
