"""How a rank gets a run, a model and a theta: join, checkpoint, snapshot; and who leads."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from loco.config import Config
from loco.errors import CheckpointError, LocoError, RefusedError
from loco.inner import reshard
from loco.layout import Layout
from loco.log import log_fields
from loco.wire.v1 import coordinator_pb2 as pb
from worker.checkpoint import Checkpoints, Manifest, Position
from worker.exchange import Exchange, OuterState
from worker.meanwhile import Meanwhile
from worker.options import Options
from worker.progress import Progress
from worker.pulse import Pulse
from worker.session import Have, Session
from worker.site import Site
from worker.trainee import Trainee
from worker.trainer import Trainer

log = logging.getLogger("loco.worker")


class Entry(ABC):
    """The part of a worker that comes before its rounds, and again after a loss."""

    _run: pb.GetRunResponse
    _config: Config
    _trainer: Trainee
    _layout: Layout
    _exchange: Exchange
    _checkpoints: Checkpoints | None

    def __init__(
        self,
        options: Options,
        site: Site,
        session: Session,
        kind_of_exchange: type[Exchange] = Exchange,
    ) -> None:
        self._options = options
        self._kind_of_exchange = kind_of_exchange
        self._site = site
        self._session = session
        self._pulse = Pulse()
        self._meanwhile = Meanwhile(site, session, self._pulse, self._step_meanwhile)
        self._at = Progress()

    @abstractmethod
    def _step_meanwhile(self, away: bool) -> bool:
        """One inner step during an exchange, or because nobody answers; False: no more."""

    @abstractmethod
    def _next_directive(self) -> pb.WaitRoundResponse:
        """Ask the coordinator what to do."""

    def _get_run(self) -> pb.GetRunResponse:
        packed = self._site.from_leader(lambda: self._session.get_run().SerializeToString())
        return pb.GetRunResponse.FromString(packed)

    def _make_trainer(self) -> Trainee:
        name = self._options.site
        corpus = self._options.data or self._config.data.sites.get(name, self._config.data.corpus)
        return Trainer(self._config, self._site, name, corpus)

    def _open_checkpoints(self, run_id: str) -> Checkpoints | None:
        directory = self._options.checkpoint
        if directory is None:
            return None
        name, site = self._options.site, self._site
        return site.together(lambda: Checkpoints(directory, site, run_id=run_id, name=name))

    def _enter(self) -> pb.WaitRoundResponse:
        """Join with the state of the newest checkpoint, or from the coordinator's snapshot.

        Error feedback is kept only with the theta that it belongs to: if the run can lead that
        theta on by updates. The inner optimizer and the place in the data are kept in any case.
        """
        saved = self._checkpoints.newest() if self._checkpoints else None
        have = Have(round=saved.round, theta_digest=saved.theta_digest) if saved else None
        joined = self._join(have)
        self._trainer.data_cursor = joined.data_cursor
        if self._checkpoints and saved:
            rows = self._exchange.rows
            state, optimizers = self._checkpoints.load(saved, rows)
            mine = reshard(optimizers, rank=self._site.rank, size=self._site.num_ranks)
            self._trainer.optimizer.load_state_dict(mine)
            if joined.keep_state:
                life = self._session.caller.incarnation
                log.info(
                    "going on from the checkpoint of round %d, as incarnation %d", saved.round, life
                )
                self._site.transition(lambda: self._restore(saved, state))
                return self._next_directive()
            log.warning("the checkpoint of round %d is too old: its EF is dropped", saved.round)
            self._trainer.data_cursor = max(saved.data_cursor, joined.data_cursor)
        return pb.WaitRoundResponse(
            directive=pb.DIRECTIVE_RESYNC,
            snapshot_round=joined.snapshot_round,
            theta_digest=joined.snapshot_digest,
            entry=joined.snapshot_entry,
        )

    def _restore(self, saved: Manifest, state: OuterState) -> None:
        self._trainer.data_cursor = saved.data_cursor
        self._at.repeats = True
        self._exchange.restore(state, saved.round)
        self._trainer.go_on(saved.local_steps, saved.local_nats)
        self._report_theta(saved.theta_digest)

    def _save_checkpoint(self) -> None:
        """On a full disk the site goes on: it needs the checkpoint only if it dies, too."""
        try:
            self._write_checkpoint()
        except CheckpointError as error:
            if self._site.leads:
                log.error("the checkpoints before it stay, the site goes on: %s", error)
            with self._pulse.edit() as beat:
                beat.totals.failed_checkpoints += 1

    def _write_checkpoint(self) -> None:
        assert self._checkpoints is not None
        nats = self._trainer.local_nats()
        rows = self._layout.shard(self._site.rank, self._site.num_ranks)
        self._checkpoints.save(
            Position(
                round=self._exchange.round,
                theta_digest=self._at.theta_digest,
                data_cursor=self._trainer.data_cursor,
                local_steps=self._trainer.local_steps,
                local_nats=nats,
            ),
            self._exchange.state(rows),
            self._trainer.optimizer.state_dict(),
            rows=rows,
            num_rows=self._layout.num_chunks,
        )

    def _join(self, have: Have | None) -> pb.JoinResponse:
        joined = self._become_member(have)
        self._session.caller = self._caller(joined)
        run = self._run
        log_fields(run=run.run_id, site=self._options.site, rank=self._site.rank)
        if self._site.leads:
            log.info(
                "joined run %s as incarnation %d with %d ranks on %s: %d parameters",
                run.run_id,
                joined.incarnation,
                self._site.num_ranks,
                self._site.device,
                self._layout.num_parameters,
            )
        with self._pulse.edit() as beat:
            beat.link_bytes_per_second = (self._options.link_mbit or 0.0) * 1e6 / 8
            beat.ranks = self._site.num_shards // self._site.shards_a_rank
        self._at.heartbeat_seconds = joined.heartbeat_seconds
        self._lead()
        return joined

    def _become_member(self, have: Have | None) -> pb.JoinResponse:
        """Join, all ranks under one incarnation; waits like any other call."""

        def ask() -> bytes:
            if not self._site.leads:
                return b""
            shards = self._site.num_shards
            return self._session.join(self._run, self._layout, shards, have).SerializeToString()

        return pb.JoinResponse.FromString(self._site.gather_bytes(self._meanwhile.do(ask))[0])

    def _caller(self, joined: pb.JoinResponse) -> pb.Caller:
        return pb.Caller(
            run_id=self._run.run_id, site=self._options.site, incarnation=joined.incarnation
        )

    def _join_again(self, refused: RefusedError) -> None:
        """The coordinator came back with a state from before this site joined.

        Theta, EF, optimizer and place in the data stay: the next directive says whether theta is
        the run's. A coordinator that the site is ahead of is waited for, as everywhere.
        """
        log.warning("joining again: %s", refused)
        have = Have(round=self._exchange.round, theta_digest=self._at.theta_digest)
        joined = self._become_member(have)

        def become() -> None:
            self._session.caller = self._caller(joined)
            with self._pulse.edit() as beat:
                beat.caller.CopyFrom(self._session.caller)

        self._site.transition(become)

    def _lead(self) -> None:
        """The pulse of the rank that leads is the site's."""
        if self._site.leads and self._session.caller.incarnation:
            self._pulse.start(
                self._session.address,
                self._session.access,
                self._session.caller,
                self._at.heartbeat_seconds,
                self._session.wire,
            )
        else:
            self._pulse.stop()

    def _load_snapshot(self, round_: int, digest: str) -> None:
        with self._pulse.phase(pb.SITE_PHASE_SYNC):
            data = self._site.fetch(
                self._exchange.snapshot_span, lambda span: self._session.snapshot(round_, span)
            )
            self._site.transition(lambda: self._start_from(data, round_, digest))
        if self._at.theta_digest != digest:
            raise LocoError(
                f"the snapshot of round {round_} has digest {self._at.theta_digest[:16]}, the "
                f"coordinator announced {digest[:16]}: a file of its state directory has changed"
            )

    def _start_from(self, theta: bytes | memoryview, round_: int, digest: str) -> None:
        self._exchange.load(theta, round_)
        self._go_on_from_theta()
        self._report_theta(digest)

    def _drop_unsent(self, data_cursor: int) -> None:
        """EF and progress are, at least in part, in an update already: to send neither again."""
        self._exchange.drop_unsent()
        self._go_on_from_theta()
        self._trainer.data_cursor = max(self._trainer.data_cursor, data_cursor)

    def _go_on_from_theta(self) -> None:
        """Nothing of what this site did before is in its parameters."""
        self._trainer.drop_local_steps()
        self._at.pending = None
        self._at.goal = (-1, 0)
        self._at.in_flight = False
        self._at.repeats = False
        self._exchange.write_parameters()

    def _report_theta(self, expected: str) -> None:
        """Tell the coordinator, which answers a wrong theta with RESYNC."""
        self._at.theta_digest = self._exchange.digest()
        if self._at.theta_digest != expected:
            log.error("theta %s is not the run's %s", self._at.theta_digest[:16], expected[:16])
        with self._pulse.edit() as beat:
            beat.theta_digest = self._at.theta_digest
            beat.round = self._exchange.round
