"""A site without torch: the real session and codec, and pseudo-gradients that NumPy makes up.

It follows directives as `worker.loop` does. Its pseudo-gradient depends on its name, the round and
theta, so two runs agree in theta only if they agree in everything before. Used where many sites
or many starts must cost nothing; what is special to the real worker is tested with the real one.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from loco import codec
from loco.config import Config, config_from_json
from loco.digest import bytes_digest, chunk_hashes, theta_digest
from loco.errors import RefusedError
from loco.layout import CHUNK, Layout, cells
from loco.metrics import Catalogue, WireMetrics
from loco.outer import Fragments, apply_update, rules_at
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.pulse import Pulse
from worker.session import Session

Array = npt.NDArray[np.float32]
Sent = list[tuple[slice, codec.FeedbackEncoded]]


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of a contribution."""

    included: bool
    theta_digest: str  # after the round


class NumpySite:
    """One site of `ranks` shards; `run` takes it to the end of the run."""

    def __init__(
        self,
        address: str,
        name: str,
        layout: Layout,
        *,
        ranks: int = 1,
        access: Access | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.layout = layout
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        self.session = Session(address, name, 60.0, wire, access)
        self.pulse = Pulse()
        self.theta: Array = np.zeros(layout.num_elements, np.float32)
        self.ef: Array = np.zeros_like(self.theta)
        self.round = 0
        self.fates: dict[int, Fate] = {}
        self.acknowledged: set[int] = set()
        self._sent: Sent = []
        self._sent_round = -1

    def join(self) -> None:
        """Enter the run with theta of the newest snapshot."""
        run = self.session.get_run()
        self.config: Config = config_from_json(run.config_json)
        joined = self.session.join(run, self.layout, self.ranks, None)
        self.session.caller = pb.Caller(
            run_id=run.run_id, site=self.name, incarnation=joined.incarnation
        )
        self.pulse.start(
            self.session.address,
            self.session.access,
            self.session.caller,
            joined.heartbeat_seconds,
            self.session.wire,
        )
        self._load(joined.snapshot_round)

    def close(self) -> None:
        """Fall silent, as a site that is cut off."""
        self.pulse.stop()
        self.session.close()

    def run(self) -> None:
        """Follow directives until the run is finished."""
        self.join()
        try:
            while self.follow() != pb.DIRECTIVE_FINISHED:
                pass
        finally:
            self.close()

    def follow(self) -> pb.Directive.ValueType:
        """Ask once, and do it."""
        answer = self.session.next_directive(self.round, self.digest)
        match answer.directive:
            case pb.DIRECTIVE_TRAIN:
                self.contribute(answer.plan.k)
            case pb.DIRECTIVE_UPDATE:
                self._apply(answer)
            case pb.DIRECTIVE_RESYNC:
                self._load(answer.snapshot_round)
        return answer.directive

    @property
    def digest(self) -> str:
        return theta_digest(chunk_hashes(self.theta))

    def pseudo_gradient(self) -> Array:
        """[num_elements] fp32, zero in the padding."""
        rng = np.random.default_rng((zlib.crc32(self.name.encode()), self.round))
        out = np.zeros_like(self.theta)
        for p in self.layout.parameters:
            here = slice(p.start, p.start + p.numel)
            noise = rng.standard_normal(p.numel, dtype=np.float32)
            out[here] = np.float32(0.1) * self.theta[here] + np.float32(0.01) * noise
        return out

    def contribute(self, k: int) -> None:
        """Encode once a round, push every shard."""
        if self._sent_round != self.round:
            self._encode(k)
        try:
            for rank in range(self.ranks):
                self.session.push(self._header(rank), self._bodies[rank])
        except RefusedError as refused:
            if refused.reason != "stale_round":
                raise
            return  # later than the grace: the update will say that it is not included
        self.acknowledged.add(self.round)

    def _encode(self, k: int) -> None:
        params = self.theta - self.pseudo_gradient()
        self._sent, self._bodies, self._sent_round = [], [], self.round
        fragments = Fragments(self.config.outer, self.layout)
        rules = rules_at(self.config.outer, self.config.codec, self.round)
        for rank in range(self.ranks):
            parts = []
            for cell in cells(self.layout.shard(rank, self.ranks)):
                here = slice(cell.start * CHUNK, cell.stop * CHUNK)
                encoded = codec.encode_fragment(
                    self.theta[here],
                    params[here],
                    self.ef[here],
                    active=fragments.in_round(cell, self.round),
                    beta=self.config.outer.beta,
                    k=k,
                    bits=rules.bits,
                )
                self._sent.append((here, encoded))
                parts.append(encoded.payload)
            self._bodies.append(b"".join(parts))

    def _header(self, rank: int) -> pb.PushHeader:
        return pb.PushHeader(
            round=self.round,
            shard=rank,
            num_shards=self.ranks,
            tokens=100,
            inner_steps=2,
            data_cursor=2 * (self.round + 1),
            theta_digest=self.digest,
        )

    def _apply(self, answer: pb.WaitRoundResponse) -> None:
        update = self.session.pull(self.round, range(answer.update_bytes))
        assert bytes_digest(update) == answer.update_digest
        if self._sent_round == self.round and not answer.included:
            for here, encoded in self._sent:
                encoded.undo(self.ef[here])
        offset = 0
        for cell in cells(range(self.layout.num_chunks)):
            length = codec.payload_length(update[offset : offset + codec.HEADER_BYTES])
            apply_update(
                self.theta[cell.start * CHUNK : cell.stop * CHUNK], update[offset : offset + length]
            )
            offset += length
        self.fates[self.round] = Fate(included=answer.included, theta_digest=self.digest)
        assert self.digest == answer.theta_digest, f"round {self.round} at {self.name}"
        self.round += 1

    def _load(self, round_: int) -> None:
        data = self.session.snapshot(round_, range(4 * self.layout.num_elements))
        self.theta = np.frombuffer(data, "<f4").copy()
        self.ef[:] = 0
        self.round, self._sent_round = round_, -1


class SiteThread:
    """A NumpySite that runs to the end of the run in a thread."""

    def __init__(self, site: NumpySite) -> None:
        self.site = site
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=site.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.site.run()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float = 60.0) -> NumpySite:
        """Wait for its end; raises what ended it."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.site.name} still runs"
        if self._error is not None:
            raise self._error
        return self.site
