"""The life of one rank: join, then round after round pull, H inner steps, encode, push, apply."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from loco import codec
from loco.config import config_from_json
from loco.digest import bytes_digest
from loco.errors import LocoError, NonFiniteError, RefusedError
from loco.model import layout_of
from loco.outer import GUESS_AFTER_STEPS, num_turns
from loco.wire.blocks import is_sound
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.replica import WorkerReplica
from worker.entry import Entry
from worker.exchange import NextTheta
from worker.progress import Contribution
from worker.site import MembersChanged
from worker.trainee import Local
from worker.trainer import Trainer

log = logging.getLogger("loco.worker")

SAY_WAITED_SECONDS = 0.5


class Worker(Entry):
    """One rank of a site. All ranks call everything alike; the leader also speaks for the site."""

    def run(self) -> None:
        """Train until the run is finished."""
        self._run = run = self._get_run()
        self._config = config_from_json(run.config_json)
        self._trainer = self._site.together(self._make_trainer)
        self._layout = layout_of(self._trainer.model)
        codec.warm_up_beside(self._layout.num_elements)
        self._exchange = self._kind_of_exchange(
            self._config, self._site, self._trainer.model, self._layout
        )
        self._checkpoints = self._open_checkpoints(run.run_id)
        try:
            self._live()
        except NonFiniteError:
            with self._pulse.edit() as beat:
                beat.non_finite = True
            raise
        finally:
            self._pulse.stop()
        if self._site.leads:
            self._session.leave("the run is finished")

    def _live(self) -> None:
        """Rounds until the run is finished, among whoever is there."""
        assert isinstance(self._trainer, Trainer)
        replica = WorkerReplica(self._trainer, self._exchange, self._at, self._session, self._pulse)
        self._site.meet(replica)
        while True:
            try:
                entered = self._site.has_state
                self._rounds(_ask_again() if entered else self._enter())
                return
            except MembersChanged as change:
                log.info("the members of the site change: %s", change)
                self._site.meet(replica)
                with self._pulse.edit() as beat:
                    beat.membership.CopyFrom(self._site.membership())
                self._lead()

    def _rounds(self, directive: pb.WaitRoundResponse) -> None:
        while directive.directive != pb.DIRECTIVE_FINISHED:
            try:
                self._follow(directive)
                directive = self._following(directive) or self._next_directive()
            except RefusedError as refused:
                self._overcome(refused)
                directive = _ask_again()
        self._evaluate_if_due()

    def _following(self, done: pb.WaitRoundResponse) -> pb.WaitRoundResponse | None:
        """What comes after a directive, where it said so itself: a round trip less."""
        if done.directive != pb.DIRECTIVE_UPDATE or not done.HasField("next"):
            return None
        if self._at.theta_digest != done.theta_digest:
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
        self._at.plan, self._at.repeats = plan, False
        if self._config.inner.sync_every_seconds is not None:
            self._choose_steps(plan, self._config.inner.sync_every_seconds)
        self._evaluate_if_due()
        contribution = self._prepare(plan, push=True)
        with self._pulse.phase(pb.SITE_PHASE_PUSH):
            if self._site.leads:
                self._session.ask_ahead(self._exchange.round, self._at.theta_digest)
            try:
                self._meanwhile.do(lambda: self._push(contribution), lets_in=True)
            except MembersChanged:
                self._session.forget_directive()
                raise
            except RefusedError as refused:
                self._session.forget_directive()
                self._session.forget_pushes()
                self._take_refusal(refused)

    def _prepare(self, plan: pb.RoundPlan, *, push: bool = False) -> Contribution:
        """The round's contribution; what of it is done already is not done again.

        With `push` the upload of one shard begins while the next one is encoded.
        """
        if not self._has_contributed():
            self._train(plan)
        assert self._at.pending is not None
        if not self._at.pending.shards:
            self._encode(self._at.pending, plan.k, push=push)
        return self._at.pending

    def _choose_steps(self, plan: pb.RoundPlan, seconds: float) -> None:
        """H of this site, by the time that its inner steps took lately; equal on all ranks."""
        if self._at.goal[0] == self._exchange.round:
            plan.site_steps = self._at.goal[1]  # the round has begun
            return
        mine = self._trainer.seconds_a_step if self._site.leads else 0.0
        (each,) = self._site.sum(mine)
        if each:
            least = max(1, self._config.outer.delay_steps)
            most = self._config.inner.max_local_steps
            plan.site_steps = min(max(least, round(seconds / each)), most)

    def _train(self, plan: pb.RoundPlan) -> None:
        """What is left of the round's inner steps; the pseudo-gradient is measured after them."""
        if self._at.goal[0] != self._exchange.round:
            steps = self._trainer.local_steps + self._steps_left(plan)
            self._at.goal = (self._exchange.round, steps)
        with self._pulse.phase(pb.SITE_PHASE_COMPUTE):
            self._trainer.train(self._at.goal[1] - self._trainer.local_steps, plan)
            local = self._trainer.measure()
        params = self._exchange.read()
        self._site.transition(lambda: self._capture(params, local))

    def _capture(self, params: npt.NDArray[np.float32], local: Local) -> None:
        """From here on inner steps belong to the next round."""
        header = pb.PushHeader(
            round=self._exchange.round,
            num_shards=self._site.num_shards,
            tokens=local.tokens,
            inner_steps=local.inner_steps,
            data_cursor=self._trainer.data_cursor,
            theta_digest=self._at.theta_digest,
        )
        self._exchange.capture(params)
        self._trainer.start_count()
        self._at.pending = Contribution(header, local, {})
        self._at.in_flight = True
        with self._pulse.edit() as beat:
            beat.inner_steps = self._trainer.data_cursor
            beat.tokens += local.tokens
            if local.train_bits_per_byte is not None:
                beat.train_bits_per_byte = local.train_bits_per_byte

    def _encode(self, contribution: Contribution, k: int, *, push: bool) -> None:
        """The shards of a contribution, and with a delay the guess where theta will go.

        Inner steps go on beside it until the guess is due. With `push` the upload of each shard
        begins as soon as it is there.
        """

        def begin(shard: int, body: bytes) -> None:
            self._session.begin_push(contribution.header_of(shard), body)

        guesses, made = self._guesses(), begin if push else None
        own_step = self._at.plan.own_step if guesses else 0.0
        with self._pulse.phase(pb.SITE_PHASE_ENCODE):
            staged = self._meanwhile.do(
                lambda: self._exchange.encode(k, own_step=own_step, made=made)
            )
        if guesses:
            self._train_ahead(self._delay_left())
        sums = self._site.sum(
            staged.ef_norm_sq,
            self._session.retries,
            self._session.resumed_bytes,
            self._trainer.in_site_bytes,
        )

        def keep() -> None:
            staged.keep()
            self._at.pending = replace(contribution, shards=staged.shards)
            self._at.waited_before = self._meanwhile.waited_seconds
            if guesses:
                self._exchange.anticipate()
            self._report(contribution, *sums)

        self._site.transition(keep)

    def _steps_left(self, plan: pb.RoundPlan) -> int:
        """Of the round's H inner steps, those not made during the delay of the last exchange.

        What a site has done beyond the delay, in a partition, comes on top.
        """
        ahead = min(self._trainer.local_steps, self._config.outer.delay_steps)
        return max(0, (plan.site_steps or plan.inner_steps) - ahead)

    def _report(
        self,
        contribution: Contribution,
        ef_norm_sq: float,
        retries: float,
        resumed_bytes: float,
        in_site_bytes: float,
    ) -> None:
        """What people want to know of this round, summed over the ranks, into the next beat."""
        with self._pulse.edit() as beat:
            beat.reports.add(
                round=contribution.header.round,
                train_bits_per_byte=_if_known(contribution.local.train_bits_per_byte),
                ef_norm=math.sqrt(ef_norm_sq),
                mask_density=self._trainer.mask_density,
                grad_norm=_if_known(self._trainer.optimizer.last_grad_norm),
            )
            beat.totals.skipped_steps = self._trainer.optimizer.skipped_steps
            beat.step_seconds = self._trainer.seconds_a_step
            beat.totals.up_seconds = self._session.up.seconds
            beat.totals.up_bytes = self._session.up.num_bytes
            beat.totals.down_seconds = self._session.down.seconds
            beat.totals.down_bytes = self._session.down.num_bytes
            beat.totals.retries = int(retries)
            beat.totals.resumed_bytes = int(resumed_bytes)
            beat.totals.in_site_bytes = int(in_site_bytes)
            beat.membership.CopyFrom(self._site.membership())

    def _push(self, contribution: Contribution) -> None:
        """Upload the shards that fall to this rank: its own, or its part of all."""
        site = self._site
        mine = [
            (contribution.header_of(shard), body)
            for shard, body in contribution.shards.items()
            if shard // site.shards_a_rank % site.num_ranks == site.rank
        ]
        if len(mine) > 1:
            for header, body in mine:
                self._session.begin_push(header, body)
        for header, body in mine:
            self._session.push(header, body)

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
        self._site.transition(self._take_back)
        limit, dropped = self._config.outer.max_value, self._exchange.num_dropped
        fate = "the site skips the round, error feedback takes the contribution back"
        return f"{fate} but for {dropped:.0f} values beyond {limit:g}" if dropped else fate

    def _take_back(self) -> None:
        self._exchange.retract(self._config.outer.max_value)
        self._exchange.write_parameters(keep_progress=self._has_progress())
        self._at.pending, self._at.retracted_round = None, self._exchange.round
        self._at.in_flight = False

    def _has_progress(self) -> bool:
        """Whether the replica holds inner steps that no exchange has measured yet."""
        return self._trainer.local_steps > 0 or num_turns(self._config.outer) > 1

    def _step_meanwhile(self, away: bool) -> bool:
        """One inner step during an exchange, or because nobody answers; False: no more."""
        if not (away and self._may_go_ahead()) and self._delay_left() == 0:
            return False
        self._train_ahead(1)
        return True

    def _may_go_ahead(self) -> bool:
        """Whether inner steps may come before their round; not before what is to be repeated."""
        if self._at.repeats or not self._at.plan.inner_steps:
            return False
        total = self._steps_left(self._at.plan) + self._trainer.local_steps
        return total < self._config.inner.max_local_steps

    def _delay_left(self) -> int:
        """Inner steps still to make before the update of the exchange in flight is applied.

        Or, while it is encoded, before the site goes on from its guess of the update.
        """
        if not self._delays():
            return 0
        encoding = self._at.pending is not None and not self._at.pending.shards
        due = GUESS_AFTER_STEPS if encoding and self._guesses() else self._config.outer.delay_steps
        return max(0, due - self._trainer.local_steps)

    def _delays(self) -> bool:
        """Whether an exchange is in flight whose update comes some steps later."""
        plan = self._at.plan
        last = plan.first_step + plan.inner_steps >= plan.total_steps
        return self._at.in_flight and not last

    def _guesses(self) -> bool:
        """Whether the site goes on from its guess of the update in flight until that comes."""
        long_enough = self._config.outer.delay_steps > GUESS_AFTER_STEPS
        return self._delays() and long_enough and self._at.plan.own_step > 0

    def _train_ahead(self, num_steps: int) -> None:
        """Inner steps that belong to the round after this one."""
        plan = pb.RoundPlan(
            first_step=self._at.plan.first_step + self._at.plan.inner_steps,
            total_steps=self._at.plan.total_steps,
        )
        with self._pulse.phase(pb.SITE_PHASE_COMPUTE):
            self._trainer.train(num_steps, plan)

    def _catch_up(self, directive: pb.WaitRoundResponse) -> None:
        """Pull the update in parts, one a rank, and apply it everywhere at the same step."""
        if directive.included and not self._has_contributed():
            self._repeat(directive.plan, directive.data_cursor)
        if self._has_contributed():  # EF must hold what was measured, though nobody waits for it
            self._prepare(self._at.plan)
        with self._pulse.phase(pb.SITE_PHASE_PULL):
            update = self._pull(directive)
        with self._pulse.phase(pb.SITE_PHASE_APPLY):
            staged = self._meanwhile.do(lambda: self._stage(directive, update))
        self._end_delay()
        with self._pulse.phase(pb.SITE_PHASE_APPLY):
            self._site.transition(lambda: self._apply(directive, staged))
        self._say_fate(directive.included)
        due = self._exchange.round % self._options.checkpoint_every_rounds == 0
        if self._checkpoints and due:
            self._save_checkpoint()

    def _stage(self, directive: pb.WaitRoundResponse, update: bytes | memoryview) -> NextTheta:
        """theta of the next round, if the update is the run's; while inner steps go on."""
        round_ = self._exchange.round
        if bytes_digest(update) != directive.update_digest:
            raise LocoError(f"the update of round {round_} came with another digest than announced")
        self._session.check_update(directive.entry, round_, update)
        return self._exchange.stage(update)

    def _apply(self, directive: pb.WaitRoundResponse, staged: NextTheta) -> None:
        """theta of this round becomes theta of the next, here and in the replica."""
        self._at.in_flight = False
        self._exchange.settle(included=directive.included)
        self._exchange.apply(staged)
        self._exchange.write_parameters(keep_progress=self._has_progress())
        self._report_theta(directive.theta_digest)

    def _end_delay(self) -> None:
        """Make the steps that are left of the delay: the update is applied after the last one.

        At this step and no other, however early the update came: what follows is then the same in
        every run, and after every accident.
        """
        self._train_ahead(self._delay_left())
        waited = self._meanwhile.waited_seconds - self._at.waited_before
        delay = self._config.outer.delay_steps
        if self._delays() and delay and waited > SAY_WAITED_SECONDS and self._site.leads:
            log.warning(
                "waited %.1f s for the update of round %d: the exchange takes longer than "
                "outer.delay_steps = %d inner steps",
                waited,
                self._exchange.round,
                delay,
            )

    def _has_contributed(self) -> bool:
        """Whether this life of the site has measured a contribution to the current round."""
        return self._at.pending is not None and self._at.pending.round == self._exchange.round

    def _repeat(self, plan: pb.RoundPlan, data_cursor: int) -> None:
        """An earlier life of this site contributed to this round: do what it did, send nothing.

        EF, inner optimizer and data then go on as in a life without the accident. Where steps in
        between never came to be included, they are lost with that life, and what it sent cannot be
        made again; but the largest values of the EF that this life has were in it.
        """
        round_ = self._exchange.round
        measured_from = self._trainer.data_cursor - self._trainer.local_steps
        if not self._at.repeats or measured_from + plan.site_steps != data_cursor:
            if self._at.repeats:  # and if not, nothing is left to be dropped
                log.warning(
                    "the contribution of an earlier life to round %d cannot be made again: error "
                    "feedback and %d inner steps are dropped, as where a snapshot replaces theta",
                    round_,
                    self._trainer.local_steps,
                )
            self._site.transition(lambda: self._drop_unsent(data_cursor))
            return
        log.info("repeating the contribution of an earlier life to round %d", round_)
        self._at.plan, self._at.goal = plan, (round_, plan.site_steps)
        self._prepare(plan)

    def _say_fate(self, included: bool) -> None:
        """One line a round: what became of the contribution, and theta after it."""
        before = self._exchange.round - 1
        mine = before == self._at.retracted_round or (
            self._at.pending is not None and self._at.pending.round == before
        )
        fate = (
            "included" if included else "not included, kept in error feedback" if mine else "none"
        )
        if self._site.leads:
            digest = self._at.theta_digest[:16]
            log.info("round %d: contribution %s; theta is now %s", before, fate, digest)

    def _pull(self, directive: pb.WaitRoundResponse) -> bytes | memoryview:
        if directive.HasField("update") and is_sound(directive.update):
            return directive.update.data
        size, ranks = directive.update_bytes, self._site.num_ranks
        rank, round_ = self._site.rank, self._exchange.round
        span = range(rank * size // ranks, (rank + 1) * size // ranks)
        part = self._meanwhile.do(lambda: self._session.pull(round_, span), lets_in=True)
        return self._site.gather_whole(part)

    def _evaluate_if_due(self) -> None:
        """Measure theta every so many rounds, and the final one."""
        every, round_ = self._config.eval.every_rounds, self._exchange.round
        last = round_ == self._config.run.rounds
        if self._trainer.evaluates and every and (round_ % every == 0 or last):
            with self._pulse.phase(pb.SITE_PHASE_EVAL), self._exchange.theta_in_model():
                measured = self._trainer.evaluate()
            with self._pulse.edit() as beat:
                beat.evaluations.add(round=round_, bits_per_byte=measured)

    def _next_directive(self) -> pb.WaitRoundResponse:
        def ask() -> bytes:
            if not self._site.leads:
                return b""
            answer = self._session.next_directive(self._exchange.round, self._at.theta_digest)
            return answer.SerializeToString()

        with self._pulse.phase(pb.SITE_PHASE_WAIT):
            answer = self._meanwhile.do(ask, lets_in=True)
            return pb.WaitRoundResponse.FromString(self._site.gather_bytes(answer)[0])


def _ask_again() -> pb.WaitRoundResponse:
    return pb.WaitRoundResponse(directive=pb.DIRECTIVE_WAIT)


def _if_known(value: float | None) -> float | None:
    """A field of a message: one that holds NaN would cost the whole entry."""
    return value if value is not None and math.isfinite(value) else None
