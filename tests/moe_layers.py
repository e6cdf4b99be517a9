"""The MoE layers of both frameworks, and the functions they are made of, behind one face: NumPy in, NumPy out."""

import importlib
import itertools

import numpy as np
from frontends import Torch, same_bits
from moe_dense import PARAMETERS, choose

from tk_core.layers import moe_init

GRADIENTS = ("x", *PARAMETERS)
# less than the default: rows of padding are most of a small buffer
ALIGNMENT = 16
SMALL = {"rows": 40, "hidden": 64, "intermediate": 16, "experts": 8, "topk": 2}

# ------------------------------------------------------------------ inputs


def problem(rows=257, hidden=256, intermediate=64, experts=16, topk=4, shared=0, dtype="float32", scoring_func="sqrtsoftplus", lead=None):
    """Parameters, x and a cotangent of y; no row's choice hangs on the last bits of its keys."""
    dtype = np.dtype(dtype)
    for seed in itertools.count():
        rng = np.random.default_rng([seed, rows, hidden, experts])
        values = moe_init(hidden, intermediate, experts, shared, seed)
        # numbers that the experts' dtype holds
        values |= {name: values[name].astype(dtype).astype(np.float32) for name in ("w1", "w2")}
        values["bias"] = (rng.standard_normal(experts) * 0.05).astype(np.float32)
        x, d_y = (rng.standard_normal((*(lead or (rows,)), hidden)).astype(dtype) for _ in range(2))
        idx, gap = choose(values, x, topk, scoring_func)
        if gap > 3e-6:
            return values, x, d_y, idx


# ------------------------------------------------------------------ judges


def close(got, want, names=("y", *GRADIENTS), rtol=1e-4, atol=1e-5):
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol, atol, err_msg=name)


def same_results(front, a, b):
    """Equal to the bit, but on a GPU, where XLA chooses the products of every program anew, in JAX only closely."""
    for name in ("topk_idx", "load"):
        assert same_bits(a[name], b[name]), name
    if front.name == "jax" and front.jax.default_backend() != "cpu":
        close(a, b, ("y", "loss", *GRADIENTS), 1e-5)
    else:
        for name in ("y", "loss", *GRADIENTS):
            assert same_bits(a[name], b[name]), name


# ------------------------------------------------------------------ layers


def exact_products(jax):
    """On a GPU, JAX would otherwise compute fp32 products in TF32; torch does not."""
    return jax.default_matmul_precision("highest")


def run_layer(front, values, x, d_y=None, mask=None, routing=None, **options):
    """y, the fields of MoEAux, and the gradients of x and the parameters for d_y and the loss."""
    return (_torch_layer if isinstance(front, Torch) else _jax_layer)(front, values, x, d_y, mask, routing, options)


def torch_module(front, values, options):
    """A module with these parameters."""
    from tk_torch.nn import MoE

    hidden, experts = values["router"].shape
    options = {"num_shared_experts": values["w1"].shape[0] - experts, "alignment": ALIGNMENT, **options}
    module = MoE(hidden, values["w2"].shape[1], experts, **options, device=front.device)
    module.load_state_dict({name: front.array(value) for name, value in values.items()})
    return module


def _torch_layer(front, values, x, d_y, mask, routing, options):
    module = torch_module(front, values, options)
    x = front.array(x).requires_grad_()
    y, aux = module(x, front.array(mask), front.array(routing))
    found = {"y": y} | aux._asdict()
    if d_y is not None:
        ((y * front.array(d_y)).sum(dtype=front.torch.float32) + aux.loss).backward()
        found |= {"x": x.grad} | {name: getattr(module, name).grad for name in PARAMETERS}
    return {name: front.numpy(value) for name, value in found.items()}


def jax_layer(front, **options):
    """The layer, its loss and its gradients as one function of arrays."""
    from tk_jax.nn import moe

    def run(params, x, d_y, mask, routing):
        def call(params, x):
            y, aux = moe(params, x, mask=mask, routing=routing, **{"alignment": ALIGNMENT, **options})
            return (y, aux.loss), aux

        if d_y is None:
            (y, _), aux = call(params, x)
            return {"y": y} | aux._asdict()
        (y, loss), pull, aux = front.jax.vjp(call, params, x, has_aux=True)
        d_params, d_x = pull((d_y, front.jax.numpy.ones_like(loss)))
        return {"y": y, "x": d_x} | d_params | aux._asdict()

    return run


def _jax_layer(front, values, x, d_y, mask, routing, options):
    routing = None if routing is None else routing.astype(np.int32)
    params = {name: front.array(value) for name, value in values.items()}
    with exact_products(front.jax):
        found = front.jax.jit(jax_layer(front, **options))(params, *map(front.array, (x, d_y, mask, routing)))
    found = {name: front.numpy(value) for name, value in found.items()}
    assert not np.any(found.pop("bias", 0))
    return found


# ------------------------------------------------------------------ functions


def routing_functions(front):
    """tk_torch.moe or tk_jax.moe."""
    return importlib.import_module(f"tk_{front.name}.moe")


def route(front, logits, num_topk, limited=None, **options):
    """A gate's result; `limited` are the arguments that only top2_sum_gate has."""
    m = routing_functions(front)
    options = {
        "num_topk": num_topk, "use_shared_as_routed": False, "num_shared_experts": 0, "routed_scaling_factor": 1.0, "ep_rank": 0,
        "scoring_func": "sqrtsoftplus", "num_seqs": 1, **options,
    }  # fmt: skip
    return m.moe_topk_gate(logits, **options) if limited is None else m.top2_sum_gate(logits, **limited, **options)


def expert_sum(front, x, topk_idx, weights, w1, w2, alignment=16):
    """The weighted results of local experts, from tokens and their local indices."""
    m = routing_functions(front)
    nn = importlib.import_module(f"tk_{front.name}.nn")
    maps = m.fused_mapping(topk_idx, num_experts=w1.shape[0], alignment=alignment)
    bounds = maps.expert_end if front.name == "torch" else maps.num_tokens_per_expert
    h = nn.grouped_product(m.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert), w1, bounds)
    half = h.shape[1] // 2
    silu = front.torch.nn.functional.silu if front.name == "torch" else front.jax.nn.silu
    return m.reduce_fused(nn.grouped_product(silu(h[:, :half]) * h[:, half:], w2, bounds), weights, maps.token_topk_to_pos)


def vjp(front, function, arrays, cotangents, constants=()):
    """Results of function(*arrays, *constants), and gradients of the arrays for cotangents of the first results."""
    arrays, cotangents, constants = ([front.array(a) for a in group] for group in (arrays, cotangents, constants))
    if front.name == "torch":
        leaves = [a.requires_grad_() for a in arrays]
        outs = function(*leaves, *constants)
        gradients = front.torch.autograd.grad(outs[: len(cotangents)], leaves, cotangents)
    else:

        def split(*leaves):
            outs = function(*leaves, *constants)
            return outs[: len(cotangents)], outs[len(cotangents) :]

        def run(leaves, cotangents):
            outs, pull, rest = front.jax.vjp(split, *leaves, has_aux=True)
            return (*outs, *rest), pull(cotangents)

        with exact_products(front.jax):
            outs, gradients = front.jax.jit(run)(arrays, tuple(cotangents))
    return [front.numpy(a) for a in outs], [front.numpy(a) for a in gradients]
