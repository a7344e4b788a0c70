"""The round machine against golden transcripts: what it answers to scripts of events, in full.

    pytest tests/coordinator/test_transcripts.py
    pytest tests/coordinator/test_transcripts.py --regenerate-golden   # then read the difference

The files in tests/golden/machine read as prose: script lines begin with `>`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.transcript import Player, transcript

from coordinator.machine import step
from coordinator.state import initial_state

GOLDEN = Path(__file__).parent.parent / "golden" / "machine"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path, regenerate_golden: bool) -> None:
    text = path.read_text()
    played = transcript(text)
    if regenerate_golden:
        path.write_text(played)
    assert played == text


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_replaying_the_durable_events_gives_the_same_run(path: Path) -> None:
    """The journal holds durable events only; clocks apart, they must lead to the same state."""
    player = Player()
    for line in path.read_text().splitlines():
        if line.startswith(">"):
            player.play(line[1:])
    replayed = initial_state(player.state.rules, "theta0")
    for now, event in player.durable:
        replayed, _ = step(replayed, event, now)
    assert _without_clocks(replayed) == _without_clocks(player.state)


def _without_clocks(state: object) -> dict[str, object]:
    kept = {k: v for k, v in vars(state).items() if k not in ("deadline_at", "quorum_at")}
    sites = kept.pop("sites")
    assert isinstance(sites, dict)
    stripped = {n: {**vars(site), "heard_at": None} for n, site in sites.items()}
    return {**kept, "sites": stripped}
