"""The state directory: created whole, opened by one, recovered to the same bits, faults named.

Compared with: the state and theta of the coordinator that wrote it. Run alone:
pytest tests/coordinator/test_store.py
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.corpora import prepared
from support.live import Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, digest_of, vector

from coordinator.check import check_state
from coordinator.events import SiteLost
from coordinator.journal import Journal
from coordinator.recovery import recover
from coordinator.server import open_run
from coordinator.state import State
from coordinator.store import Store
from loco.config import Config
from loco.errors import ConfigError, LocoError

CONFIG = config_of(
    quorum={"min_sites": 2},
    run={"rounds": 9},
    state={"snapshot_every_rounds": 2, "keep_updates": 3},
    codec={"k": 8},
)
NESTEROV = config_of(
    quorum={"min_sites": 2},
    run={"rounds": 9},
    state={"snapshot_every_rounds": 2, "keep_updates": 3},
    codec={"bits": 32},
    outer={"aggregation": "nesterov", "alpha": 0.7},
)


def train(directory: Path, rounds: int, config: Config = CONFIG) -> tuple[State, bytes]:
    """A run of so many rounds by a real coordinator; its last state, and theta."""
    store = Store.open(directory) if Store.exists(directory) else create_store(directory, config)
    with (
        coordinating(store) as coordinator,
        Member(coordinator, "paris", ranks=2) as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        for _ in range(rounds):
            eventually(lambda: coordinator.state.phase == "open", "a round is open")
            round_ = coordinator.state.round
            for seed, site in enumerate((paris, oslo)):
                site.contribute(round_, vector(LAYOUT, 10 * round_ + seed, scale=1e-2))
            eventually(
                lambda: coordinator.state.round == round_ + 1,  # noqa: B023
                "the round is committed",
            )
        eventually(lambda: coordinator.state.phase != "gathering", "the next round is open")
    reopened = Store.open(directory)
    state, reducer = recover(reopened)
    theta = np.array(reducer.theta).tobytes()
    reopened.close()
    assert without_clocks(state) == without_clocks(coordinator.state)
    return state, theta


def without_clocks(state: State) -> dict[str, object]:
    sites = {name: {**vars(site), "heard_at": 0.0} for name, site in state.sites.items()}
    return {**vars(state), "deadline_at": 0.0, "quorum_at": None, "sites": sites}


def test_a_new_run_serves_the_theta_that_it_was_created_with(tmp_path: Path) -> None:
    theta = vector(LAYOUT, 5)
    store = create_store(tmp_path, CONFIG, theta=theta)
    state, reducer = recover(store)
    store.close()
    assert state.theta_digest == digest_of(theta) == reducer.theta_digest
    assert np.array_equal(reducer.theta, theta)
    assert (state.round, state.phase, state.sites) == (0, "gathering", {})


def test_what_is_opened_is_what_was_created(tmp_path: Path) -> None:
    create_store(tmp_path, CONFIG).close()
    store = Store.open(tmp_path)
    assert (store.run_id, store.config, store.layout) == ("test-run", CONFIG, LAYOUT)
    store.close()


@pytest.mark.parametrize(
    ("rounds", "config"),
    [(1, CONFIG), (2, CONFIG), (3, CONFIG), (5, CONFIG), (3, NESTEROV)],
    ids=["1", "2", "3", "5", "3-with-momentum"],
)
def test_replay_gives_state_and_theta_bit_for_bit(
    tmp_path: Path, rounds: int, config: Config
) -> None:
    """`train` compares the states; theta is compared with a run without any restart.

    Outer momentum that a restart loses would make the next step 59 % smaller.
    """
    _, theta = train(tmp_path / "whole", rounds, config)
    for _ in range(rounds):
        state, piecewise = train(tmp_path / "pieces", 1, config)
    assert state.round == rounds
    assert piecewise == theta


def test_what_nobody_needs_any_more_is_gone(tmp_path: Path) -> None:
    """Two snapshots, the contributions since the older one, the last `keep_updates` updates."""
    train(tmp_path, 7)

    def numbers(name: str) -> list[int]:
        return sorted(int(path.name) for path in (tmp_path / name).iterdir())

    assert numbers("snapshots") == [4, 6]
    assert numbers("contributions") == [4, 5, 6]
    assert numbers("updates") == [4, 5, 6]
    assert set(numbers("incoming")) <= {6, 7}, "a stop may come before the last round is tidied"


def test_leftovers_of_a_crash_are_ignored_and_removed(tmp_path: Path) -> None:
    _, theta = train(tmp_path, 3)
    for name in ("updates/3.0badcafe.partial", "snapshots/9/theta", "contributions/3/x.partial"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"torn")
    _, again = train(tmp_path, 0)
    assert again == theta
    assert not (tmp_path / "snapshots" / "9").exists()
    assert not list(tmp_path.rglob("*.partial"))


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("buffer", ["theta", "residual"])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path: Path, buffer: str) -> None:
    _, theta = train(tmp_path, 5)
    flip(tmp_path / "snapshots" / "4" / buffer)
    assert any(f"snapshots/4/{buffer}" in fault for fault in check_state(tmp_path).faults)
    _, again = train(tmp_path, 0)
    assert again == theta
    assert not check_state(tmp_path).faults


def test_no_sound_snapshot_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    train(tmp_path, 3)
    for path in (tmp_path / "snapshots").glob("*/theta"):
        flip(path)
    store = Store.open(tmp_path)
    with pytest.raises(LocoError, match=re.escape(f"no sound snapshot is left in {tmp_path}")):
        recover(store)
    store.close()


def changed_values(directory: Path) -> Path:
    """Another contribution in the place of one that was reduced: every checksum of it is right."""
    (path,) = (directory / "contributions" / "2").glob("oslo.*")
    (other,) = (directory / "contributions" / "3").glob("oslo.*")
    path.write_bytes(other.read_bytes())
    return path


def flipped_contribution(directory: Path) -> Path:
    (path,) = (directory / "contributions" / "2").glob("oslo.*")
    flip(path)
    return path


def lost_contribution(directory: Path) -> Path:
    (path,) = (directory / "contributions" / "2").glob("oslo.*")
    path.unlink()
    return path


@pytest.mark.parametrize("harm", [changed_values, flipped_contribution, lost_contribution])
def test_a_contribution_that_changed_is_found(tmp_path: Path, harm: Callable[[Path], Path]) -> None:
    """Replay from the older snapshot needs it: it must never lead to another theta silently."""
    train(tmp_path, 5)
    path = harm(tmp_path)
    assert any(str(path) in fault for fault in check_state(tmp_path).faults)
    flip(tmp_path / "snapshots" / "4" / "theta")  # so that round 2 is reduced again
    store = Store.open(tmp_path)
    with pytest.raises(LocoError):
        recover(store)
    store.close()


def test_check_of_a_sound_directory_finds_nothing(tmp_path: Path) -> None:
    state, _ = train(tmp_path, 3)
    verdict = check_state(tmp_path)
    assert verdict.faults == []
    assert (verdict.round, verdict.theta_digest) == (3, state.theta_digest)
    assert verdict.contributions > 0
    assert verdict.updates == 3


# --- opening ------------------------------------------------------------------------------------


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no run"):
        Store.open(tmp_path)


def test_a_run_that_was_never_fully_created_says_what_to_do(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "journal.sqlite").close()
    (tmp_path / "journal.sqlite").touch()
    for _ in range(2):  # what failed to open is closed: the second attempt says the same
        with pytest.raises(ConfigError, match="never fully created; remove the directory"):
            Store.open(tmp_path)


def test_one_process_holds_the_directory(tmp_path: Path) -> None:
    store = create_store(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        Store.open(tmp_path)
    store.close()
    Store.open(tmp_path).close()


def test_a_changed_config_is_refused_with_the_keys_named(tmp_path: Path) -> None:
    create_store(tmp_path / "state", CONFIG).close()
    path = tmp_path / "run.toml"
    path.write_text(
        "[run]\nrounds = 12\n[quorum]\nmin_sites = 2\n[outer]\nbeta = 0.5\n[codec]\nk = 8\n"
        "[state]\nsnapshot_every_rounds = 2\nkeep_updates = 3\n"
    )
    for _ in range(2):  # and the directory is let go again
        with pytest.raises(ConfigError) as caught:
            open_run(path, tmp_path / "state")
        assert "run.rounds was 9, is 12" in str(caught.value)
        assert "outer.beta was 0.95, is 0.5" in str(caught.value)
        assert "codec.k" not in str(caught.value)


def test_a_new_run_states_the_tokenizer_of_the_coordinators_corpus(tmp_path: Path) -> None:
    """Sites compare theirs with it. The corpus may go, and be changed, while the run lasts."""
    digest, corpus = "5" * 32, tmp_path / "corpus"
    prepared(corpus, vocab_size=300, tokenizer=digest)
    path = tmp_path / "run.toml"
    model = "[model]\ndim = 8\nnum_layers = 1\nnum_heads = 1\nnum_kv_heads = 1\nffn_dim = 8\n"
    path.write_text(f"{model}vocab_size = 300\n[data]\ncorpus = 'mix:1*{corpus},2*{corpus}'\n")
    for _ in range(2):
        store = open_run(path, tmp_path / "state")
        assert store.config.data.tokenizer_digest == digest
        store.close()
        (corpus / "manifest.json").unlink(missing_ok=True)
    path.write_text(f"{path.read_text()}tokenizer_digest = 'bytes'\n")
    with pytest.raises(ConfigError, match=r"data.tokenizer_digest was '55*', is 'bytes'"):
        open_run(path, tmp_path / "state")


def test_an_unknown_event_names_the_remedy(tmp_path: Path) -> None:
    store = create_store(tmp_path, CONFIG)
    store.close()
    journal = Journal(tmp_path / "journal.sqlite")
    of_a_newer_version = type("SiteDanced", (SiteLost,), {})
    journal.append([of_a_newer_version(site="paris", incarnation=1)], 0.0)
    journal.close()
    store = Store.open(tmp_path)
    with pytest.raises(LocoError, match="'SiteDanced' that this version of loco does not know"):
        recover(store)
    store.close()
