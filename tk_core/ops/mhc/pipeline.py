"""The pipeline of a sub-layer, written once over the operations of a front end `F` (a module with their names)."""

from typing import Any

from tk_core.errors import value_error


def mhc_pre(
    F: Any,
    residual: Any,
    fn: Any,
    scale: Any,
    base: Any,
    norm_weight: Any,
    norm_eps: float,
    mhc_mult: int,
    post_mult_value: float,
    pre_eps: float,
    sinkhorn_eps: float,
    sinkhorn_repeat: int,
    **options: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """norm_fn -> split -> Sinkhorn(comb) -> apply(pre)."""
    check_streams("mhc_pre", residual, mhc_mult)
    mixes = F.mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, **options)
    pre, post, comb = F.mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)
    comb = F.sinkhorn_normalize(comb, sinkhorn_repeat, sinkhorn_eps)
    return F.mhc_pre_apply_mix(residual, pre), (post, comb)


def mhc_head(
    F: Any, residual: Any, fn: Any, scale: Any, base: Any, norm_weight: Any, norm_eps: float, mhc_mult: int, pre_eps: float, **options: Any
) -> Any:
    """norm_fn -> head mix -> apply; rows of fn beyond mhc_mult are ignored."""
    check_streams("mhc_head", residual, mhc_mult)
    if fn.shape[0] > mhc_mult:
        fn = fn[:mhc_mult]
    mixes = F.mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, **options)
    mix = F.mhc_head_compute_mix(mixes, scale, base, pre_eps)
    return F.mhc_pre_apply_mix(residual, mix[..., None])


def check_streams(op: str, residual: Any, mhc_mult: int) -> None:
    """The residual must have mhc_mult streams."""
    if residual.ndim < 2 or residual.shape[-2] != mhc_mult:
        raise value_error(op, "residual", f"shape (..., {mhc_mult}, H), mhc_mult = {mhc_mult} streams", tuple(residual.shape))


PRE_DOC = """Input of a sub-layer and the mixes that close it, from the residual streams.

    mixes = RMSNorm(vec(residual)) @ fn.T;  pre, post, comb = split(mixes);  comb = Sinkhorn(comb)
    layer_input = sum_i pre_i * residual_i

    Args:
        residual: (..., n, H) bf16, the residual streams.
        fn: (n * (n + 2), n * H) fp32, the projection; rows are pre (n), post (n), comb (n * n, input stream major).
        scale: (3,) fp32, multipliers of the pre, post and comb part.
        base: (n * (n + 2),) fp32, biases.
        norm_weight: (n * H,) fp32 or None, the RMSNorm weight, merged into fn.
        norm_eps: epsilon of the RMSNorm, > 0.
        mhc_mult: n; 4 is what is tuned.
        post_mult_value: multiplier of the post part. The paper uses 2.0; the default is the reference's 1.0.
        pre_eps: added to the pre part.
        sinkhorn_eps: epsilon of every Sinkhorn division.
        sinkhorn_repeat: Sinkhorn iterations. The paper uses 20; the default is the reference's 10.
        n_splits: hint for the split of the projection's columns over blocks.
        precision: "bf16x2" (two-term split of fn, error about 2e-6) or "tf32" (about 2e-4).

    Returns:
        layer_input (..., H) bf16, and (post_mix (..., n, 1) fp32, comb_mix (..., n, n) fp32), the last two arguments of `mhc_post`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or range.

    Numerics: each step as its own operation; the result does not depend on whether a gradient is wanted, to the bit.

    Gradient: residual, fn, norm_weight, scale, base, each step by its own rule.

    Source: mHC: Manifold-Constrained Hyper-Connections (2025), equations of the dynamic mappings.
    """

HEAD_DOC = """Input of the language model's head: a learned mix of the residual streams.

    mix = sigmoid(RMSNorm(vec(residual)) @ fn.T * scale + base) + pre_eps;  out = sum_i mix_i * residual_i

    Args:
        residual: (..., n, H) bf16, the residual streams.
        fn: (n, n * H) fp32, the projection; further rows are ignored.
        scale: (1,) or () fp32.
        base: (n,) fp32.
        norm_weight: (n * H,) fp32 or None, the RMSNorm weight, merged into fn.
        norm_eps: epsilon of the RMSNorm, > 0.
        mhc_mult: n.
        pre_eps: added to the mix.
        n_splits: hint for the split of the projection's columns over blocks.
        precision: "bf16x2" or "tf32", as in `mhc_pre`.

    Returns:
        (..., H) bf16.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or range.

    Numerics: each step as its own operation.

    Gradient: residual, fn, norm_weight, scale, base.

    Source: mHC: Manifold-Constrained Hyper-Connections (2025).
    """

EMBEDDING_DOC = """Residual streams from the embedding: every stream starts as a copy of it.

    residual[..., i, :] = x

    Args:
        x: (..., H) bf16, the embedded tokens.
        mhc_mult: number of streams n.

    Returns:
        (..., n, H) bf16.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or range.

    Numerics: exact copies.

    Gradient: x, the sum over the streams in fp32, rounded once.

    Source: mHC: Manifold-Constrained Hyper-Connections (2025).
    """
