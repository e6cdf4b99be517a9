"""An MoE layer as plain loops over rows and slots in fp64, with torch's own gradients: the judge of the layers."""

import numpy as np
import torch
import torch.nn.functional as F

PARAMETERS = ("router", "w1", "w2")


def scores_of(logits, scoring_func):
    if scoring_func == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if scoring_func == "sigmoid" else F.softplus(logits, threshold=80).sqrt()


def choose(values, x, num_topk, scoring_func="sqrtsoftplus"):
    """The experts of every row, best first, and the smallest distance between the keys of one that is in and one that is out."""
    logits = torch.tensor(x.astype(np.float64).reshape(-1, x.shape[-1]) @ values["router"].astype(np.float64))
    keys = (logits if scoring_func == "softmax" else scores_of(logits, scoring_func)) + torch.tensor(values["bias"]).double()
    best, idx = keys.sort(dim=1, descending=True, stable=True)
    gap = (best[:, num_topk - 1] - best[:, num_topk]).min() if num_topk < keys.shape[1] else 1.0
    return idx[:, :num_topk].numpy(), float(gap)


def aux_loss(scores, topk_idx, alpha, num_seqs=1, mask=None):
    """The load-balance loss of the rows that take part."""
    rows, experts = scores.shape
    loss = scores.new_zeros(())
    for b in range(num_seqs):
        members = [t for t in range(b * rows // num_seqs, (b + 1) * rows // num_seqs) if mask is None or mask[t]]
        n = max(len(members), 1)
        share = scores.new_zeros(experts)
        count = np.zeros(experts)
        for t in members:
            share = share + scores[t] / scores[t].sum()
            np.add.at(count, topk_idx[t][topk_idx[t] >= 0], 1)
        loss = loss + (torch.tensor(count) * experts / (topk_idx.shape[1] * n) * share / n).sum()
    return loss * alpha / num_seqs


def dense(
    values, x, topk_idx, d_y=None, *, scoring_func="sqrtsoftplus", routed_scaling_factor=1.0, alpha=0.0, mask=None, dropped=()
):  # fmt: skip
    """y, loss, and the gradients of x and the parameters for d_y and the loss.

    Experts beyond the router's are shared: every row has them. Slots (t, k) in `dropped` have a weight that goes nowhere.
    """
    p = {name: torch.tensor(np.asarray(values[name], np.float64), requires_grad=True) for name in PARAMETERS}
    rows = torch.tensor(np.asarray(x, np.float64).reshape(-1, x.shape[-1]), requires_grad=True)
    num_seqs = x.shape[0] if x.ndim == 3 else 1
    mask = None if mask is None else mask.reshape(-1)
    scores = scores_of(rows @ p["router"], scoring_func)
    experts, intermediate = p["router"].shape[1], p["w2"].shape[1]

    def expert(e, row):
        h = row @ p["w1"][e]
        return (F.silu(h[:intermediate]) * h[intermediate:]) @ p["w2"][e]

    y = []
    for t, row in enumerate(rows):
        out = torch.zeros_like(row)
        if mask is None or mask[t]:
            slots = [(k, e) for k, e in enumerate(topk_idx[t].tolist()) if e >= 0]
            total = sum(scores[t, e] for _, e in slots) + 1e-20
            for k, e in slots:
                if (t, k) not in dropped:
                    out = out + scores[t, e] / total * routed_scaling_factor * expert(e, row)
            for e in range(experts, p["w1"].shape[0]):
                out = out + expert(e, row)
        y.append(out)
    y = torch.stack(y) if y else torch.zeros_like(rows)
    loss = aux_loss(scores, topk_idx, alpha, num_seqs, mask)
    found = {"y": y.detach().numpy().reshape(x.shape), "loss": float(loss.detach())}
    if d_y is not None:
        total = (y * torch.tensor(np.asarray(d_y, np.float64)).reshape(y.shape)).sum() + loss
        found |= {name: g.numpy() for name, g in zip(("x", *PARAMETERS), torch.autograd.grad(total, (rows, *p.values())), strict=True)}
        found["x"] = found["x"].reshape(x.shape)
    return found
