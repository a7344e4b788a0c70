"""What an outer exchange costs over a wide-area link: ours against ours, and against torchft's.

    python -m benchmarks.wan --mbit 100 --rtt-ms 50 --params 834e3 --sites 2 --json

Methods run one after another on the same emulated network (benchmarks/tun.py; needs root):
SparseLoCo waiting for its update, SparseLoCo with the exchange behind inner steps, dense DiLoCo of
ours, and torchft's DiLoCo with one bucket and with one call a tensor. loco's sites talk mutual TLS,
torchft has none. For each: the share of time spent in inner steps, seconds a round spent on
anything else, and bytes a round at a site's card; of transfers that are calls by themselves also
bytes, seconds, and the share of the link's rate that they reach: with what the coordinator does
before its answer (goodput_over_link_rate), and while bytes move (line_share).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.tun import Wan
from benchmarks.wan_site import WARM_UP_ROUNDS
from coordinator.events import ShardStored
from coordinator.store import Store
from loco.config import Config

PORT, LIGHTHOUSE_PORT = 29400, 29510
METHODS = ("blocking", "overlapped", "dense", "torchft-bucket", "torchft-tensor")
LIMIT_SECONDS = 300
SITE_NAMES = ("paris", "oslo", "austin", "kyoto", "quito", "accra", "perth", "izmir")


def main() -> None:
    args = parse()
    report = {**vars(args), "methods": {}}
    for method in args.method:
        report["methods"][method] = row = measure(method, args)
        if not args.json:
            print(f"{method:15}", *(f"{k}={v:.4g}" for k, v in row.items()), flush=True)
    if args.json:
        print(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100, help="each site's link, each way")
    parser.add_argument("--rtt-ms", type=float, default=50, help="between any two hosts")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument(
        "--congestion", choices=("bbr", "cubic"), help="TCP's control; default: this machine's"
    )
    parser.add_argument("--params", type=float, default=834e3)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--inner-steps", type=int, default=15, help="H")
    parser.add_argument("--delay-steps", type=int, help="of `overlapped`; default H")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--k", type=int, default=64, help="values a chunk of 4096")
    parser.add_argument(
        "--black-hole-seconds", type=float, default=0.0,
        help="swallow every packet for so long after the warm-up; loco's methods only",
    )  # fmt: skip
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.black_hole_seconds and any(m.startswith("torchft") for m in args.method):
        parser.error("--black-hole-seconds ends torchft's sites: give --method without torchft's")
    return args


def measure(method: str, args: argparse.Namespace) -> dict[str, float]:
    """One method on a fresh network; means over the sites."""
    names = SITE_NAMES[: args.sites]
    wan = Wan(
        1 + args.sites,
        mbit=args.mbit,
        rtt_ms=args.rtt_ms,
        loss=args.loss,
        mtu=args.mtu,
        congestion=args.congestion,
    )
    with tempfile.TemporaryDirectory() as folder, wan:
        config = Path(folder) / "run.toml"
        config.write_text(tomli_w.dumps(config_of(method, args).model_dump(exclude_none=True)))
        hub = start_hub(method, wan, Path(folder), names)
        started = time.monotonic()
        sites = []
        for host, name in enumerate(names, start=1):
            command = site_command(method, args, wan, Path(folder), host, name)
            sites.append(wan.start(host, command))
        deadline = started + LIMIT_SECONDS
        if args.black_hole_seconds:
            await_round(Path(folder), WARM_UP_ROUNDS, deadline)
            wan.black_hole(args.black_hole_seconds)
        try:
            codes = [site.wait(deadline - time.monotonic()) for site in sites]
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{method}: not done after {LIMIT_SECONDS} s; fewer --rounds?"
            ) from None
        hub.kill()
        hub.wait()
        if any(codes):
            raise SystemExit(f"{method}: a site failed, exit codes {codes}")
        rows = [json.loads((Path(folder) / f"{name}.json").read_text()) for name in names]
        if args.black_hole_seconds:
            counted = counted_steps(Path(folder))
            for name, row in zip(names, rows, strict=True):
                row["steps_lost"] = row["steps"] - counted[name]
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    for way in ("upload", "download"):
        if f"{way}_seconds" in mean:
            # The first byte needs half a round trip, the answer or the request the other half.
            seconds = mean[f"{way}_seconds"] - args.rtt_ms / 1e3
            rate = 8 * mean[f"{way}_bytes"] / (args.mbit * 1e6)
            mean[f"{way}_goodput_over_link_rate"] = rate / seconds
        if f"{way}_line_seconds" in mean:
            # What is asked for comes a round trip later; what is sent begins at once.
            late = args.rtt_ms / 1e3 if way == "download" else 0.0
            mean[f"{way}_line_share"] = rate / (mean[f"{way}_line_seconds"] - late)
    return {**mean, "wall_seconds": time.monotonic() - started}


def await_round(folder: Path, round_: int, deadline: float) -> None:
    """Return when so many rounds are committed."""
    while not (folder / "state" / "updates" / str(round_ - 1)).exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"round {round_} is not reached after {LIMIT_SECONDS} s")
        time.sleep(0.1)


def counted_steps(folder: Path) -> dict[str, int]:
    """Inner steps of each site behind its accepted contributions."""
    store = Store.open(folder / "state")
    events = [event for _, event in store.journal.replay(after=0)]
    store.close()
    return {event.site: event.data_cursor for event in events if isinstance(event, ShardStored)}


def config_of(method: str, args: argparse.Namespace) -> Config:
    """A Llama of about `params` parameters, and the method's outer settings."""
    # 4 layers of width d with a feed-forward of 3 d: 48 d^2 + 256 d.
    width = max(32, round(((256**2 + 4 * 48 * args.params) ** 0.5 - 256) / 96 / 32) * 32)
    raw: dict[str, Any] = {
        "run": {"name": "wan", "rounds": args.rounds},
        "model": {
            "dim": width, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 3 * width,
            "seq_len": 32, "tie_embeddings": True,
        },
        "data": {"batch": 1},
        "inner": {"steps": args.inner_steps, "optimizer": "sgd", "max_local_steps": 100_000},
        "codec": {"k": args.k},
        "quorum": {"min_sites": args.sites, "grace_seconds": 60.0, "dead_after_seconds": 120.0},
        "eval": {"every_rounds": 0, "sequences": 1},
    }  # fmt: skip
    if method == "overlapped":
        delay = args.inner_steps if args.delay_steps is None else args.delay_steps
        raw["outer"] = {"delay_steps": delay}
    if method == "dense":
        raw["outer"] = {"aggregation": "nesterov", "alpha": 0.7, "momentum": 0.9, "beta": 0.0}
        raw["codec"] = {"bits": 32}
    return Config.model_validate(raw)


