"""Tables of the convergence grid at its main setting, from what benchmarks.convergence wrote.

The functions in BLOCKS are blocks of benchmarks.tables; what was varied and searched is in
benchmarks/convergence_search.py. A setting is everything but the seed; its loss is the mean over
its seeds, with the lowest and the highest behind it. Comparisons with another method are made seed
by seed, over the seeds that both have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.domains import DOMAINS
from benchmarks.methods import METHODS, MODELS
from benchmarks.simulation import all_reduce_bytes

RESULTS = Path(__file__).parents[1] / "docs/results/convergence_cpu_2026-11-30.jsonl"
H, STEPS, SITES = 15, 900, 2  # the main setting: 60 rounds of 15 steps, unless a method has its H

Run = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed only."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def losses(self) -> dict[int, float]:
        """Bits per byte at the end, by seed."""
        return {run["seed"]: run["val_bpb_end"] for run in self.runs}

    def mean(self, name: str) -> float:
        return fmean(run[name] for run in self.runs)

    def fewer_than_ddp(self, *directions: str) -> float:
        """Bytes of a site under DDP over those here, in these directions: "up", "down".

        DDP averages gradients in fp32 over a ring in every step: as much up as down.
        """
        run = self.first
        ring = run["inner_steps"] * all_reduce_bytes(run["dense_bytes"], run["sites"])
        moved = [fmean(run["traces"][f"bytes_{way}"]) for way in directions for run in self.runs]
        return ring / fmean(moved)

    def loss(self) -> str:
        values = list(self.losses.values())
        if len(values) == 1:
            return f"{values[0]:.3f}"
        return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def against(self, other: Setting | None) -> str:
        """How many percent more loss than `other`, over common seeds."""
        common = self.losses.keys() & (other.losses if other else {}).keys()
        if other is None or not common or other is self:
            return ""
        ratios = [self.losses[seed] / other.losses[seed] - 1 for seed in common]
        return f"{100 * fmean(ratios):+.1f} %"


def load(path: Path = RESULTS) -> list[Run]:
    """All runs, in the order in which they were made; not to be changed."""
    return _load(path, path.stat().st_mtime_ns)


@cache
def _load(path: Path, _modified: int) -> list[Run]:
    """A file of half a megabyte that every block of a page asks for."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SAME = ("method", "model", "data", "sites", "rounds", "inner_steps", "lr", "k", "changes")


def identity(run: Run) -> str:
    """Two runs that have it in common are repetitions of one another."""
    return json.dumps([run[name] for name in (*SAME, "seed")])


