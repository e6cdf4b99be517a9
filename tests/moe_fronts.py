"""The routing functions of both front ends on NumPy arrays: results as NumPy arrays, gates in one calling form, gradients."""

import functools

import numpy as np
from quant_fronts import QuantJax, QuantTorch

from tk_core.ops.moe.calls import GateOutput

# attributes of both gates where a test does not say otherwise
GATE = {"use_shared_as_routed": False, "num_shared_experts": 0, "routed_scaling_factor": 1.5, "ep_rank": 0, "scoring_func": "sqrtsoftplus"}
TOP2 = {**GATE, "num_topk_groups": 0, "num_groups": 0, "num_ep_ranks": 1, "tp_rank": 0, "num_tp_ranks": 1}


def mapped(function, value, kind):
    """The value with the function of everything of a kind in it; tuples stay what they are."""
    if isinstance(value, tuple):
        parts = [mapped(function, part, kind) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {name: mapped(function, part, kind) for name, part in value.items()}
    return function(value) if isinstance(value, kind) else value


def defaults(name, attrs):
    return {**(TOP2 if name == "top2_sum_gate" else GATE), **attrs}


class MoeTorch(QuantTorch):
    """tk_torch.moe."""

    index = np.dtype(np.int64)

    @functools.cached_property
    def m(self):
        from tk_torch import moe

        return moe

    def put(self, value):
        return mapped(self.array, value, np.ndarray)

    def take(self, value):
        return mapped(self.numpy, value, self.torch.Tensor)

    def moe(self, name, *args, **named):
        """A public function."""
        return self.take(getattr(self.m, name)(*self.put(args), **self.put(named)))

    def gate(self, name, logits, **named):
        """GateOutput of a gate that is called as in JAX."""
        return self.take(self.gate_on(name, self.put(logits), **self.put(named)))

    def gate_on(self, name, logits, fixed_topk_idx=None, scores=None, **attrs):
        """The same on tensors."""
        attrs = defaults(name, attrs)
        slots = (logits.shape[0], attrs["num_topk"])
        if fixed_topk_idx is None:
            unmapped = self.torch.full(slots, -7, device=logits.device)
        else:
            unmapped = fixed_topk_idx.to(self.torch.int64).clone()
        got = getattr(self.m, name)(logits, **attrs, unmapped_topk_idx=unmapped, scores=scores)
        if attrs.get("num_seqs") is None:
            return GateOutput(*got, unmapped, None)
        assert got.unmapped_topk_idx is unmapped
        return got

    def scores(self, name, logits, **named):
        """GateOutput and scores."""
        scores = self.torch.full(logits.shape, float("nan"), device=self.device)
        return self.take(self.gate_on(name, self.put(logits), scores=scores, **self.put(named))), self.numpy(scores)

    def pull(self, call, leaves, cotangents):
        """Gradients of call(*leaves) for cotangents of its results, None where there is none."""
        tensors = [self.array(leaf).requires_grad_() for leaf in leaves]
        outs = call(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        chosen = [(out, self.array(g)) for out, g in zip(outs, cotangents, strict=True) if g is not None]
        grads = self.torch.autograd.grad([out for out, _ in chosen], tensors, [g for _, g in chosen], allow_unused=True)
        return [self.numpy(g) for g in grads]


class MoeJax(QuantJax):
    """tk_jax.moe under jit."""

    index = np.dtype(np.int32)

    @functools.cached_property
    def m(self):
        from tk_jax import moe

        return moe

    def put(self, value):
        return mapped(self.array, value, np.ndarray)

    def take(self, value):
        return mapped(self.numpy, value, self.jax.Array)

    def moe(self, name, *args, **named):
        """A public function."""
        return self._jitted(getattr(self.m, name), args, named)

    def gate(self, name, logits, **named):
        """GateOutput of a gate."""
        return self._jitted(functools.partial(self.gate_on, name), (logits,), named)

    def gate_on(self, name, logits, **attrs):
        """The same on arrays."""
        return getattr(self.m, name)(logits, **defaults(name, attrs))

    def _jitted(self, function, args, named):
        leaves, tree = self.jax.tree.flatten((args, named), is_leaf=lambda leaf: leaf is None)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]

        def run(*arrays):
            filled = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            args, named = self.jax.tree.unflatten(tree, filled)
            return function(*args, **named)

        return self.take(self.jax.jit(run)(*(self.array(leaves[i]) for i in places)))

    def pull(self, call, leaves, cotangents):
        """Gradients of call(*leaves) for cotangents of its results, None where there is none."""

        def chosen(*leaves):
            outs = call(*leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            return [out for out, g in zip(outs, cotangents, strict=True) if g is not None]

        def run(leaves, given):
            return self.jax.vjp(chosen, *leaves)[1](given)

        given = [self.array(g) for g in cotangents if g is not None]
        return [self.numpy(g) for g in self.jax.jit(run)([self.array(leaf) for leaf in leaves], given)]


FRONTS = {"torch": MoeTorch, "jax": MoeJax}


def agree(a, b):
    """Two results are the same to the bit, but for the width of indices."""
    assert type(a) is type(b)
    if isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            agree(x, y)
    elif isinstance(a, np.ndarray):
        if a.dtype.kind == "i" and a.dtype.itemsize > 1:
            a, b = a.astype(np.int64), b.astype(np.int64)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    else:
        assert a == b
