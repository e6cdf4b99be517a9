"""Train the same small language model with mHC in PyTorch and in JAX, on the same kernels, and compare the curves.

make demo                                   (CPU, or CUDA where there is one)
python examples/train_mhc.py --steps 60 --moe --out out/demo
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import corpus
import numpy as np
from model import Config, Step, initial_weights
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tk_core

# Both frameworks run the same mHC kernels, equal to the bit. Matrix products, softmax and cross-entropy are the frameworks'
# own and differ in the last bits of fp32; bf16 rounding of the residual and training carry that on. A loss of about 2
# nats then differs by some 1e-3; a wrong gradient shows up as a difference of tenths.
TOLERANCE = 0.03
# An expert is chosen or not: a row whose best scores are nearly equal takes another expert in the other framework, and the bias
# moves by whole steps. Single batches then differ by up to 0.034 nats (three seeds, 300 steps) with averages as close as without
# experts; a layer whose router got no gradient differed by 0.094.
MOE_TOLERANCE = 0.06
# The largest load of an expert over the mean one, of a layer, averaged over the last tenth of all steps: 1.25 was measured, 3.6 in the
# first step. A batch that is not spread evenly has more than 1 by chance.
MOST_IMBALANCE = 1.5


def run(name: str, steps: int, steps_of_run: Iterator[Step]) -> dict:
    """Consume a training run under a progress bar."""
    curve, seconds, loads = [], [], []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    tk_core.reset_stats()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{name:8}", total=steps, loss="-")
        for step in steps_of_run:
            curve.append(step.loss)
            seconds.append(step.seconds)
            if step.load is not None:
                loads.append(step.load.tolist())
            progress.update(task, advance=1, loss=f"{step.loss:.4f}")
    return {"loss": curve, "seconds": seconds, "stats": tk_core.stats()} | ({"load": loads} if loads else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--fp8", action="store_true", help="train also with activations rounded to FP8, and show the loss beside bf16")
    parser.add_argument(
        "--moe", action="store_true", help="train also with experts as feed-forward parts, and show the loss and their load"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()

    import torch

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        # launches inside a replayed command buffer pass the dispatcher by: without them, every launch is counted
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    torch.backends.cuda.matmul.allow_tf32 = False

    import jax
    import jax_side
    import torch_side

    jax.config.update("jax_default_matmul_precision", "highest")
    config = Config(layers=args.layers, hidden=args.hidden)
    text = corpus.load()
    data = corpus.batches(text, args.steps, args.batch, config.length, args.seed)
    entropy = corpus.unigram_entropy(text)
    weights = initial_weights(config, args.seed)
    count = sum(w.size for w in weights.values())
    progress = np.arange(1, args.steps + 1)
    rates = args.rate * np.minimum(1, progress / 20) * (0.55 + 0.45 * np.cos(np.pi * progress / args.steps))
    shape = f"{config.layers} layers of {config.hidden}, n = {config.streams}, Sinkhorn {config.sinkhorn}"
    print(f"{count:,} parameters, {shape}; {len(text):,} bytes of text")
    print(f"{args.steps} steps of {args.batch} x {config.length} bytes on {device}; torch {torch.__version__}, jax {jax.__version__}")

    runs = {
        "torch": run("PyTorch", args.steps, torch_side.train(config, weights, data, rates, device)),
        "jax": run("JAX", args.steps, jax_side.train(config, weights, data, rates)),
    }
    status = report(args, config, device, entropy, runs)
    if args.fp8:
        rounded = replace(config, fp8=True)
        runs |= {
            "torch, fp8": run("PyTorch, FP8", args.steps, torch_side.train(rounded, weights, data, rates, device)),
            "jax, fp8": run("JAX, FP8", args.steps, jax_side.train(rounded, weights, data, rates)),
        }
        status = max(status, report_fp8(args, runs))
    if args.moe:
        config = replace(config, moe=True)
        weights = initial_weights(config, args.seed)
        count = sum(w.size for w in weights.values())
        print(f"{count:,} parameters with {config.experts} experts a layer, {config.topk} of them for a byte")
        runs |= {
            "torch, moe": run("PyTorch, MoE", args.steps, torch_side.train(config, weights, data, rates, device)),
            "jax, moe": run("JAX, MoE", args.steps, jax_side.train(config, weights, data, rates)),
        }
        status = max(status, report_moe(args, entropy, runs))
    return status


def compare(args: argparse.Namespace, runs: dict, variant: str, title: str) -> tuple[dict, float]:
    """Print the curves of a variant beside the plain ones; the final losses, and the largest difference of both frameworks."""
    table = Table("step", "PyTorch", f"PyTorch, {title}", "JAX", f"JAX, {title}")
    names = ("torch", f"torch, {variant}", "jax", f"jax, {variant}")
    last = max(args.steps // 10, 1)
    for step in range(last - 1, args.steps, last):
        table.add_row(str(step + 1), *(f"{runs[name]['loss'][step]:.5f}" for name in names))
    Console().print(table)
    final = {name: float(np.mean(runs[name]["loss"][-last:])) for name in names}
    for name in names:
        print(f"{name:12} final loss {final[name]:.4f} nats a byte (mean of the last {last} steps)")
    difference = np.abs(np.array(runs[f"torch, {variant}"]["loss"]) - np.array(runs[f"jax, {variant}"]["loss"])).max()
    return final, float(difference)


def report_fp8(args: argparse.Namespace, runs: dict) -> int:
    """Print the curves with and without rounding; whether both frameworks stay together, and close to the unrounded loss."""
    final, difference = compare(args, runs, "fp8", "FP8")
    print(f"largest difference of the FP8 curves {difference:.2e} (tolerance {TOLERANCE})")
    (args.out / "demo_fp8.json").write_text(
        json.dumps({"final_loss": final, "runs": {name: runs[name]["loss"] for name in final}}, indent=1)
    )
    if difference > TOLERANCE:
        print("FAILED: the FP8 curves do not stay together", file=sys.stderr)
        return 1
    return 0


def report_moe(args: argparse.Namespace, entropy: float, runs: dict) -> int:
    """Print the curves with and without experts and the experts' load; whether the frameworks stay together, learn and are balanced."""
    final, difference = compare(args, runs, "moe", "MoE")
    print(f"largest difference of the MoE curves {difference:.2e} (tolerance {MOE_TOLERANCE})")
    last = max(args.steps // 10, 1)
    loads = {title: np.array(runs[name]["load"]) for title, name in (("PyTorch", "torch, moe"), ("JAX", "jax, moe"))}
    imbalance = {title: load.max(2) / load.mean(2) for title, load in loads.items()}
    share = {title: load[-last:].sum(0) / load[-last:].sum((0, 2))[:, None] for title, load in loads.items()}
    _, layers, experts = loads["PyTorch"].shape
    table = Table("layer", "expert", *loads, title=f"load of the last {last} steps")
    for layer in range(layers):
        for expert in range(experts):
            shares = (share[title][layer, expert] for title in loads)
            table.add_row(str(layer), str(expert), *(f"{'█' * min(round(80 * value), 20):20} {value:6.1%}" for value in shares))
        table.add_section()
    Console().print(table)
    table = Table("largest load over the mean", "layer", "first step", f"last {last} steps")
    for title, values in imbalance.items():
        for layer in range(layers):
            table.add_row(title, str(layer), f"{values[0, layer]:.2f}", f"{values[-last:, layer].mean():.2f}")
    Console().print(table)
    worst = max(float(values[-last:].mean(0).max()) for values in imbalance.values())
    numbers = {
        "final_loss": final,
        "largest_difference": difference,
        "tolerance": MOE_TOLERANCE,
        "imbalance": {title: values.tolist() for title, values in imbalance.items()},
        "share": {title: values.tolist() for title, values in share.items()},
        "runs": {name: runs[name]["loss"] for name in final},
    }
    (args.out / "demo_moe.json").write_text(json.dumps(numbers, indent=1))
    print(f"wrote {args.out / 'demo_moe.json'}")
    failures = {
        "the MoE curves do not stay together": difference > MOE_TOLERANCE,
        "the losses with experts are not clearly below the unigram entropy": max(final.values()) >= entropy - 0.3,
        f"the experts are not balanced: {worst:.2f} times the mean load, at most {MOST_IMBALANCE}": worst > MOST_IMBALANCE,
    }
    for text, failed in failures.items():
        if failed:
            print(f"FAILED: {text}", file=sys.stderr)
    return int(any(failures.values()))


def report(args: argparse.Namespace, config: Config, device: str, entropy: float, runs: dict) -> int:
    """Print both curves, write JSON and PNG; the exit status says whether the promises hold."""
    torch_loss, jax_loss = (np.array(runs[name]["loss"]) for name in ("torch", "jax"))
    difference = np.abs(torch_loss - jax_loss)
    table = Table("step", "PyTorch", "JAX", "difference")
    for step in sorted({0, *range(args.steps // 10 - 1, args.steps, max(args.steps // 10, 1)), args.steps - 1}):
        if step >= 0:
            table.add_row(str(step + 1), f"{torch_loss[step]:.5f}", f"{jax_loss[step]:.5f}", f"{difference[step]:.1e}")
    console = Console()
    console.print(table)
    tokens = args.batch * config.length
    last = max(args.steps // 10, 1)
    final = {name: float(np.mean(runs[name]["loss"][-last:])) for name in runs}
    for name in runs:
        rate = tokens / np.median(runs[name]["seconds"])
        runs[name]["tokens_per_second"] = float(rate)
        print(f"{name:6} final loss {final[name]:.4f} nats a byte (mean of the last {last} steps), {rate:,.0f} tokens/s")
    print(f"largest difference of the curves {difference.max():.2e} (tolerance {TOLERANCE}); unigram entropy of the text {entropy:.4f}")
    launches = Table("kernel", "PyTorch", "JAX")
    names = sorted({k for r in runs.values() for k in r["stats"]["launches"]})
    for kernel in names:
        launches.add_row(kernel, *(str(runs[name]["stats"]["launches"].get(kernel, 0)) for name in ("torch", "jax")))
    console.print(launches)
    args.out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "device": device,
        "versions": {name: metadata.version(name) for name in ("torch", "jax", "tilelang")},
        "config": vars(config) | {"steps": args.steps, "batch": args.batch, "seed": args.seed},
        "unigram_entropy": entropy,
        "largest_difference": float(difference.max()),
        "tolerance": TOLERANCE,
        "final_loss": final,
        "runs": runs,
    }
    (args.out / "demo.json").write_text(json.dumps(numbers, indent=1))
    plot(args.out / "demo.png", torch_loss, jax_loss, difference, entropy)
    print(f"wrote {args.out / 'demo.json'} and {args.out / 'demo.png'}")
    together = difference.max() <= TOLERANCE
    learned = max(final.values()) < entropy - 0.3
    if not together:
        print("FAILED: the curves do not stay together", file=sys.stderr)
    if not learned:
        print("FAILED: the losses are not clearly below the unigram entropy", file=sys.stderr)
    return 0 if together and learned else 1


def plot(path: Path, torch_loss: np.ndarray, jax_loss: np.ndarray, difference: np.ndarray, entropy: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    steps = np.arange(1, len(torch_loss) + 1)
    top.plot(steps, torch_loss, label="PyTorch", linewidth=2.5, alpha=0.6)
    top.plot(steps, jax_loss, label="JAX", linewidth=1)
    top.axhline(entropy, color="gray", linestyle=":", label="unigram entropy")
    top.set_ylabel("loss, nats a byte")
    top.legend()
    bottom.semilogy(steps, np.maximum(difference, 1e-8))
    bottom.axhline(TOLERANCE, color="gray", linestyle=":")
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
