"""`loco report`: what a run's state directory remembers of it, as one page that needs no server."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from coordinator.history import HISTORY_FILE, History, HistoryFile
from coordinator.journal import Journal
from coordinator.store import Store
from loco.config import config_from_json
from loco.errors import ConfigError
from loco.layout import Layout

_PAGE = resources.files("coordinator").joinpath("page")
_SCRIPTS = ("uPlot.js", "charts.js", "report.js")
_STYLES = ("uPlot.css", "page.css")


def write_report(state: Path, out: Path) -> None:
    """Write the page; a coordinator that serves the run is not disturbed.

    Raises:
        ConfigError: `state` holds no run, or `out` cannot be written.
    """
    page = Template(_PAGE.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        styles="\n".join(_text(name) for name in _STYLES),
        scripts="\n".join(_text(name) for name in _SCRIPTS),
        report=_for_html(report_document(state)),
    )
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; give another --out") from error


def report_document(state: Path) -> dict[str, Any]:
    """What the page is drawn from: facts of the run, and its history by round."""
    if not Store.exists(state):
        raise ConfigError(f"{state} holds no run: there is no journal.sqlite in it")
    facts = _facts(state)
    config, layout = config_from_json(facts["config"]), Layout.from_json(facts["layout"])
    history = _history(state)
    return {
        "run_id": facts["run_id"],
        "committed_rounds": history.rounds.stop - 1,
        "planned_rounds": config.run.rounds,
        "params": layout.num_parameters,
        "dense_bytes": layout.dense_bytes,
        "config": config.model_dump(mode="json"),
        "history": history.document(0),
    }


def _facts(state: Path) -> dict[str, str]:
    with contextlib.closing(Journal(state / "journal.sqlite")) as journal:
        return journal.facts()


def _history(state: Path) -> History:
    path = state / HISTORY_FILE
    if not path.exists():
        raise ConfigError(f"{path} is missing: the run was never served, or the file was removed")
    history = History()
    try:
        with contextlib.closing(HistoryFile(path)) as file:
            history.restore(file.read())
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it to begin anew") from error
    return history


def _text(name: str) -> str:
    return _PAGE.joinpath(name).read_text(encoding="utf-8")


def _for_html(document: dict[str, Any]) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(document, allow_nan=False).replace("<", "\\u003c")
