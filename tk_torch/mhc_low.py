"""Low-level mHC forms for PyTorch: no autograd, flat shapes, results in arrays that the caller provides.

Leading axes are one (T tokens). A mix may be given as (T, n) or (T, n, 1), a matrix as (T, n, n) or (T, n * n). What is
written must be contiguous and of the right dtype. Parameter gradients are written (not added to) unless the function
says that it accumulates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tk_core.op import Op
from tk_core.ops.mhc import apply_mix, expand, head_mix, norm_fn, post, sinkhorn, split_mixes
from tk_torch.library import bind

__all__ = [
    "expand_to_mhc_bwd",
    "expand_to_mhc_fwd",
    "mhc_fn_normw_merge_bwd",
    "mhc_fn_normw_merge_fwd",
    "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_fwd",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix_bwd",
    "mhc_pre_apply_mix_fwd",
    "mhc_pre_split_mixes_bwd",
    "mhc_pre_split_mixes_fwd",
    "mhc_prenorm_gemm_bwd",
    "mhc_prenorm_gemm_fwd",
    "mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc_reduce_partials_and_rmsnorm_fwd",
    "mhc_sinkhorn_bwd",
    "mhc_sinkhorn_fwd",
]


def _forward(op: Op, tensors: tuple, given: dict[str, Tensor], **attrs: object) -> list[Tensor | None]:
    direction = bind(op).forward
    with torch.no_grad():
        return direction.run(tensors, direction.rule.attributes(attrs), direction.all, given)


def _accumulate(op: Op, tensors: tuple, given: dict[str, Tensor], accumulators: tuple, **attrs: object) -> None:
    """A forward rule whose last results are added to buffers."""
    direction = bind(op).forward
    with torch.no_grad():
        direction.run((*tensors, *accumulators), direction.rule.attributes(attrs), direction.all, given)


def _backward(op: Op, tensors: tuple, given: dict[str, Tensor], accumulators: tuple = (), **attrs: object) -> list[Tensor | None]:
    direction = bind(op).backward
    with torch.no_grad():
        return direction.run((*tensors, *accumulators), direction.rule.attributes(attrs), direction.all, given)


def _column(t: Tensor) -> Tensor:
    """A mix as (T, n, 1)."""
    return t if t.ndim == 3 else t.unsqueeze(-1)


def _square(t: Tensor, n: int) -> Tensor:
    """A mixing matrix as (T, n, n)."""
    return t if t.ndim == 3 else t.view(t.shape[0], n, n)


def expand_to_mhc_fwd(x: Tensor, o: Tensor) -> None:
    """Write `x` (T, H) to every stream of `o` (T, n, H); see `expand_to_mhc`."""
    _forward(expand.expand_to_mhc, (x,), {"out": o}, mhc_mult=o.shape[-2])


def expand_to_mhc_bwd(o_grad: Tensor, x_grad: Tensor) -> None:
    """Write the sum of `o_grad` (T, n, H) over its streams to `x_grad` (T, H); see `expand_to_mhc`."""
    _backward(expand.expand_to_mhc, (o_grad,), {"d_hidden": x_grad}, mhc_mult=o_grad.shape[-2])


def mhc_sinkhorn_fwd(comb_res_mix: Tensor, comb_res_mix_out: Tensor, repeat: int, eps: float) -> None:
    """Write the Sinkhorn normalization of `comb_res_mix` (T, n, n) to `comb_res_mix_out`; see `sinkhorn_normalize`."""
    _forward(sinkhorn.sinkhorn_normalize, (comb_res_mix,), {"out": comb_res_mix_out}, repeat=repeat, eps=eps)


def mhc_sinkhorn_bwd(grad_output: Tensor, x: Tensor, grad_input: Tensor, repeat: int, eps: float) -> None:
    """Write the gradient of `sinkhorn_normalize` at `x` (T, n, n) to `grad_input`."""
    _backward(sinkhorn.sinkhorn_normalize, (grad_output, x), {"d_x": grad_input}, repeat=repeat, eps=eps)


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre_layer_mix: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """Write the three parts of `input_mixes` (T, n * (n + 2)); see `mhc_pre_split_mixes`."""
    n = pre_layer_mix.shape[1]
    given = {"pre_layer_mix": _column(pre_layer_mix), "post_layer_mix": _column(post_layer_mix), "comb_res_mix": _square(comb_res_mix, n)}
    attrs = {"mhc_mult": n, "mhc_post_mult_value": mhc_post_mult_value, "mhc_pre_eps": mhc_pre_eps}
    _forward(split_mixes.mhc_pre_split_mixes, (input_mixes, mhc_scale, mhc_base), given, **attrs)


def mhc_pre_split_mixes_bwd(
    pre_layer_mix_grad: Tensor,
    post_layer_mix_grad: Tensor,
    comb_res_mix_grad: Tensor,
    input_mixes: Tensor,
    post_layer_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mixes_grad: Tensor,
    mhc_scale_grad: Tensor,
    mhc_base_grad: Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Write the gradients of `mhc_pre_split_mixes`; `post_layer_mix` is accepted and recomputed, so the multiplier may be 0."""
    n = pre_layer_mix_grad.shape[1]
    cotangents = (_column(pre_layer_mix_grad), _column(post_layer_mix_grad), _square(comb_res_mix_grad, n))
    given = {"d_input_mixes": input_mixes_grad, "d_mhc_scale": mhc_scale_grad, "d_mhc_base": mhc_base_grad}
    attrs = {"mhc_mult": n, "mhc_post_mult_value": mhc_post_mult_value}
    op = split_mixes.mhc_pre_split_mixes
    known = dict(zip(("d_pre_layer_mix", "d_post_layer_mix", "d_comb_res_mix"), cotangents, strict=True))
    known |= {"input_mixes": input_mixes, "mhc_scale": mhc_scale, "mhc_base": mhc_base}
    _backward(op, tuple(known[name] for name in op.backward.ins), given, **attrs)


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    """Write the mix of the streams of `x` (T, n, H) to `o` (T, H); see `mhc_pre_apply_mix`."""
    _forward(apply_mix.mhc_pre_apply_mix, (x, _column(mix)), {"out": o})


