"""The life of one rank: join, then round after round pull, H inner steps, encode, push, apply."""

from __future__ import annotations

import logging
import math

from loco import codec
from loco.config import config_from_json
from loco.digest import bytes_digest
from loco.errors import LocoError, NonFiniteError, RefusedError
from loco.inner import reshard
from loco.log import log_fields
from loco.model import layout_of
from loco.wire.blocks import is_sound
from loco.wire.v1 import coordinator_pb2 as pb
from worker.checkpoint import Checkpoints, Position
from worker.exchange import Exchange
from worker.meanwhile import Meanwhile
from worker.options import Options
from worker.pulse import Pulse
from worker.session import Have, Session
from worker.site import Site
from worker.trainer import Local, Trainer

log = logging.getLogger("loco.worker")

SAY_WAITED_SECONDS = 0.5


class Worker:
    """One rank of a site. All ranks call everything alike; the leader also speaks for the site."""

    def __init__(self, options: Options, site: Site, session: Session) -> None:
        self._options = options
        self._site = site
        self._session = session
        self._pulse = Pulse()
        self._meanwhile = Meanwhile(site, session, self._step_meanwhile)
        self._plan = pb.RoundPlan()
        self._theta_digest = ""
        self._pending: tuple[pb.PushHeader, bytes] | None = None
        self._retracted_round = -1
        self._waited_before = 0.0
        self._in_flight = False
        """A contribution was captured, and the update that answers it is not applied yet."""
        self._repeats = False
        """All state is that of an earlier life of this site, which may have gone on from here."""

    def run(self) -> None:
        """Train until the run is finished."""
        self._run = run = self._get_run()
        self._config = config_from_json(run.config_json)
        self._trainer = self._site.together(self._make_trainer)
        self._layout = layout_of(self._trainer.model)
        codec.warm_up_beside(self._layout.num_elements)
        self._exchange = Exchange(self._config, self._site, self._trainer.model, self._layout)
        self._checkpoints = self._open_checkpoints(run.run_id)
        try:
            self._rounds(self._enter())
        except NonFiniteError:
            with self._pulse.edit() as beat:
                beat.non_finite = True
            raise
        finally:
            self._pulse.stop()
        if self._site.leads:
            self._session.leave("the run is finished")

    def _rounds(self, directive: pb.WaitRoundResponse) -> None:
        while directive.directive != pb.DIRECTIVE_FINISHED:
            try:
                self._follow(directive)
                directive = self._following(directive) or self._next_directive()
            except RefusedError as refused:
                self._overcome(refused)
                directive = pb.WaitRoundResponse(directive=pb.DIRECTIVE_WAIT)
        self._evaluate_if_due()

    def _following(self, done: pb.WaitRoundResponse) -> pb.WaitRoundResponse | None:
        """What comes after a directive, where it said so itself: a round trip less."""
        if done.directive != pb.DIRECTIVE_UPDATE or not done.HasField("next"):
            return None
        if self._theta_digest != done.theta_digest:
            return None  # the coordinator has to be told
        return pb.WaitRoundResponse(directive=pb.DIRECTIVE_TRAIN, plan=done.next)

    def _overcome(self, refused: RefusedError) -> None:
        """Go on where asking again helps; any other refusal ends the site."""
        match refused.reason:
            case "not_available":
                log.warning("the run has moved on meanwhile: %s", refused)
            case "unknown_site":
                self._join_again(refused)
            case _:
                raise refused

    def _follow(self, directive: pb.WaitRoundResponse) -> None:
        match directive.directive:
            case pb.DIRECTIVE_TRAIN:
                self._contribute(directive.plan)
            case pb.DIRECTIVE_UPDATE:
                self._catch_up(directive)
            case pb.DIRECTIVE_RESYNC:
                if directive.message:
                    log.warning("starting again from the snapshot: %s", directive.message)
                self._session.check_snapshot(
                    directive.entry, directive.snapshot_round, directive.theta_digest
                )
                self._load_snapshot(directive.snapshot_round, directive.theta_digest)
            case pb.DIRECTIVE_WAIT:
                pass
            case _:
                raise LocoError(f"the coordinator sent an unknown directive: {directive}")

    # --- one round ------------------------------------------------------------------------------

    def _contribute(self, plan: pb.RoundPlan) -> None:
        """What is left of H inner steps, then this rank's shard; asked again, the same shard."""
        self._plan = plan
        self._evaluate_if_due()
        if not self._has_contributed():
            self._pending = self._train(plan)
        assert self._pending is not None
        header, body = self._pending
        with self._pulse.phase(pb.SITE_PHASE_PUSH):
            try:
                self._meanwhile.do(lambda: self._session.push(header, body))
            except RefusedError as refused:
                self._take_refusal(refused)

    def _train(self, plan: pb.RoundPlan) -> tuple[pb.PushHeader, bytes]:
        """The round's contribution of this rank."""
        with self._pulse.phase(pb.SITE_PHASE_COMPUTE):
            self._trainer.train(self._steps_left(plan), plan)
            local = self._trainer.exchanged()
        header = pb.PushHeader(
            round=self._exchange.round,
            shard=self._site.rank,
            num_shards=self._site.num_ranks,
            tokens=local.tokens,
            inner_steps=local.inner_steps,
            data_cursor=self._trainer.data_cursor,
            theta_digest=self._theta_digest,
        )
        with self._pulse.edit() as beat:
            beat.inner_steps = self._trainer.data_cursor
            beat.tokens += local.tokens
            beat.train_bits_per_byte = local.train_bits_per_byte
        with self._pulse.phase(pb.SITE_PHASE_ENCODE):
            self._site.together(self._exchange.capture)
            self._in_flight, self._waited_before = True, self._meanwhile.waited_seconds
            body = self._meanwhile.do(lambda: self._exchange.encode(plan.k))
        self._report(self._exchange.round, local)
        return header, body

    def _steps_left(self, plan: pb.RoundPlan) -> int:
        """Of the round's H inner steps, those not made during the delay of the last exchange.

        What a site has done beyond the delay, in a partition, comes on top.
        """
        ahead = min(self._trainer.local_steps, self._config.outer.delay_steps)
        return max(0, plan.inner_steps - ahead)

    def _report(self, round_: int, stats: Local) -> None:
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
                mask_density=self._trainer.mask_density,
                grad_norm=self._trainer.optimizer.last_grad_norm,
            )
            beat.totals.skipped_steps = self._trainer.optimizer.skipped_steps
            beat.totals.retries = int(retries)
            beat.totals.resumed_bytes = int(resumed_bytes)
            beat.totals.in_site_bytes = int(in_site_bytes)

    def _take_refusal(self, refused: RefusedError) -> None:
        """Nothing of a refused contribution is lost; the next directive says how to go on."""
        match refused.reason:
            case "stale_round" | "not_expected" | "digest":
                fate = "it stays in error feedback if the update does without it"
            case "corrupt":  # bounded: the coordinator quarantines after enough of them in a row
                fate = "it is sent again"
            case "payload" | "absurd":
                fate = self._retract()
            case _:
                raise refused
        if self._site.leads:
            round_ = self._exchange.round
            log.warning("contribution to round %d refused, %s: %s", round_, fate, refused)

    def _retract(self) -> str:
        """Back to theta, with the contribution in EF; what became of it, in words.

        The round goes on without this site, or asks for another contribution if it cannot.
        """
        limit = self._config.outer.max_value
        (dropped,) = self._site.sum(self._exchange.retract(limit))
        self._exchange.write_parameters(keep_progress=self._trainer.local_steps > 0)
        self._pending, self._retracted_round = None, self._exchange.round
        self._in_flight = False
        fate = "the site skips the round, error feedback takes the contribution back"
        return f"{fate} but for {dropped:.0f} values beyond {limit:g}" if dropped else fate

    def _step_meanwhile(self, away: bool) -> bool:
        """One inner step during an exchange, or because nobody answers; False: no more."""
        total = self._steps_left(self._plan) + self._trainer.local_steps
        more = away and self._plan.inner_steps and total < self._config.inner.max_local_steps
        if not more and self._delay_left() == 0:
            return False
        self._train_ahead(1)
        return True

    def _delay_left(self) -> int:
        """Inner steps still to make before the update of the exchange in flight is applied."""
        last = self._plan.first_step + self._plan.inner_steps >= self._plan.total_steps
        if not self._in_flight or last:
            return 0
        return max(0, self._config.outer.delay_steps - self._trainer.local_steps)

    def _train_ahead(self, num_steps: int) -> None:
        """Inner steps that belong to the round after this one."""
        plan = pb.RoundPlan(
            first_step=self._plan.first_step + self._plan.inner_steps,
            total_steps=self._plan.total_steps,
        )
        with self._pulse.phase(pb.SITE_PHASE_COMPUTE):
            self._trainer.train(num_steps, plan)

    def _catch_up(self, directive: pb.WaitRoundResponse) -> None:
        """Pull the update in parts, one a rank, and apply it everywhere."""
        if directive.included and not self._has_contributed():
            self._repeat(directive.plan, directive.data_cursor)
        with self._pulse.phase(pb.SITE_PHASE_PULL):
            update = self._pull(directive)
            self._session.check_update(directive.entry, self._exchange.round, update)
        self._end_delay()
        with self._pulse.phase(pb.SITE_PHASE_APPLY):
            self._exchange.settle(included=directive.included)
            self._site.together(lambda: self._exchange.apply(update))
            self._exchange.write_parameters(keep_progress=self._trainer.local_steps > 0)
            self._report_theta(directive.theta_digest)
        self._say_fate(directive.included)
        due = self._exchange.round % self._options.checkpoint_every_rounds == 0
        if self._checkpoints and due:
            self._save_checkpoint()

    def _end_delay(self) -> None:
        """Make the steps that are left of the delay: the update is applied after the last one.

        At this step and no other, however early the update came: what follows is then the same in
        every run, and after every accident.
        """
        self._train_ahead(self._delay_left())
        waited = self._meanwhile.waited_seconds - self._waited_before
        delay = self._config.outer.delay_steps
        if self._in_flight and delay and waited > SAY_WAITED_SECONDS and self._site.leads:
            log.warning(
                "waited %.1f s for the update of round %d: the exchange takes longer than "
                "outer.delay_steps = %d inner steps",
                waited,
                self._exchange.round,
                delay,
            )
        self._in_flight = False

    def _has_contributed(self) -> bool:
        """Whether this life of the site has encoded a contribution to the current round."""
        return self._pending is not None and self._pending[0].round == self._exchange.round

    def _repeat(self, plan: pb.RoundPlan, data_cursor: int) -> None:
        """An earlier life of this site contributed to this round: do what it did, send nothing.

        EF, inner optimizer and data then go on as in a life without the accident; in every bit, if
        the ranks are as many as they were.
        """
        # Steps in between that never came to be included are lost with that life: no repeating.
        self._repeats &= self._trainer.data_cursor + self._steps_left(plan) == data_cursor
        if self._repeats:
            log.info(
                "repeating the contribution of an earlier life to round %d", self._exchange.round
            )
            self._plan = plan
            self._pending = self._train(plan)
        self._trainer.data_cursor = max(self._trainer.data_cursor, data_cursor)

    def _say_fate(self, included: bool) -> None:
        """One line a round: what became of the contribution, and theta after it."""
        before = self._exchange.round - 1
        mine = before == self._retracted_round or (
            self._pending is not None and self._pending[0].round == before
        )
        fate = (
            "included" if included else "not included, kept in error feedback" if mine else "none"
        )
        if self._site.leads:
            digest = self._theta_digest[:16]
            log.info("round %d: contribution %s; theta is now %s", before, fate, digest)

    def _pull(self, directive: pb.WaitRoundResponse) -> bytes:
        if directive.HasField("update") and is_sound(directive.update):
            return directive.update.data
        size, ranks = directive.update_bytes, self._site.num_ranks
        rank, round_ = self._site.rank, self._exchange.round
        span = range(rank * size // ranks, (rank + 1) * size // ranks)
        part = self._meanwhile.do(lambda: self._session.pull(round_, span))
        update = b"".join(self._site.gather_bytes(part))
        if bytes_digest(update) != directive.update_digest:
            raise LocoError(f"the update of round {round_} came with another digest than announced")
        return update

    def _evaluate_if_due(self) -> None:
        """Measure theta every so many rounds, and the final one."""
        every, round_ = self._config.eval.every_rounds, self._exchange.round
        last = round_ == self._config.run.rounds
        if every and (round_ % every == 0 or last):
            with self._pulse.phase(pb.SITE_PHASE_EVAL), self._exchange.theta_in_model():
                measured = self._trainer.evaluate()
            with self._pulse.edit() as beat:
                beat.evaluations.add(round=round_, bits_per_byte=measured)

    def _next_directive(self) -> pb.WaitRoundResponse:
        def ask() -> bytes:
            if not self._site.leads:
                return b""
            answer = self._session.next_directive(self._exchange.round, self._theta_digest)
            return answer.SerializeToString()

        with self._pulse.phase(pb.SITE_PHASE_WAIT):
            answer = self._meanwhile.do(ask)
            return pb.WaitRoundResponse.FromString(self._site.gather_bytes(answer)[0])

    # --- joining --------------------------------------------------------------------------------

    def _get_run(self) -> pb.GetRunResponse:
        packed = self._site.from_leader(lambda: self._session.get_run().SerializeToString())
        return pb.GetRunResponse.FromString(packed)

    def _make_trainer(self) -> Trainer:
        name = self._options.site
        corpus = self._options.data or self._config.data.sites.get(name, self._config.data.corpus)
        return Trainer(self._config, self._site, name, corpus)

    def _open_checkpoints(self, run_id: str) -> Checkpoints | None:
        directory = self._options.checkpoint
        if directory is None:
            return None
        return Checkpoints(directory, self._site, run_id=run_id, name=self._options.site)

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
                log.info("going on from the checkpoint of round %d", saved.round)
                self._trainer.data_cursor = saved.data_cursor
                self._repeats = True
                self._exchange.restore(state, saved.round)
                self._trainer.go_on(saved.local_steps, saved.local_nats)
                self._report_theta(saved.theta_digest)
                return self._next_directive()
            log.warning("the checkpoint of round %d is too old: its EF is dropped", saved.round)
            self._trainer.data_cursor = max(saved.data_cursor, joined.data_cursor)
        return pb.WaitRoundResponse(
            directive=pb.DIRECTIVE_RESYNC,
            snapshot_round=joined.snapshot_round,
            theta_digest=joined.snapshot_digest,
            entry=joined.snapshot_entry,
        )

    def _save_checkpoint(self) -> None:
        assert self._checkpoints is not None
        (nats,) = self._site.sum(self._trainer.local_nats)
        self._checkpoints.save(
            Position(
                round=self._exchange.round,
                theta_digest=self._theta_digest,
                data_cursor=self._trainer.data_cursor,
                local_steps=self._trainer.local_steps,
                local_nats=nats / self._site.num_ranks,
            ),
            self._exchange.state(),
            self._trainer.optimizer.state_dict(),
            rows=self._exchange.rows,
            num_rows=self._layout.num_chunks,
        )

    def _join(self, have: Have | None) -> pb.JoinResponse:
        joined = self._become_member(have)
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
            self._pulse.start(
                self._session.address,
                self._session.access,
                self._session.caller,
                joined.heartbeat_seconds,
                self._session.wire,
            )
        return joined

    def _become_member(self, have: Have | None) -> pb.JoinResponse:
        """Join, all ranks under one incarnation; waits like any other call."""

        def ask() -> bytes:
            if not self._site.leads:
                return b""
            ranks = self._site.num_ranks
            return self._session.join(self._run, self._layout, ranks, have).SerializeToString()

        answer = self._site.gather_bytes(self._meanwhile.do(ask))[0]
        joined = pb.JoinResponse.FromString(answer)
        self._session.caller = pb.Caller(
            run_id=self._run.run_id, site=self._options.site, incarnation=joined.incarnation
        )
        return joined

    def _join_again(self, refused: RefusedError) -> None:
        """The coordinator came back with a state from before this site joined.

        Theta, EF, optimizer and place in the data stay: the next directive says whether theta is
        the run's. A coordinator that the site is ahead of is waited for, as everywhere.
        """
        log.warning("joining again: %s", refused)
        self._become_member(Have(round=self._exchange.round, theta_digest=self._theta_digest))
        with self._pulse.edit() as beat:
            beat.caller.CopyFrom(self._session.caller)

    def _load_snapshot(self, round_: int, digest: str) -> None:
        with self._pulse.phase(pb.SITE_PHASE_SYNC):
            span = self._exchange.snapshot_span
            data = self._site.together(lambda: self._session.snapshot(round_, span))
            self._exchange.load(data, round_)
            self._trainer.drop_local_steps()
            self._pending = None
            self._in_flight = False
            self._repeats = False
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
