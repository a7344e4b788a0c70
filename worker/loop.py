"""The life of one rank: join, then round after round pull, H inner steps, encode, push, apply."""

from __future__ import annotations

import logging
import math

from loco.config import config_from_json
from loco.digest import bytes_digest
from loco.errors import LocoError, NonFiniteError, RefusedError
from loco.log import log_fields
from loco.model import layout_of
from loco.wire.v1 import coordinator_pb2 as pb
from worker.exchange import Exchange
from worker.options import Options
from worker.pulse import Pulse
from worker.session import Session
from worker.site import Site
from worker.trainer import RoundStats, Trainer

log = logging.getLogger("loco.worker")


class Worker:
    """One rank of a site. All ranks call everything alike; the leader also speaks for the site."""

    def __init__(self, options: Options, site: Site, session: Session) -> None:
        self._options = options
        self._site = site
        self._session = session
        self._pulse = Pulse()
        self._theta_digest = ""
        self._pending: tuple[pb.PushHeader, bytes] | None = None

    def run(self) -> None:
        """Train until the run is finished."""
        run = self._get_run()
        config = config_from_json(run.config_json)
        corpus = self._options.data or config.data.sites.get(self._options.site, config.data.corpus)
        self._trainer = self._site.together(
            lambda: Trainer(config, self._site, self._options.site, corpus)
        )
        self._config = config
        self._layout = layout_of(self._trainer.model)
        self._exchange = Exchange(config, self._site, self._trainer.model, self._layout)
        joined = self._join(run)
        try:
            self._rounds(joined)
        except NonFiniteError:
            with self._pulse.edit() as beat:
                beat.non_finite = True
            raise
        finally:
            self._pulse.stop()
        if self._site.leads:
            self._session.leave("the run is finished")

    def _rounds(self, joined: pb.JoinResponse) -> None:
        directive = pb.WaitRoundResponse(
            directive=pb.DIRECTIVE_RESYNC,
            snapshot_round=joined.snapshot_round,
            theta_digest=joined.snapshot_digest,
        )
        while directive.directive != pb.DIRECTIVE_FINISHED:
            try:
                self._follow(directive)
            except RefusedError as refused:
                if refused.reason != "not_available":
                    raise
                log.warning("the run has moved on meanwhile: %s", refused)
            directive = self._next_directive()
        self._evaluate_if_due()

    def _follow(self, directive: pb.WaitRoundResponse) -> None:
        match directive.directive:
            case pb.DIRECTIVE_TRAIN:
                self._contribute()
            case pb.DIRECTIVE_UPDATE:
                self._catch_up(directive)
            case pb.DIRECTIVE_RESYNC:
                if directive.message:
                    log.warning("starting again from the snapshot: %s", directive.message)
                self._load_snapshot(directive.snapshot_round, directive.theta_digest)
            case _:
                raise LocoError(f"the coordinator sent an unknown directive: {directive}")

    # --- one round ------------------------------------------------------------------------------

    def _contribute(self) -> None:
        """H inner steps, then this rank's shard; asked again in one round, the same shard."""
        self._evaluate_if_due()
        if self._pending is None or self._pending[0].round != self._exchange.round:
            self._pending = self._train()
        header, body = self._pending
        with self._pulse.phase(pb.SITE_PHASE_PUSH):
            self._site.together(lambda: self._push(header, body))

    def _train(self) -> tuple[pb.PushHeader, bytes]:
        """The round's contribution of this rank."""
        round_ = self._exchange.round
        with self._pulse.phase(pb.SITE_PHASE_COMPUTE):
            stats = self._trainer.train_round(round_)
        with self._pulse.phase(pb.SITE_PHASE_ENCODE):
            body = self._site.together(self._exchange.encode)
        with self._pulse.edit() as beat:
            beat.inner_steps = (round_ + 1) * self._config.inner.steps
            beat.tokens += stats.tokens
            beat.train_bits_per_byte = stats.train_bits_per_byte
        self._report(round_, stats)
        header = pb.PushHeader(
            round=round_,
            shard=self._site.rank,
            num_shards=self._site.num_ranks,
            tokens=stats.tokens,
            inner_steps=stats.inner_steps,
            theta_digest=self._theta_digest,
        )
        return header, body

    def _report(self, round_: int, stats: RoundStats) -> None:
        """What people want to know of this round, summed over the ranks, into the next beat."""
        ef_norm_sq, retries, resumed_bytes, in_site_bytes = self._site.sum(
            self._exchange.ef_norm_sq,
            self._session.retries,
            self._session.resumed_bytes,
            self._trainer.in_site_bytes,
        )
        with self._pulse.edit() as beat:
            beat.reports.add(
                round=round_,
                train_bits_per_byte=stats.train_bits_per_byte,
                ef_norm=math.sqrt(ef_norm_sq),
            )
            beat.totals.retries = int(retries)
            beat.totals.resumed_bytes = int(resumed_bytes)
            beat.totals.in_site_bytes = int(in_site_bytes)

    def _push(self, header: pb.PushHeader, body: bytes) -> None:
        try:
            self._session.push(header, body)
        except RefusedError as refused:
            if refused.reason not in ("stale_round", "not_expected", "digest"):
                raise
            # The next directive says what the run did instead; EF keeps what was not included.
            log.warning("contribution refused: %s", refused)

    def _catch_up(self, directive: pb.WaitRoundResponse) -> None:
        """Pull the update in parts, one a rank, and apply it everywhere."""
        with self._pulse.phase(pb.SITE_PHASE_PULL):
            update = self._pull(directive)
        with self._pulse.phase(pb.SITE_PHASE_APPLY):
            self._exchange.settle(included=directive.included)
            self._site.together(lambda: self._exchange.apply(update))
            self._exchange.write_parameters()
            self._report_theta(directive.theta_digest)

    def _pull(self, directive: pb.WaitRoundResponse) -> bytes:
        size, ranks = directive.update_bytes, self._site.num_ranks
        rank, round_ = self._site.rank, self._exchange.round
        span = range(rank * size // ranks, (rank + 1) * size // ranks)
        part = self._site.together(lambda: self._session.pull(round_, span))
        update = b"".join(self._site.gather_bytes(part))
        if bytes_digest(update) != directive.update_digest:
            raise LocoError(f"the update of round {round_} came with another digest than announced")
        return update

    def _evaluate_if_due(self) -> None:
        """Measure theta every so many rounds, and the final one."""
        every, round_ = self._config.eval.every_rounds, self._exchange.round
        last = round_ == self._config.run.rounds
        if every and (round_ % every == 0 or last):
            with self._pulse.phase(pb.SITE_PHASE_EVAL):
                measured = self._trainer.evaluate()
            with self._pulse.edit() as beat:
                beat.evaluations.add(round=round_, bits_per_byte=measured)

    # --- joining --------------------------------------------------------------------------------

    def _get_run(self) -> pb.GetRunResponse:
        packed = self._site.from_leader(lambda: self._session.get_run().SerializeToString())
        return pb.GetRunResponse.FromString(packed)

    def _join(self, run: pb.GetRunResponse) -> pb.JoinResponse:
        def ask() -> bytes:
            answer = self._session.join(run, self._layout, self._site.num_ranks)
            return answer.SerializeToString()

        joined = pb.JoinResponse.FromString(self._site.from_leader(ask))
        self._session.caller = pb.Caller(
            run_id=run.run_id, site=self._options.site, incarnation=joined.incarnation
        )
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
            self._pulse.start(
                self._session.address,
                self._session.caller,
                joined.heartbeat_seconds,
                self._session.wire,
            )
        return joined

    def _load_snapshot(self, round_: int, digest: str) -> None:
        with self._pulse.phase(pb.SITE_PHASE_SYNC):
            span = self._exchange.snapshot_span
            data = self._site.together(lambda: self._session.snapshot(round_, span))
            self._exchange.load(data, round_)
            self._pending = None
            self._exchange.write_parameters()
            self._report_theta(digest)
        if self._theta_digest != digest:
            raise LocoError(
                f"the snapshot of round {round_} has digest {self._theta_digest[:16]}, the "
                f"coordinator announced {digest[:16]}: a file of its state directory has changed"
            )

    def _report_theta(self, expected: str) -> None:
        """Tell the coordinator, which answers a wrong theta with RESYNC."""
        self._theta_digest = self._exchange.digest()
        if self._theta_digest != expected:
            log.error("theta %s is not the run's %s", self._theta_digest[:16], expected[:16])
        with self._pulse.edit() as beat:
            beat.theta_digest = self._theta_digest
            beat.round = self._exchange.round

    def _next_directive(self) -> pb.WaitRoundResponse:
        def ask() -> bytes:
            answer = self._session.next_directive(self._exchange.round, self._theta_digest)
            return answer.SerializeToString()

        with self._pulse.phase(pb.SITE_PHASE_WAIT):
            return pb.WaitRoundResponse.FromString(self._site.from_leader(ask))