def mhc_pre_apply_mix_bwd(o_grad: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor) -> Tensor:
    """Add the gradient of `x` to `x_grad` (T, n, H) and return that of `mix`, shaped like it."""
    _, mix_grad = _backward(apply_mix.mhc_pre_apply_mix, (o_grad, x, _column(mix)), {}, (x_grad,))
    return mix_grad.view(mix.shape)


def mhc_post_fwd(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None) -> Tensor:
    """The next residual, written to `out` if it is given; see `mhc_post`. No gradient."""
    n = residual.shape[-2]
    tensors = (
        (x, residual, _column(post_layer_mix), _square(comb_res_mix, n))
        if residual.ndim == 3
        else (x, residual, post_layer_mix, comb_res_mix)
    )
    return _forward(post.mhc_post, tensors, {} if out is None else {"out": out})[0]


def mhc_post_bwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor, fuse_grad_acc: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (d_x, d_residual, d_post_layer_mix, d_comb_res_mix) of `mhc_post`, shaped like the arguments.

    With `fuse_grad_acc` the gradient of the residual is also left at `residual.untyped_storage().grad_from_mhc_post`, where
    the backward passes of `mhc_pre_apply_mix` and `mhc_pre_norm_fn` find it and add to it.
    """
    n = residual.shape[-2]
    flat = residual.ndim == 3
    mixes = (_column(post_layer_mix), _square(comb_res_mix, n)) if flat else (post_layer_mix, comb_res_mix)
    known = {"d_out": d_o, "x": x, "residual": residual, "post_layer_mix": mixes[0], "comb_res_mix": mixes[1]}
    outs = _backward(post.mhc_post, tuple(known[name] for name in post.mhc_post.backward.ins), {})
    named = dict(zip(post.mhc_post.backward.outs, outs, strict=True))
    if fuse_grad_acc:
        residual.untyped_storage().grad_from_mhc_post = named["d_residual"]
    return (
        named["d_x"],
        named["d_residual"],
        named["d_post_layer_mix"].view(post_layer_mix.shape),
        named["d_comb_res_mix"].view(comb_res_mix.shape),
    )


def mhc_head_compute_mix_fwd(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, output_mix: Tensor, mhc_pre_eps: float, token_block_size: int = 0
) -> None:
    """Write the head's mix of `input_mix` (T, n) to `output_mix`; see `mhc_head_compute_mix`. `token_block_size` is ignored."""
    _forward(head_mix.mhc_head_compute_mix, (input_mix, mhc_scale.reshape(1), mhc_base), {"out": output_mix}, mhc_pre_eps=mhc_pre_eps)


