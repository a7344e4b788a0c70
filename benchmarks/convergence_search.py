"""Tables of what was varied and searched in the convergence grid: H, k, rates, sites, length.

The functions in BLOCKS are blocks of benchmarks.tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.convergence_tables import (
    SITES,
    STEPS,
    Run,
    Setting,
    density,
    interval,
    is_main,
    is_rate,
    load,
    most_seeds_then_loss,
    settings,
    side_by_side,
    times,
)
from benchmarks.methods import METHODS

LONG_STEPS = 3000  # of runs with as many rounds as the larger presets have
NUMBERS_OF_SITES = (2, 4, 8)


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


def sites_table() -> list[str]:
    """More sites, each with its own text, at the same number of steps; small model."""
    found = {f"{num} sites": of_sites(num) for num in NUMBERS_OF_SITES}
    two, *more = found.values()
    return side_by_side(found, [name for name in two if any(name in others for others in more)])


def of_sites(num: int) -> dict[str, Setting]:
    """By method, the small model at the main setting but for the number of sites."""
    runs = [
        run for run in load()
        if run["sites"] == num and run["model"] == "small" and is_main(run | {"sites": SITES})
    ]  # fmt: skip
    return {setting.first["method"]: setting for setting in settings(runs)}


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


def by_density() -> dict[str, dict[int, dict[int, Setting]]]:
    """Small model: by family of methods and H, the setting of each k with most seeds, the best."""
    found: dict[str, dict[int, dict[int, Setting]]] = {"kept": {}, "recipe": {}}
    for setting in sorted(of_any_interval(SEARCHED | OUTER_STEP), key=most_seeds_then_loss):
        run = setting.first
        family = "kept" if run["method"].startswith("kept") else run["method"]
        if family in found:
            found[family].setdefault(run["inner_steps"], {}).setdefault(run["k"], setting)
    return found


def interval_table() -> list[str]:
    """Dense DiLoCo against replicas that keep what is unsent by H and k.

    Each side with the setting that has most seeds, of several the best.
    """
    lines = [
        "| H | dense DiLoCo | k | replicas keep the rest | against it | common seeds "
        "| fewer up than DDP | dense fp32 / up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    dense: dict[int, Setting] = {}
    for setting in sorted(of_any_interval(SEARCHED | OUTER_STEP), key=most_seeds_then_loss):
        if setting.first["method"].startswith("diloco"):
            dense.setdefault(setting.first["inner_steps"], setting)
    kept = by_density()["kept"]
    points = ((steps, k, ours) for steps, ks in kept.items() for k, ours in ks.items())
    for steps, k, ours in sorted(points, key=lambda point: point[:2]):
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
        plain = is_main(run | {"data": "eras", "sites": SITES})  # in a table of its own
        if plain or is_long(run) or set(run["changes"]) == {"inner.lr"}:
            continue
        changed = ", ".join(f"{k} = {v}" for k, v in run["changes"].items() if k != "inner.steps")
        lines.append(
            f"| {METHODS[run['method']].title} | {run['params']:,} | {run['sites']} "
            f"| {run['inner_steps']} | {run['rounds']} | {changed} | {len(setting.runs)} "
            f"| {setting.loss()} | {times(setting.mean('times_smaller_up'))} |"
        )
    return lines


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "convergence-rates": partial(rate_table, "small"),
    "convergence-rates-3m": partial(rate_table, "3m"),
    "convergence-sites": sites_table,
    "convergence-intervals": interval_table,
    "convergence-choices": choices_table,
    "convergence-long": long_table,
    "convergence-varied": varied_table,
}