def start_hub(method: str, wan: Wan, folder: Path, names: tuple[str, ...]) -> subprocess.Popen[Any]:
    """The coordinator or torchft's lighthouse, on host 0."""
    if method.startswith("torchft"):
        code = (
            "from torchft.coordination import LighthouseServer; import time; "
            f"l = LighthouseServer(bind='[::]:{LIGHTHOUSE_PORT}', min_replicas={len(names)}); "
            "time.sleep(1e6)"
        )
        hub = wan.start(0, [sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        time.sleep(2.0)
        return hub
    certs = folder / "certs"
    authority = ["init", str(certs), "--host", wan.address(0)]
    sites = [flag for name in names for flag in ("--site", name)]
    subprocess.run(
        [sys.executable, "-m", "loco", "certs", *authority, *sites], check=True, capture_output=True
    )
    command = [
        sys.executable, "-m", "loco", "coordinator", str(folder / "run.toml"),
        "--state", str(folder / "state"), "--listen", f"{wan.address(0)}:{PORT}",
        "--bundle", str(certs / "coordinator.pem"),
    ]  # fmt: skip
    with (folder / "coordinator.log").open("wb") as log:
        return wan.start(0, command, stdout=log, stderr=log)


def site_command(
    method: str, args: argparse.Namespace, wan: Wan, folder: Path, host: int, name: str
) -> list[str]:
    theirs = method.startswith("torchft")
    port = LIGHTHOUSE_PORT if theirs else PORT
    command = [
        sys.executable, "-m", "benchmarks.wan_site", "--system", "torchft" if theirs else "loco",
        "--config", str(folder / "run.toml"), "--coordinator", f"{wan.address(0)}:{port}",
        "--site", name, "--address", wan.address(host), "--sites", str(args.sites),
        "--step-ms", str(args.step_ms), "--out", str(folder / f"{name}.json"),
    ]  # fmt: skip
    if method == "torchft-bucket":
        command += ["--bucket-mb", str(int(8 * args.params / 1e6) + 1)]  # twice the model
    if not theirs:
        command += ["--bundle", str(folder / "certs" / f"{name}.pem")]
    return command


if __name__ == "__main__":
    main()