def settings(runs: Iterable[Run]) -> list[Setting]:
    """Runs gathered by everything but their seed, in the order of the first of each."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps([run[name] for name in SAME]), []).append(run)
    return [Setting(tuple(sorted(group, key=lambda run: run["seed"]))) for group in found.values()]


def is_main(run: Run) -> bool:
    """The setting in which methods are compared, nothing varied."""
    shape = (run["inner_steps"] * run["rounds"], run["sites"], run["data"])
    return not run["changes"] and shape == (STEPS, SITES, "eras")


def main_settings(model: str) -> list[Setting]:
    """One for each method that was run in the main setting, in the order of METHODS.

    Of several rates that with most seeds, of these the best with the first one of them.
    """
    found: dict[str, Setting] = {}
    for setting in sorted(settings(filter(is_rate, load())), key=most_seeds_then_loss):
        if setting.first["model"] == model:
            found.setdefault(setting.first["method"], setting)
    return [found[name] for name in METHODS if name in found]


def is_rate(run: Run) -> bool:
    """The main setting, with whatever learning rate."""
    return set(run["changes"]) <= {"inner.lr"} and is_main(run | {"changes": {}})


def most_seeds_then_loss(setting: Setting) -> tuple[int, float]:
    return -len(setting.runs), setting.first["val_bpb_end"]


def main_table(model: str) -> list[str]:
    """Every method at the main setting: loss, spread, bytes."""
    rows = main_settings(model)
    by_name = {setting.first["method"]: setting for setting in rows}
    ddp, (dense, diloco) = by_name.get("ddp"), dense_diloco(by_name)
    lines = [
        "| method | H | k | lr | seeds | bits per byte (lowest to highest) | against DDP "
        f"| against {dense} | up a site and step | down | fewer up than DDP "
        "| dense fp32 / up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in rows:
        run = setting.first
        lines.append(
            f"| {METHODS[run['method']].title} | {interval(run)} | {density(run)} | {run['lr']:g} "
            f"| {len(setting.runs)} "
            f"| {setting.loss()} | {setting.against(ddp)} | {setting.against(diloco)} "
            f"| {kilobytes(run, 'bytes_up')} | {kilobytes(run, 'bytes_down')} "
            f"| {times(setting.fewer_than_ddp('up'))} "
            f"| {times(setting.mean('times_smaller_up'))} |"
        )
    return lines


def interval(run: Run) -> int:
    """Inner steps between two exchanges."""
    every_step = METHODS[run["method"]].runner == "data_parallel"
    return 1 if every_step else int(run["inner_steps"])


def density(run: Run) -> str:
    """Values sent of 4096."""
    dense = METHODS[run["method"]].changes.get("codec.bits") == 32
    return "all" if dense else str(run["k"])


def kilobytes(run: Run, trace: str) -> str:
    """Of an inner step."""
    return f"{fmean(run['traces'][trace]) / run['inner_steps'] / 1e3:,.2f} kB"


def times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def dense_diloco(by_name: dict[str, Setting]) -> tuple[str, Setting | None]:
    """What methods are compared with: the one whose momentum was searched, where it was run."""
    tuned = by_name.get("diloco-tuned")
    return ("dense DiLoCo, tuned", tuned) if tuned else ("dense DiLoCo", by_name.get("diloco"))


VERDICT = ("ddp", "localsgd", "diloco-tuned", "kept-5")


def readme_table() -> list[str]:
    """The main table of the model with most seeds, large ones first; how near all models come."""

    def num_seeds(model: str) -> int:
        by_name = {setting.first["method"]: setting for setting in main_settings(model)}
        return min(len(by_name[name].runs) if name in by_name else 0 for name in VERDICT)

    model = max(reversed(MODELS), key=num_seeds)
    judged = [line for name in MODELS if num_seeds(name) for line in (verdict(name), "")]
    return [f"{described(model)}:", "", *main_table(model), "", *judged, domains_verdict()]


def verdict(model: str) -> str:
    """How far the recipe is from the goals: no worse than DiLoCo, 1 % of DDP, 200 times less."""
    by_name = {setting.first["method"]: setting for setting in main_settings(model)}
    sparse = by_name["kept-5"]
    dense, diloco = dense_diloco(by_name)
    distances = ", ".join(
        distance(sparse, other, said)
        for other, said in (
            (diloco, dense), (by_name["localsgd"], "dense averaging"), (by_name["ddp"], "DDP"),
        )
        if other
    )  # fmt: skip
    return (
        f"{sparse.first['params']:,} parameters, replicas that keep what is unsent, k = 512, an "
        f"exchange every {sparse.first['inner_steps']} steps: loss against that of {distances}, "
        f"with {sparse.fewer_than_ddp('up'):.0f} times fewer bytes up than DDP "
        f"({sparse.fewer_than_ddp('up', 'down'):.0f} times up and down together), "
        f"{sparse.mean('times_smaller_up'):.0f} times fewer than dense fp32 as often."
        f"{muon_verdict(by_name)}"
    )


def muon_verdict(by_name: dict[str, Setting]) -> str:
    """The same with Muon inside the sites, where it was run."""
    sparse = by_name.get("kept-5-muon")
    if not sparse:
        return ""
    distances = [
        distance(sparse, by_name[name], said)
        for name, said in (
            ("ddp", "DDP with AdamW"), ("ddp-muon", "DDP with Muon"),
            ("diloco-muon", "dense DiLoCo with Muon"),
        )
        if name in by_name
    ]  # fmt: skip
    return f" With Muon inside the sites, and as few bytes: {', '.join(distances)}."


def distance(ours: Setting, theirs: Setting, said: str) -> str:
    """In words: against whom, at which H, over how many seeds."""
    every = interval(theirs.first)
    seeds = len(ours.losses.keys() & theirs.losses.keys())
    told = [f"H = {every}"] if every > 1 else []
    told.append(f"{seeds} seeds" if seeds > 1 else "one seed")
    return f"{said} ({', '.join(told)}) {ours.against(theirs)}"


ALIKE = {"eras": "an era a site", "iid": "every site all speeches", "domains": "a domain a site"}


def alike_table() -> list[str]:
    """Sites that differ by era or domain, and sites that do not; small model."""
    found = {data: of_data(data) for data in ALIKE}
    return side_by_side(
        {said: found[data] for data, said in ALIKE.items()}, found["iid"] | found["domains"]
    )


def side_by_side(cases: dict[str, dict[str, Setting]], wanted: Iterable[str]) -> list[str]:
    """Three columns a case, of its settings by method; a row for each method that is wanted."""
    lines = [
        f"| method | {' | '.join(f'{said} | seeds | against DDP' for said in cases)} |",
        "| --- |" + " --- |" * (3 * len(cases)),
    ]
    for name in [name for name in METHODS if name in set(wanted)]:
        cells = []
        for by_name in cases.values():
            setting = by_name.get(name)
            cells += [setting.loss(), str(len(setting.runs))] if setting else ["", ""]
            cells.append(setting.against(by_name.get("ddp")) if setting else "")
        lines.append(f"| {METHODS[name].title} | {' | '.join(cells)} |")
    return lines


def of_data(data: str) -> dict[str, Setting]:
    """By method, the small model at the main setting but for the sites' text."""
    runs = [
        run for run in load()
        if run["data"] == data and run["model"] == "small"
        and is_main(run | {"data": "eras", "sites": SITES})
        and run["sites"] == (len(DOMAINS) if data == "domains" else SITES)
    ]  # fmt: skip
    return {setting.first["method"]: setting for setting in settings(runs)}


