"""Tables of the convergence grid, from the lines that benchmarks.convergence wrote.

The functions in BLOCKS are blocks of benchmarks.tables. A setting is everything but the seed; its
loss is the mean over its seeds, with the lowest and the highest behind it. Comparisons with another
method are made seed by seed, over the seeds that both have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.domains import DOMAINS
from benchmarks.methods import METHODS, MODELS
from benchmarks.simulation import all_reduce_bytes

RESULTS = Path(__file__).parents[1] / "docs/results/convergence_cpu_2026-11-30.jsonl"
H, STEPS, SITES = 15, 900, 2  # the main setting: 60 rounds of 15 steps, unless a method has its H
LONG_STEPS = 3000  # of runs with as many rounds as the larger presets have

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
    return 1 if run["method"] == "ddp" else int(run["inner_steps"])


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
        f"{sparse.against(other)} from {said}"
        for other, said in (
            (diloco, dense), (by_name["localsgd"], "dense averaging"), (by_name["ddp"], "DDP"),
        )
    )  # fmt: skip
    return (
        f"{sparse.first['params']:,} parameters, replicas that keep what is unsent, k = 512, an "
        f"exchange every {sparse.first['inner_steps']} steps: the loss ends {distances}, "
        f"with {sparse.fewer_than_ddp('up'):.0f} times fewer bytes up than DDP "
        f"({sparse.fewer_than_ddp('up', 'down'):.0f} times up and down together), "
        f"{sparse.mean('times_smaller_up'):.0f} times fewer than dense fp32 as often."
    )


ALIKE = {"eras": "an era a site", "iid": "every site all speeches", "domains": "a domain a site"}


def alike_table() -> list[str]:
    """Sites that differ by era or domain, and sites that do not; small model."""
    lines = [
        "| method | "
        + " | ".join(f"{said} | seeds | against DDP" for said in ALIKE.values())
        + " |",
        "| --- |" + " --- |" * (3 * len(ALIKE)),
    ]
    found = {data: of_data(data) for data in ALIKE}
    for name in METHODS:
        if name not in found["iid"] | found["domains"]:
            continue
        cells = []
        for by_name in found.values():
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
        f"{METHODS[name].title} {by_name[name].against(by_name['ddp'])}"
        for name in ("kept-5", "localsgd", "diloco")
        if name in by_name
    ]
    return (
        f"{by_name['ddp'].first['params']:,} parameters, three sites with one domain each "
        f"({', '.join(DOMAINS)}), against DDP: {'; '.join(distances)}."
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
        f"{STEPS} inner steps, {run['tokens_per_site']:,} tokens a site"
    )


def rate_table(model: str) -> list[str]:
    """The search for learning rates: main setting, seed 0."""
    runs = [
        run for run in load()
        if run["model"] == model and run["seed"] == 0 and is_rate(run)
    ]  # fmt: skip
    rates = sorted({run["lr"] for run in runs})
    found = {(run["method"], run["lr"]): f"{run['val_bpb_end']:.3f}" for run in runs}
    lines = [
        "| method | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "| --- |" + " --- |" * len(rates),
    ]
    for name, method in METHODS.items():
        cells = [found.get((name, rate), "") for rate in rates]
        if sum(map(bool, cells)) > 1:
            lines.append(f"| {method.title} | " + " | ".join(cells) + " |")
    return lines


SEARCHED = {"inner.steps", "inner.lr", "codec.k"}
OUTER_STEP = {"outer.alpha", "outer.momentum"}


def of_any_interval(searched: set[str]) -> list[Setting]:
    """Small model, two eras, the main number of steps, whatever was `searched`; with seed 0."""
    runs = [
        run for run in load()
        if run["model"] == "small" and run["data"] == "eras" and run["sites"] == SITES
        and run["inner_steps"] * run["rounds"] == STEPS and set(run["changes"]) <= searched
        and run["method"] in (
            "ddp", "localsgd", "diloco", "diloco-tuned", "sparseloco", "recipe", "kept", "kept-5",
            "kept-momentum", "kept-end",
        )
    ]  # fmt: skip
    return [setting for setting in settings(runs) if 0 in setting.losses]


def interval_table() -> list[str]:
    """Dense DiLoCo against replicas that keep what is unsent by H and k.

    Each side with the setting that has most seeds, of several the best.
    """
    lines = [
        "| H | dense DiLoCo | k | replicas keep the rest | against it | common seeds "
        "| fewer up than DDP | dense fp32 / up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    dense, kept = {}, {}
    for setting in sorted(of_any_interval(SEARCHED | OUTER_STEP), key=most_seeds_then_loss):
        run = setting.first
        if run["method"].startswith("diloco"):
            dense.setdefault(run["inner_steps"], setting)
        elif run["method"].startswith("kept"):
            kept.setdefault((run["inner_steps"], run["k"]), setting)
    for (steps, k), ours in sorted(kept.items()):
        if theirs := dense.get(steps):
            common = len(ours.losses.keys() & theirs.losses.keys())
            lines.append(
                f"| {steps} | {theirs.loss()}{outer_step(theirs)} "
                f"| {k}{end_of(ours)} | {ours.loss()}{outer_step(ours)} "
                f"| {ours.against(theirs)} "
                f"| {common} | {times(ours.fewer_than_ddp('up'))} "
                f"| {times(ours.mean('times_smaller_up'))} |"
            )
    return lines


def outer_step(setting: Setting) -> str:
    """What of it was varied."""
    changes = setting.first["changes"]
    told = [
        f"{key.partition('.')[2]} {changes[key]:g}" for key in sorted(OUTER_STEP & set(changes))
    ]
    return f", {', '.join(told)}" if told else ""


def end_of(setting: Setting) -> str:
    """The k of a method's last rounds, where it is another."""
    changes = METHODS[setting.first["method"]].changes
    k, rounds = (changes.get(f"codec.{key}") for key in ("k_end", "k_end_rounds"))
    return f", the last {rounds} rounds {k}" if rounds else ""


