"""Manifold-constrained hyper-connections for PyTorch: differentiable operations and the pipeline of a sub-layer.

The low-level forms with results that the caller provides are in `tk_torch.mhc_low` and are exported here as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_core.docs import documented
from tk_core.ops.mhc import apply_mix, expand, head_mix, norm_fn, pipeline, post, sinkhorn, split_mixes
from tk_torch.library import bind
from tk_torch.mhc_low import *  # noqa: F403
from tk_torch.mhc_low import __all__ as _low_level

__all__ = [
    "expand_from_embedding",
    "expand_to_mhc",
    "mhc_head",
    "mhc_head_compute_mix",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
    *_low_level,
]

_expand = bind(expand.expand_to_mhc)
_norm_fn = bind(norm_fn.mhc_pre_norm_fn)
_split_mixes = bind(split_mixes.mhc_pre_split_mixes)
_sinkhorn = bind(sinkhorn.sinkhorn_normalize)
_apply_mix = bind(apply_mix.mhc_pre_apply_mix)
_post = bind(post.mhc_post)
_head_mix = bind(head_mix.mhc_head_compute_mix)

_OUT = "`out`: a contiguous array to write the result to; it must not overlap an argument that the gradient needs."
_MAIN_GRAD = (
    "A parameter with an attribute `main_grad` (fp32, of its shape) gets its gradient added to that buffer in place, and no "
    "gradient is returned for it; this holds under torch.compile as well."
)
_CHANNEL = (
    "If a caller has put a gradient buffer at `residual.untyped_storage().grad_from_mhc_post`, the eager backward adds to it "
    "and returns no gradient for the residual; under torch.compile the buffer is not looked up."
)


def _residual_buffer(residual: Tensor) -> Tensor | None:
    """The gradient buffer that a caller has left on the residual's storage, shaped like the residual."""
    buffer = getattr(residual.untyped_storage(), "grad_from_mhc_post", None)
    return buffer if buffer is None else buffer.view(residual.shape)


def _last_residual_buffer(residual: Tensor) -> Tensor | None:
    """The same for the last gradient of a residual, which takes the buffer away."""
    buffer = _residual_buffer(residual)
    if buffer is not None:
        del residual.untyped_storage().grad_from_mhc_post
    return buffer


_APPLY_MIX_CONTEXT = _apply_mix.forward.gradient.context("x", _residual_buffer)
_NORM_FN_CONTEXT = _norm_fn.forward.gradient.context("residual", _last_residual_buffer)


@documented(expand.expand_to_mhc, _OUT)
def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    return _expand(hidden, mhc_mult=mhc_mult, out=None if out is None else {"out": out})


@documented(norm_fn.mhc_pre_norm_fn, _MAIN_GRAD + "\n\n    " + _CHANNEL)
def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
    *,
    precision: str = "bf16x2",
) -> Tensor:
    parameters = {"d_mhc_fn": mhc_fn, "d_mhc_norm_weight": mhc_norm_weight}
    return _norm_fn(
        residual,
        mhc_fn,
        mhc_norm_weight,
        accumulators={name: getattr(p, "main_grad", None) for name, p in parameters.items()},
        context=_NORM_FN_CONTEXT if fuse_grad_acc else None,
        mhc_norm_eps=mhc_norm_eps,
        n_splits=n_splits,
        precision=precision,
    )


@documented(split_mixes.mhc_pre_split_mixes)
def mhc_pre_split_mixes(
    input_mixes: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_mult: int, mhc_post_mult_value: float, mhc_pre_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _split_mixes(
        input_mixes, mhc_scale, mhc_base, mhc_mult=mhc_mult, mhc_post_mult_value=mhc_post_mult_value, mhc_pre_eps=mhc_pre_eps
    )


@documented(sinkhorn.sinkhorn_normalize)
def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    return _sinkhorn(x, repeat=repeat, eps=eps)


@documented(apply_mix.mhc_pre_apply_mix, _OUT + "\n\n    " + _CHANNEL)
def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    return _apply_mix(x, mix, context=_APPLY_MIX_CONTEXT, out=None if out is None else {"out": out})


@documented(post.mhc_post, _OUT + " Without gradients it may be the residual itself.")
def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None) -> Tensor:
    return _post(x, residual, post_layer_mix, comb_res_mix, out=None if out is None else {"out": out})


@documented(head_mix.mhc_head_compute_mix)
def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    return _head_mix(input_mix, mhc_scale.reshape(1) if mhc_scale.ndim == 0 else mhc_scale, mhc_base, mhc_pre_eps=mhc_pre_eps)


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    return expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
    precision: str = "bf16x2",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    options: dict[str, Any] = {"n_splits": n_splits, "precision": precision}
    sizes = (norm_eps, mhc_mult, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat)
    return pipeline.mhc_pre(_HERE, residual, fn, scale, base, norm_weight, *sizes, **options)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
    precision: str = "bf16x2",
) -> Tensor:
    options: dict[str, Any] = {"n_splits": n_splits, "precision": precision}
    return pipeline.mhc_head(_HERE, residual, fn, scale, base, norm_weight, norm_eps, mhc_mult, pre_eps, **options)


expand_from_embedding.__doc__ = pipeline.EMBEDDING_DOC
mhc_pre.__doc__ = pipeline.PRE_DOC
mhc_head.__doc__ = pipeline.HEAD_DOC


class _Here:
    """The operations of this module, as the pipeline takes them."""

    mhc_pre_norm_fn = staticmethod(mhc_pre_norm_fn)
    mhc_pre_split_mixes = staticmethod(mhc_pre_split_mixes)
    sinkhorn_normalize = staticmethod(sinkhorn_normalize)
    mhc_pre_apply_mix = staticmethod(mhc_pre_apply_mix)
    mhc_head_compute_mix = staticmethod(mhc_head_compute_mix)


_HERE = _Here
