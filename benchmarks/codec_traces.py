"""Real input for the codec's benchmark: what a site of the demo encodes in the middle of its run.

    python -m benchmarks.codec_traces --out build/codec-traces      # a few minutes on one core

Runs the recipe of the demo (preset tiny) in one process and keeps a = beta * e + delta of one site,
in the padded flat layout, at a few rounds: `round-040.npy` is what benchmarks.codec reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from benchmarks.simulation import Array, Contribution, Simulation
from loco.config import Config, parse_config, preset_text

KEPT_ROUNDS = (1, 10, 20, 39, 40)  # two in a row, to compare supports; k is 64 from round 30 on


class Recorder(Simulation):
    """A simulation that remembers what the first site encoded last."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.a: Array = np.zeros_like(self.theta)

    def _encode(self, index: int, round_: int) -> Contribution:
        sent = super()._encode(index, round_)
        if index == 0:
            self.a = self._ef[0].copy()
            for here, encoded in sent.parts:
                encoded.undo(self.a[here])
        return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/codec-traces"))
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(parse_config(preset_text("tiny"), source="preset tiny"))
    (folder / "layout.json").write_text(recorder.layout.to_json())
    for done in recorder.rounds():
        print(f"round {done.round}: {done.train_bpb:.3f} bits per byte", flush=True)
        if done.round in KEPT_ROUNDS:
            np.save(folder / f"round-{done.round:03}.npy", recorder.a)
        if done.round == max(KEPT_ROUNDS):
            return


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
