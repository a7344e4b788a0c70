"""One member's life: the site whose ranks are asked anew for every step.

    begin        who is there? as before: go on; else MembersChanged, and the worker calls `meet`
    transition   all have staged a change: vote, then each commits it
    meet         agree with the others on state and order, take what is missing, form a group

On loss of a member everything that was staged and not committed is void and done again by those who
are left, with the same samples. A member that comes back takes part only when the digest of its
whole state is that of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from loco.errors import LocoError
from loco.inner.base import InnerOptimizer
from loco.inner.moving import Held
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.group import ElasticGroup
from worker.elastic.healing import Healing, Replica, standing_of
from worker.elastic.host import (
    MEET_SECONDS,
    Host,
    Rules,
    Verdict,
    answers,
    dial,
    listens,
    raise_alarm,
)
from worker.elastic.meeting import Hello, Plan, Standing
from worker.elastic.newcomer import check_that_nobody_has_a_state, wait_for_steps
from worker.elastic.quorum import Lighthouse, Member, Quorum
from worker.elastic.watch import Watch
from worker.elastic.wire import WireError, receive_frame, send_frame
from worker.progress import pack, unpack
from worker.site import MembersChanged, Site, longest_collective

log = logging.getLogger("loco.worker")

T = TypeVar("T")

AGAIN_SECONDS = 0.1
SAY_SECONDS = 5.0
END_SECONDS = 2.0  # ranks that are interrupted together are gone by then


class ElasticSite(Site):
    """This member's view of its site."""

    def __init__(
        self,
        device: torch.device,
        lighthouse: str,
        *,
        slot: int,
        rules: Rules,
        interface: str,
        rank_timeout_seconds: float,
        patience_seconds: float,
        shard_backup: bool,
    ) -> None:
        super().__init__(device, ElasticGroup(None, name="", rank=0))
        self._rules = rules
        self._rank_timeout_seconds = rank_timeout_seconds
        self._longest_collective = longest_collective(patience_seconds)
        self._shard_backup = shard_backup
        self._host = Host(interface, rules)
        self._host.on_alarm = self._alarmed
        self._host.has_state = lambda: self.has_state
        self._store = TCPStore(interface, 0, is_master=True, wait_for_workers=False)
        self._store_address = f"{interface}:{self._store.port}"
        self.me = Member.new(slot, self._host.address)
        self._lighthouse = Lighthouse(lighthouse, self.me, patience_seconds=patience_seconds)
        self._members: tuple[Member, ...] = ()
        self._quorum: Quorum | None = None
        """The last answer of the lighthouse; a meeting of it made the group."""
        self._news: Quorum | None = None
        """An answer that nobody has acted on yet."""
        self._standing: Standing | None = None
        self._staged: tuple[Callable[[], None], Standing | None, _Backup | None] | None = None
        self._backup: _Backup | None = None
        self._healing: Healing | None = None
        """How this member, who has no state, comes to that of the others."""
        self._watch: Watch | None = None
        self._told = pb.Membership()

    @property
    def num_shards(self) -> int:
        """Parts of the site's contributions, however many members upload them."""
        return self._rules.target_size

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the group, in order of rank."""
        return self._members

    def membership(self) -> pb.Membership:
        """What became of the members so far; about equal on all of them."""
        return self._told

    @property
    def has_state(self) -> bool:
        """Whether this member has anything that others could go on from."""
        return self._standing is not None

    # --- every step -----------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: MembersChanged if its members are others than those of the last one.

        Who is there is asked beside the step and counts for the next one: all members have asked
        together in this step, so all learn the same. The loss of a member does not wait for it.
        A turn of waiting for the network is a step, too.
        """
        group = self._elastic_group
        if group.lost:
            raise MembersChanged(group.lost)
        self._news = self._news_of_the_last_step()
        if self._news is not None:
            raise MembersChanged(f"{len(self._news.members)} ranks are here")
        self._lighthouse.ask_beside(self._version)

    def transition(self, apply: Callable[[], None]) -> None:
        """All members have staged `apply`: they vote, then each commits it.

        On failure of the vote it raises MembersChanged, and the next meeting decides whether
        `apply` happens; it must need no other member.
        """
        group = self._elastic_group
        self._vote_and_commit(group, apply, self._backup, self._next_standing(group))

    def commit_step(
        self, optimizer: InnerOptimizer, staged: Any, count: Callable[[], None]
    ) -> None:
        """As `transition`, of a staged inner step; shards are backed up before the vote."""
        group = self._elastic_group
        staged = optimizer.settle(staged)
        backup = None
        if self._shard_backup and group.size > 1:
            backup = self._back_up(group, optimizer.held_after(staged))

        def apply() -> None:
            optimizer.commit(staged)
            count()

        self._vote_and_commit(group, apply, backup, self._next_standing(group))

    def _next_standing(self, group: ElasticGroup) -> Standing:
        return Standing(
            version=self._version + 1,
            label=group.name,
            rank=group.rank,
            size=group.size,
            backup_of=-1,
        )

    def _vote_and_commit(
        self,
        group: ElasticGroup,
        apply: Callable[[], None],
        backup: _Backup | None,
        standing: Standing | None,
    ) -> None:
        if backup is not None and standing is not None:
            standing = replace(standing, backup_of=backup.rank)
        self._staged = (apply, standing, backup)
        votes = torch.ones(1, device=self.device)
        group.all_reduce_sum(votes)
        if float(votes) != group.size:
            raise MembersChanged(f"{float(votes):g} of {group.size} members voted")
        self._commit()

    def _commit(self) -> None:
        assert self._staged is not None
        apply, standing, backup = self._staged
        apply()
        self._staged, self._standing, self._backup = None, standing, backup

    def _back_up(self, group: ElasticGroup, held: Held | None) -> _Backup | None:
        """Give what this rank alone holds to the next one; what came from the one before."""
        if held is None or not self._shard_backup or group.size == 1:
            return None
        before = (group.rank - 1) % group.size
        length = torch.tensor([held.owner.numel()], device=self.device)
        lengths = group.all_gather(length).wait().view(-1)
        residual = group.shift(held.residual, held.residual.numel())
        return _Backup(before, Held(residual, group.shift(held.owner, int(lengths[before]))))

    def fetch(self, span: range, fetch: Callable[[range], memoryview]) -> bytes | memoryview:
        """Each member fetches its part over the wide-area link, and all get the whole."""
        first, size, ranks = span.start, len(span), self.num_ranks
        part = range(first + self.rank * size // ranks, first + (self.rank + 1) * size // ranks)
        return self.gather_whole(self.together(lambda: fetch(part)))

    # --- other members --------------------------------------------------------------------------

    def meet(self, replica: Replica) -> None:
        """Go on with those who are there; blocks until a group has formed and all vote for it.

        Raises:
            LocoError: this member must not go on: it was too slow, or its state was not that of
                the others.
            UnreachableError: the lighthouse did not answer for too long.
        """
        started = said = time.monotonic()
        self._host.is_busy, self._host.beside = False, replica.give_beside
        anew = self._leave_group()
        while True:
            try:
                quorum = self._with_the_living(self._next_quorum(anew=anew))
                if self._standing is None:
                    wait_for_steps(quorum.members, self._rank_timeout_seconds)
                self._attend(quorum, replica, time.monotonic() - started)
            except (MembersChanged, OSError, WireError) as why:
                anew = True
                if time.monotonic() - said > SAY_SECONDS:
                    said = time.monotonic()
                    log.info("no group for %.0f s: %s", said - started, why)
                time.sleep(AGAIN_SECONDS)
            else:
                self._host.is_busy, self._healing = True, None
                return

    def _leave_group(self) -> bool:
        """Drop the group; whether it was broken, which the others learn here."""
        group = self._elastic_group
        why = group.lost
        if self._watch is not None:
            self._watch.stop()
        if why:
            log.warning("the group of %d ranks is broken: %s", group.size, why)
            self._tell_others(group, why)
        group.drop()
        return bool(why)

    @property
    def _version(self) -> int:
        return -1 if self._standing is None else self._standing.version

    def _news_of_the_last_step(self) -> Quorum | None:
        """What the lighthouse said since the group was formed, if it is another quorum."""
        quorum = self._count(self._lighthouse.answer)
        return None if quorum == self._quorum else quorum

    def _next_quorum(self, *, anew: bool) -> Quorum:
        """That of the next meeting.

        An answer on its way is that of all who asked in this step: to ask again instead would wait
        for them, who are at the meeting of that answer.
        """
        news, self._news = self._news or self._news_of_the_last_step(), None
        return news or self._count(lambda: self._lighthouse.ask(self._version, anew=anew))

    def _count(self, ask: Callable[[], T]) -> T:
        """An answer of the lighthouse, and what this member waited for it."""
        started = time.monotonic()
        answer = ask()
        self._told.quorums += answer is not None
        self._told.quorum_seconds += time.monotonic() - started
        return answer

    def _with_the_living(self, quorum: Quorum) -> Quorum:
        """A lighthouse that has just started may leave out who lives: then it is asked again."""
        until = time.monotonic() + 2 * self._rank_timeout_seconds
        while time.monotonic() < until:
            left_out = [m for m in self._members if m not in quorum.members]
            if not any(answers(member, 1.0) for member in left_out):
                break
            log.info("a quorum leaves out %s, who lives: asking again", left_out[0])
            quorum = self._count(lambda: self._lighthouse.ask(self._version, anew=False))
        return quorum

    def _look_on(self, quorum: Quorum, source: Member, replica: Replica) -> None:
        """Fetch what can be fetched while the others train; to meet again when it is here.

        Meanwhile this member asks with them, because the lighthouse lets all wait for one that
        lives and does not ask. Who is there may change: then it is at that meeting, too.
        """
        self._standing = self._staged = self._backup = None
        self._healing = self._healing or Healing(replica, self._rules.heal_seconds)
        self._healing.begin(source)
        while not self._healing.is_over:
            now = self._count(lambda: self._lighthouse.ask(self._version, anew=False))
            if now != quorum:
                self._news = now
                return

    def _attend(self, quorum: Quorum, replica: Replica, waiting_seconds: float) -> None:
        """One meeting, from Hello to the vote for the new group."""
        try:
            with dial(quorum.members[0], 2 * MEET_SECONDS) as host:
                send_frame(host, self._hello(quorum, waiting_seconds))
                answer = receive_frame(host)
                if "plan" not in answer:
                    raise MembersChanged(answer["verdict"]["again"])
                plan = TypeAdapter(Plan).validate_python(answer["plan"])
                if plan.begins:
                    check_that_nobody_has_a_state(
                        self._lighthouse, quorum, self._rank_timeout_seconds
                    )
                if self.me.id in plan.later:
                    host.close()
                    self._look_on(quorum, Member.of(plan.later[self.me.id]), replica)
                    raise MembersChanged("most of the state of the others is here")
                send_frame(host, self._carry_out(plan, replica))
                host.settimeout(self._rules.heal_seconds + 2 * MEET_SECONDS)
                verdict = TypeAdapter(Verdict).validate_python(receive_frame(host)["verdict"])
        finally:
            self._host.source = None
        self._check(verdict)
        self._told.healed_bytes += verdict.healed_bytes
        self._form(plan, [Member.of(id_) for id_ in verdict.order], replica)
        self._quorum = quorum

    def _hello(self, quorum: Quorum, waiting_seconds: float) -> dict[str, Any]:
        hello = Hello(
            id=self.me.id,
            store=self._store_address,
            now=self._standing,
            staged=None if self._staged is None else self._staged[1],
            waiting_seconds=min(waiting_seconds, self._lighthouse.known_seconds),
            prepared=self._healing is not None and self._healing.prepared,
        )
        ids = [member.id for member in quorum.members]
        return {"kind": "hello", "number": quorum.number, "members": ids, "hello": asdict(hello)}

    def _carry_out(self, plan: Plan, replica: Replica) -> dict[str, Any]:
        """Do what the plan asks of this member; the digest of its state, or why it failed."""
        if self.me.id in plan.finish:
            self._commit()
        elif self._staged is not None:
            self._staged = None
            self._told.failed_commits += 1
        healed = 0
        try:
            if self.me.id in plan.heal:
                healed = self._heal(Member.of(plan.heal[self.me.id]))
        except (OSError, LocoError) as error:
            log.warning("the state of the site did not come: %s", error)
            return {"digest": "", "failure": str(error), "healed": 0}
        if self._standing is None:
            return {"digest": "", "failure": "", "healed": 0}
        standing = self._standing
        self._host.source = lambda: self._give(standing, replica)
        return {
            "digest": f"{standing.version} {replica.digest()}",
            "failure": "",
            "healed": healed,
        }

    def _heal(self, source: Member) -> int:
        """Take the state of another member, in bytes; until all is right this one has none."""
        assert self._healing is not None
        header = self._healing.take(source)
        self._standing = standing_of(header)
        self._told.CopyFrom(unpack(pb.Membership, header["membership"]))
        return self._healing.bytes

    def _give(
        self, standing: Standing, replica: Replica
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a new member takes, and the place that it belongs to."""
        header, tensors = replica.give()
        membership = pack(self._told)
        whole = {"standing": asdict(standing), "membership": membership, "replica": header}
        return whole, tensors

    def _check(self, verdict: Verdict) -> None:
        if self.me.id in verdict.out:
            raise LocoError(
                f"the state of this rank is not that of the others ({verdict.again}); it ends "
                "here, and a new process takes their state: check the memory of this machine"
            )
        if verdict.again:
            raise MembersChanged(verdict.again)
        if self.me.id not in verdict.order:
            raise LocoError(
                "this rank did not have the state of the others in time (see the line before); "
                "the site goes on without it. Give --heal-seconds more if the network is slow"
            )

    def _form(self, plan: Plan, members: list[Member], replica: Replica) -> None:
        """Connect, move the shards to their new ranks, and vote."""
        rank, size = members.index(self.me), len(members)
        group = ElasticGroup.form(
            self.device,
            name=plan.name,
            store=plan.store,
            rank=rank,
            size=size,
            longest=self._longest_collective,
        )
        group.bytes_sent = self.group.bytes_sent
        optimizer = replica.optimizer
        try:
            moved = optimizer.move(group, plan.change, self._held(optimizer))
            backup = self._back_up(group, optimizer.held_in(moved))
            standing = self._next_standing(group)

            divides = optimizer.held() is not None and not plan.begins
            lost = plan.change.lost_fraction if divides else 0.0

            def adopt() -> None:
                self._adopt(group, tuple(members), lost)
                optimizer.regroup(group, moved)
                replica.divided()

            self._vote_and_commit(group, adopt, backup, None if plan.begins else standing)
        except MembersChanged:
            group.drop()
            raise

    def _held(self, optimizer: InnerOptimizer) -> dict[int, Held]:
        held = {}
        own = optimizer.held()
        if own is not None and self._standing is not None and self._standing.rank >= 0:
            held[self._standing.rank] = own
        if self._backup is not None:
            held[self._backup.rank] = self._backup.held
        return held

    def _adopt(self, group: ElasticGroup, members: tuple[Member, ...], lost: float) -> None:
        self.group, self.rank, self.num_ranks = group, group.rank, group.size
        self._members = members
        self._told.members, self._told.lost_fraction = group.size, lost
        self._told.changes += 1
        if group.size > 1:
            following = members[(group.rank + 1) % group.size]
            self._watch = Watch(
                following, self._rank_timeout_seconds, lambda why: self._tell_others(group, why)
            )
        log.info(
            "going on as rank %d of %s%s",
            group.rank,
            ", ".join(str(member.slot) for member in members),
            f"; {lost:.0%} of the shards are lost and count as zero" if lost else "",
        )

    def _tell_others(self, group: ElasticGroup, why: str) -> None:
        """This group is broken: end the wait of all its members."""
        told = group.told
        group.give_up(why)
        if not told:
            raise_alarm([m for m in self._members if m != self.me], group.name, why)

    def _alarmed(self, name: str, why: str) -> None:
        group = self._elastic_group
        if name == group.name:
            group.told = True
            group.give_up(why)

    @property
    def _elastic_group(self) -> ElasticGroup:
        assert isinstance(self.group, ElasticGroup)
        return self.group

    def speaks_last(self) -> bool:
        """Whether the site ends with this member: ranks of one node end together."""
        here = self._host.address.rpartition(":")[0]
        elsewhere = [m for m in self._members if m.address.rpartition(":")[0] != here]
        until = time.monotonic() + END_SECONDS
        while elsewhere and time.monotonic() < until:
            time.sleep(AGAIN_SECONDS)
            elsewhere = [member for member in elsewhere if listens(member)]
        return self.leads and not elsewhere

    def close(self) -> None:
        """Leave the others; they go on without waiting for a time-out."""
        if self._watch is not None:
            self._watch.stop()
        dropping = self._elastic_group.drop()
        self._lighthouse.close()
        self._host.close()
        if dropping is not None:  # a thread of gloo that is cut off by exit() would abort
            dropping.join(END_SECONDS)


@dataclass(frozen=True)
class _Backup:
    """What the rank before holds, as of the last commit."""

    rank: int
    held: Held