def first_loss(setting: Setting) -> float:
    """Of seed 0, which every setting that is asked for it has."""
    return setting.losses[0]


def bytes_then_loss(setting: Setting) -> tuple[float, float]:
    """Fewest first; what differs by less than a few percent counts as equal."""
    return -float(f"{setting.fewer_than_ddp('up'):.2g}"), first_loss(setting)


def choices_table() -> list[str]:
    """Settings that no other one beats in both loss and bytes; seed 0."""
    lines = [
        "| fewer bytes up than DDP | dense fp32 / up | method | H | k | lr | bits per byte "
        "| against DDP |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = of_any_interval(SEARCHED)
    ddp = min((s for s in found if s.first["method"] == "ddp"), key=first_loss)
    best = float("inf")
    for setting in sorted(found, key=bytes_then_loss):
        if first_loss(setting) >= best:
            continue
        best, run = first_loss(setting), setting.first
        lines.append(
            f"| {times(setting.fewer_than_ddp('up'))} | {times(setting.mean('times_smaller_up'))} "
            f"| {METHODS[run['method']].title} | {interval(run)} "
            f"| {density(run)} | {run['lr']:g} | {best:.3f} "
            f"| {100 * (best / first_loss(ddp) - 1):+.1f} % |"
        )
    return lines


def long_table() -> list[str]:
    """Hundreds of rounds at the density of the presets; small model."""
    lines = [
        "| method | H | rounds | k | lr | seeds | bits per byte (lowest to highest) "
        "| against SparseLoCo as published | fewer up than DDP | dense fp32 / up |",
        "| --- |" + " --- |" * 9,
    ]
    found = sorted(
        settings(filter(is_long, load())), key=lambda setting: setting.mean("val_bpb_end")
    )
    published = next(s for s in found if s.first["method"] == "sparseloco")
    for setting in found:
        run = setting.first
        lines.append(
            f"| {METHODS[run['method']].title} | {interval(run)} | {run['rounds']} "
            f"| {density(run)} | {run['lr']:g} | {len(setting.runs)} | {setting.loss()} "
            f"| {setting.against(published)} | {times(setting.fewer_than_ddp('up'))} "
            f"| {times(setting.mean('times_smaller_up'))} |"
        )
    return lines


def is_long(run: Run) -> bool:
    """One of the long runs, which have a table of their own."""
    return bool(run["inner_steps"] * run["rounds"] == LONG_STEPS)


def varied_table() -> list[str]:
    """Every setting in which something was varied, but for long runs."""
    lines = [
        "| method | parameters | sites | H | rounds | changed | seeds | bits per byte "
        "| dense / up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in settings(load()):
        run = setting.first
        shape = {"data": "eras", "sites": SITES if run["data"] == "domains" else run["sites"]}
        plain = is_main(run | shape)  # in a table of its own
        if plain or is_long(run) or set(run["changes"]) == {"inner.lr"}:
            continue
        changed = ", ".join(f"{k} = {v}" for k, v in run["changes"].items() if k != "inner.steps")
        lines.append(
            f"| {METHODS[run['method']].title} | {run['params']:,} | {run['sites']} "
            f"| {run['inner_steps']} | {run['rounds']} | {changed} | {len(setting.runs)} "
            f"| {setting.loss()} | {times(setting.mean('times_smaller_up'))} |"
        )
    return lines


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
    "convergence-rates": partial(rate_table, "small"),
    "convergence-rates-3m": partial(rate_table, "3m"),
    "convergence-intervals": interval_table,
    "convergence-choices": choices_table,
    "convergence-alike": alike_table,
    "convergence-domains": domains_table,
    "convergence-long": long_table,
    "convergence-varied": varied_table,
    "convergence-real": real_runs,
}