def mhc_head_compute_mix_bwd(
    output_mix_grad: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor,
    mhc_scale_grad_partial: Tensor,
    mhc_base_grad_partial: Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """Write the gradients of `mhc_head_compute_mix`; the parameter gradients are the sums of the rows of their partials.

    The first row of (num_sms, 1) and (num_sms, n) holds the whole sum, whose order does not depend on `num_sms`; the others
    are written as zeros. `token_block_size` is ignored.
    """
    op = head_mix.mhc_head_compute_mix
    known = {"d_out": output_mix_grad, "input_mix": input_mix, "mhc_scale": mhc_scale.reshape(1), "mhc_base": mhc_base}
    outs = _backward(op, tuple(known[name] for name in op.backward.ins), {"d_input_mix": input_mix_grad})
    named = dict(zip(op.backward.outs, outs, strict=True))
    for partial, name in ((mhc_scale_grad_partial, "d_mhc_scale"), (mhc_base_grad_partial, "d_mhc_base")):
        partial.zero_()
        partial[0].copy_(named[name])


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out_fn: Tensor) -> None:
    """Write fn * normw, row by row, to `out_fn` (J, K): the projection as `mhc_prenorm_gemm_fwd` takes it. All fp32."""
    _forward(norm_fn.mhc_fn_normw_merge_fwd, (fn, normw), {"out_fn": out_fn})


def mhc_fn_normw_merge_bwd(fn: Tensor, normw: Tensor, out_fn_grad: Tensor, fn_grad: Tensor, normw_grad: Tensor) -> None:
    """Add the gradients of `mhc_fn_normw_merge_fwd` to `fn_grad` (J, K) and `normw_grad` (K,)."""
    _accumulate(norm_fn.mhc_fn_normw_merge_bwd, (fn, normw, out_fn_grad), {}, (fn_grad, normw_grad))


def mhc_prenorm_gemm_fwd(x: Tensor, fn: Tensor, out_mul_splitted: Tensor, sqrsum_splitted: Tensor, *, precision: str = "bf16x2") -> None:
    """Write the products of `x` (T, K) bf16 with `fn` (J, K) fp32, and the sums of squares, in slices of the columns.

    `out_mul_splitted` is (S, T, 1, J) and `sqrsum_splitted` (S, T, 1), fp32; their first axis says how many slices there are,
    and K must be a multiple of 128 * S.
    """
    given = {"out_mul_splitted": out_mul_splitted, "sqrsum_splitted": sqrsum_splitted}
    _forward(norm_fn.mhc_prenorm_gemm_fwd, (x, fn), given, n_splits=out_mul_splitted.shape[0], precision=precision)


def mhc_prenorm_gemm_bwd(
    out_mul_grad: Tensor, sqrsum_grad: Tensor, x: Tensor, fn: Tensor, x_grad: Tensor, fn_grad: Tensor, *, precision: str = "bf16x2"
) -> None:
    """Add the gradient of `x` to `x_grad` (T, K) bf16 and write that of `fn` to `fn_grad` (J, K) fp32.

    `out_mul_grad` (T, 1, J) and `sqrsum_grad` (T, 1) are the gradients of the sums over the slices of `mhc_prenorm_gemm_fwd`.
    """
    tensors = (out_mul_grad, sqrsum_grad, x, fn)
    _accumulate(norm_fn.mhc_prenorm_gemm_bwd, tensors, {"fn_grad": fn_grad}, (x_grad,), precision=precision)


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Write the sums of the slices, `out_mul` (T, G, J) and `sqrsum` (T, G), and the normalized sum over groups, `out` (T, J).

    Slices are (S, T, G, J) and (S, T, G), added in ascending order; the first `n_splits` of them count.
    """
    tensors = (out_mul_splitted[:n_splits], sqrsum_splitted[:n_splits])
    given = {"out_mul": out_mul, "sqrsum": sqrsum, "out": out}
    _forward(norm_fn.mhc_reduce_partials_and_rmsnorm_fwd, tensors, given, rms_group_size=rms_group_size, rms_eps=rms_eps)


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor, out_mul: Tensor, sqrsum: Tensor, out_mul_grad: Tensor, sqrsum_grad: Tensor, rms_group_size: int, rms_eps: float
) -> None:
    """Write the gradients (T, G, J) and (T, G) of the sums that `mhc_reduce_partials_and_rmsnorm_fwd` normalizes."""
    given = {"out_mul_grad": out_mul_grad, "sqrsum_grad": sqrsum_grad}
    tensors = (out_grad, out_mul, sqrsum)
    _forward(norm_fn.mhc_reduce_partials_and_rmsnorm_bwd, tensors, given, rms_group_size=rms_group_size, rms_eps=rms_eps)
