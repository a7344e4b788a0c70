"""The documentation against the code and the tree: fresh, linked, and its quickstart runs.

Run alone: pytest tests/docs/test_docs.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from support.cluster import TINY, Process, free_port
from support.live import eventually

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")
COMMANDS = re.compile(r"^    (loco .+)$", re.MULTILINE)


def test_the_reference_is_fresh() -> None:
    command = [sys.executable, "docs/tool", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    """Also those out of docs/, which MkDocs does not follow."""
    dead = [t for t in LINK.findall(page.read_text()) if not (page.parent / t).exists()]
    assert dead == []


def test_every_key_of_the_config_says_what_it_is_for() -> None:
    """A key may be silent only if its name says it all."""
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| (.*) \|$", (DOCS / "reference/config.md").read_text(), re.M
    )
    silent = {key for key, said in rows if not said.strip()}
    assert silent <= {
        "vocab_size", "dim", "num_layers", "num_heads", "rope_theta", "min_lr_fraction", "betas",
        "k_ramp_rounds",
    }  # fmt: skip


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=lambda p: p.stem)
def test_commands_in_the_guides_have_flags_that_exist(page: Path) -> None:
    reference = (DOCS / "reference" / "cli.md").read_text()
    sections = dict(re.findall(r"^## (loco [a-z ]+)\n(.*?)(?=^## |\Z)", reference, re.M | re.S))
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"(?:^    |`)(loco [^`\n]+)", text, re.M):
        words = line.split(";")[0].split()
        name = " ".join(words[:3]) if " ".join(words[:3]) in sections else " ".join(words[:2])
        assert name in sections, line
        for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", line):
            assert f"`{flag}`" in sections[name], f"{flag} in: {line}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quickstart_runs_as_it_is_written(tmp_path: Path) -> None:
    """Its five commands, with another port and a config of one short round."""
    certs, init, coordinator, paris, oslo = COMMANDS.findall((DOCS / "quickstart.md").read_text())[
        :5
    ]
    port = free_port()

    def arguments(line: str) -> list[str]:
        assert line.startswith("loco ")
        here = line.replace(":29400", f":{port}").removeprefix("loco ")
        return [sys.executable, "-m", "loco", *shlex.split(here)]

    for line in (certs, init):
        done = subprocess.run(arguments(line), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    config = TINY | {"run": {"name": "quickstart", "rounds": 1}, "eval": {"every_rounds": 0}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(config))
    processes: list[Process] = []

    def start(line: str) -> Process:
        process = Process(tmp_path / f"{len(processes)}.log", arguments(line), cwd=str(tmp_path))
        processes.append(process)
        return process

    try:
        serving = start(coordinator)
        eventually((tmp_path / "state" / "address").exists, "the coordinator answers", seconds=110)
        for site in (start(paris), start(oslo)):
            assert site.wait() == 0, site.output
        status = next(
            c for c in COMMANDS.findall((DOCS / "quickstart.md").read_text()) if "status" in c
        )
        asked = arguments(status.replace("--watch", "--json"))
        shown = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
        assert '"phase": "finished"' in shown.stdout, shown.stderr + serving.output
    finally:
        for process in reversed(processes):
            process.__exit__()
