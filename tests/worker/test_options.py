"""Options of a worker: what the launcher hands to its ranks is what the user said.

Compared with: the real command-line parser. Run alone: pytest tests/worker/test_options.py
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from loco.cli import run
from loco.errors import ConfigError
from loco.wire.protocol import BLOCK_BYTES
from worker.__main__ import app
from worker.cli import _tolerates_faults
from worker.options import Elastic, Options
from worker.rank import bytes_per_second
from worker.stall import STALL_SECONDS

MINIMAL = Options(
    coordinator="example.org:29400",
    site="paris",
    data=None,
    device="auto",
    patience_seconds=3600.0,
    threads=3,
    metrics=None,
    checkpoint=None,
    checkpoint_every_rounds=10,
    link_mbit=None,
)
FULL = Options(
    coordinator="[::1]:29400",
    site="oslo-2",
    data="my texts/with a space.txt",
    device="cpu",
    patience_seconds=0.5,
    threads=1,
    metrics="127.0.0.1:9500",
    checkpoint=Path("/tmp/check points"),
    checkpoint_every_rounds=3,
    link_mbit=62.5,
    max_mbit=50.5,
    bundle=Path("my certs/oslo-2.pem"),
    insecure=True,
    elastic=Elastic(
        lighthouse=None,
        local_ranks=4,
        first_rank=8,
        site_ranks=16,
        interface="10.0.0.2",
        rank_timeout_seconds=2.5,
        heal_seconds=90.0,
        shard_backup=True,
        max_restarts=3,
    ),
)
# Names of the command line where they differ from those of the field.
FLAGS = {
    "patience_seconds": "patience",
    "local_ranks": "ranks",
    "rank_timeout_seconds": "rank_timeout",
}


def parsed(arguments: list[str]) -> dict[str, object]:
    return typer.main.get_command(app).make_context("worker", arguments).params


@pytest.mark.parametrize("options", [MINIMAL, FULL], ids=["minimal", "full"])
def test_the_arguments_of_options_are_parsed_back_to_them(options: Options) -> None:
    params = parsed(options.arguments())
    said = {field.name: getattr(options, field.name) for field in fields(Options)}
    elastic = said.pop("elastic")
    assert params["fault_tolerance"] == ("torchft" if elastic else "none")
    if elastic is None:
        assert params["ranks"] is None, "a rank must not start ranks of its own"
    else:
        said |= {field.name: getattr(elastic, field.name) for field in fields(Elastic)}
    for name, value in said.items():
        assert params[FLAGS.get(name, name)] == value, name


def test_every_flag_reaches_the_ranks() -> None:
    """A flag that is new in the command line and not in Options would be lost with --ranks 2."""
    names = {field.name for kind in (Options, Elastic) for field in fields(kind)}
    known = {FLAGS.get(name, name) for name in names - {"elastic"}}
    assert set(parsed(MINIMAL.arguments())) - {"fault_tolerance"} == known


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--threads", "0"), ("--patience", "-1"), ("--checkpoint-every-rounds", "0")],
)
def test_an_impossible_number_is_refused_by_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [*MINIMAL.arguments(), flag, value]) == 2
    assert flag in capsys.readouterr().err


SETTINGS = """
[site]
coordinator = "example.org:29400"
site = "paris"
ranks = 4
fault_tolerance = "torchft"
shard_backup = true
rank_timeout = 2
"""


def with_settings(path: Path, text: str, *arguments: str) -> dict[str, object]:
    path.write_text(text)
    return parsed(["--settings", str(path), *arguments])


def test_settings_of_a_site_say_what_flags_say_and_a_flag_wins(tmp_path: Path) -> None:
    """`[site] fault_tolerance` in a file is `--fault-tolerance` on the command line."""
    flags = (
        "--coordinator", "example.org:29400", "--site", "paris", "--ranks", "4",
        "--fault-tolerance", "torchft", "--shard-backup", "--rank-timeout", "2",
    )  # fmt: skip
    assert with_settings(tmp_path / "site.toml", SETTINGS) == parsed([*flags])
    changed = with_settings(tmp_path / "site.toml", SETTINGS, "--fault-tolerance", "none")
    assert (changed["fault_tolerance"], changed["ranks"]) == ("none", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[site]\nfault_tolerence = 'torchft'", "did you mean 'fault_tolerance'"),
        ("[site]\nranks = true", "ranks = True is not possible: use a string or a number"),
        ("[site]\nshard_backup = 1", "shard_backup = 1 is not possible: use true or false"),
        ("[site]\nsettings = 'more.toml'", "settings is not known"),
        ("[run]\nrounds = 3", "holds run: settings of a site are one table"),
        ("[site", "is not valid TOML"),
    ],
)
def test_settings_that_nothing_reads_are_refused_by_name(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        with_settings(tmp_path / "site.toml", text)
    with pytest.raises(ConfigError, match="cannot read the settings"):
        parsed(["--settings", str(tmp_path / "away.toml")])


def test_a_number_out_of_range_in_the_settings_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.toml").write_text(SETTINGS.replace("rank_timeout = 2", "rank_timeout = 0.1"))
    assert run(app, ["--settings", str(tmp_path / "site.toml")]) == 2
    assert "--rank-timeout" in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["torchft", "none"])
def test_otel_which_ends_the_import_of_torchft_is_left_out_with_a_line(
    choice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchft 0.2.0 asks for an abstract class of today's opentelemetry."""
    monkeypatch.setattr("worker.elastic.quorum.is_installed", lambda: True)
    monkeypatch.setattr("worker.cli.start_logging", lambda _who: None)
    monkeypatch.setenv("TORCHFT_USE_OTEL", "true")
    assert _tolerates_faults(choice, alone=True) == (choice == "torchft")
    assert ("TORCHFT_USE_OTEL is set and left out" in caplog.text) == (choice == "torchft")
    assert ("TORCHFT_USE_OTEL" in os.environ) == (choice == "none")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--site-ranks -3", "--site-ranks"),
        ("--ranks 4 --site-ranks 2", "--first-rank 0 with --ranks 4 is not possible"),
        ("--ranks 4 --site-ranks 16 --first-rank 14", "--first-rank 14 with --ranks 4"),
        ("--ranks 8 --site-ranks 16", "need --lighthouse HOST:PORT"),
    ],
)
def test_ranks_that_no_site_can_have_are_refused(
    flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--coordinator", "127.0.0.1:1", "--site", "paris"]
    assert run(app, [*arguments, "--fault-tolerance", "torchft", *flags.split()]) == 2
    assert told in capsys.readouterr().err


def test_each_task_of_a_launcher_would_be_a_site_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under deploy/slurm: all of one name, each ending the one before."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="another launcher"):
        _tolerates_faults("torchft", alone=True)
    monkeypatch.setenv("LOCO_LIGHTHOUSE", "127.0.0.1:1")  # a rank of our own supervisor
    assert _tolerates_faults("torchft", alone=True)


def test_without_torchft_the_nodes_of_a_site_are_not_sites_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.elastic.quorum.is_installed", lambda: False)
    monkeypatch.setattr("worker.cli.start_logging", lambda _who: None)
    assert not _tolerates_faults("torchft", alone=True)
    with pytest.raises(ConfigError, match="a site of several nodes needs torchrun"):
        _tolerates_faults("torchft", alone=False)


def test_a_rate_at_which_transfers_would_count_as_stalled_is_refused() -> None:
    assert bytes_per_second(None, 64) is None
    assert bytes_per_second(80.0, 8) == 1.25e6
    with pytest.raises(ConfigError, match=r"--max-mbit 2.2 .* 64 ranks") as told:
        bytes_per_second(2.2, 64)
    enough = bytes_per_second(float(str(told.value).split()[-1]), 64)
    assert enough is not None
    assert BLOCK_BYTES / enough < STALL_SECONDS
