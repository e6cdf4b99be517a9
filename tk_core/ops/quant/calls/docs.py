"""Parts that the docstrings of several casts share."""

FMT = "fmt: 'e4m3' (float8_e4m3fn) or 'e2m1' (int8, two codes a byte, the first one low)."

FLAGS = """use_tma_aligned_col_major_sf: scales column-major, rows padded to 16 bytes with zeros.
    round_sf: scales are powers of two, 2**ceil(log2(amax / MAX)).
    use_packed_ue8m0: store their exponents, four neighbouring blocks an int32; needs round_sf."""

SF = """fp32 (R, G) by default; float8_e4m3fn (R, G) with use_e4m3_sf; int32 (R, ceil(G / 4)) with use_packed_ue8m0. Column-major
    scales are a view with strides (1, Ra) in PyTorch and the storage (G, Ra), see `sf_logical`, in JAX."""

RAISES = """TypeError: a wrong dtype or kind of argument.
    ValueError: a wrong shape, block size, format or combination of flags."""

NUMERICS = """bit-exact: amax in fp32, clamped from below (`set_amax_clamp_for_quant`), scale amax / MAX and factor MAX / amax with one
    rounding each (or exact powers of two), elements to the nearest code, ties to even, saturating. NaN or Inf spoil their block only."""

GRADIENT = "none; `fake_quant` has a straight-through gradient."

SOURCE = "OCP Microscaling Formats (MX) Specification 1.0; FP8 Formats for Deep Learning, 2022."


def doc(summary: str, args: str, returns: str, *, raises: str = RAISES, numerics: str = NUMERICS, gradient: str = GRADIENT) -> str:
    """A docstring of the usual sections."""
    return (
        f"{summary}\n\nArgs:\n    {args}\n\nReturns:\n    {returns}\n\nRaises:\n    {raises}\n\nNumerics:\n    {numerics}\n\n"
        f"Gradient:\n    {gradient}\n\nSource:\n    {SOURCE}\n"
    )