def domains_table() -> list[str]:
    """Sites of one domain each: the loss on each domain's held-out text, the mean over seeds."""
    lines = [
        f"| method | seeds | all three | {' | '.join(DOMAINS)} |",
        "| --- |" + " --- |" * (2 + len(DOMAINS)),
    ]
    for setting in of_data("domains").values():
        parts = [fmean(run["val_bpb_parts"][name] for run in setting.runs) for name in DOMAINS]
        told = " | ".join(f"{loss:.3f}" for loss in parts)
        title = METHODS[setting.first["method"]].title
        lines.append(f"| {title} | {len(setting.runs)} | {setting.loss()} | {told} |")
    return lines


def domains_verdict() -> str:
    """How far from DDP methods end where sites differ more than eras do."""
    by_name = of_data("domains")
    distances = [
        f"{METHODS[name].title.removesuffix(', H = 5')}, H = {interval(by_name[name].first)}: "
        f"{by_name[name].against(by_name['ddp'])}"
        for name in ("kept-5", "localsgd", "kept", "diloco")
        if name in by_name
    ]
    return (
        f"{by_name['ddp'].first['params']:,} parameters, three sites with one domain each "
        f"({', '.join(DOMAINS)}), loss against that of DDP: {'; '.join(distances)}."
    )


def all_tables() -> list[str]:
    """The main table of every model that was run."""
    lines: list[str] = []
    for model in filter(main_settings, MODELS):
        lines += ["", f"**{described(model)}**", "", *main_table(model)]
    return lines[1:]


def described(model: str) -> str:
    run = main_settings(model)[0].first
    return (
        f"{run['params']:,} parameters, {SITES} sites (text of 1790 to 1903 and of 1904 to 2026), "
        f"{STEPS} inner steps, {run['tokens_per_site']:,} tokens a site, {run['val_bpb']['0']:.2f} "
        "bits per byte before training"
    )


def real_runs() -> list[str]:
    """What became of runs with real processes, against the simulation of the same config."""
    runs = [run for run in load() if is_main(run)]
    simulated = {(run["model"], run["seed"]): run for run in runs if run["method"] == "recipe"}
    lines = []
    for run in (run for run in runs if run["method"] == "real"):
        twin = simulated[run["model"], run["seed"]]
        same = run["theta_digest"] == twin["theta_digest"]
        lines.append(
            f"{run['params']:,} parameters, seed {run['seed']}, {run['rounds']} rounds: theta of "
            f"the real run has the digest `{run['theta_digest'][:16]}`, that of the simulation "
            f"`{twin['theta_digest'][:16]}`: {'equal in every bit' if same else '**different**'}."
        )
    return lines or ["Not run."]


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "convergence": readme_table,
    "convergence-models": all_tables,
    "convergence-alike": alike_table,
    "convergence-domains": domains_table,
    "convergence-real": real_runs,
}
