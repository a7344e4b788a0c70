"""`loco.join`: three lines in a user's own training loop.

outer = loco.join("host:29400", site="paris", model=model, optimizer=optimizer)
while ...:
    ...                        # an inner step, made as ever
    outer.step(tokens=n)       # now and then it exchanges, and the parameters change
outer.leave()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch import nn

from loco.errors import ConfigError, NonFiniteError
from loco.inner.groups import Group
from loco.metrics import Catalogue, WireMetrics
from loco.model import bare, check_trainable
from loco.wire.access import Access
from worker.environment import number_from
from worker.guest import Baton, Guest, GuestWorker, Left, Made
from worker.options import Options, check_rate
from worker.session import Session
from worker.site import Site


def join(
    coordinator: str,
    *,
    site: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    evaluate: Callable[[], float] | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every_rounds: int = 10,
    bundle: Path | str | None = None,
    insecure: bool = False,
    patience_seconds: float = 600.0,
    link_mbit: float | None = None,
) -> Outer:
    """Join a run; returns when the model holds the run's parameters and may train.

    Every rank of the site calls it, after `init_process_group` if there are several, with replicas
    that the ranks keep equal (DistributedDataParallel, `loco.inner.Scape`). Trainable parameters
    are exchanged, frozen ones and buffers are not. The model is written to in place, between two
    inner steps; random state, learning rates and data are left alone.

    Args:
        coordinator: HOST:PORT.
        site: name of the site, equal on its ranks.
        model: any torch model whose trainable parameters are dense fp32; wrappers of
            DistributedDataParallel and torch.compile are looked through.
        optimizer: its state goes into the site's checkpoint; it is never stepped here.
        evaluate: held-out bits per byte (or any loss to show) of the model as it is then; called
            on every rank every `eval.every_rounds`, must give the same on all.
        checkpoint: directory of the site's checkpoints (outer state, parameters, optimizer), which
            all its ranks can reach. With the one of an earlier life the site goes on from there;
            `Outer.data_cursor` says at which of its inner steps.
        checkpoint_every_rounds: rounds between two checkpoints, >= 1.
        bundle: file from `loco certs issue`; needed unless the coordinator is on this machine.
        insecure: allow plaintext beyond this machine.
        patience_seconds: how long an unreachable coordinator is waited for, >= 0.
        link_mbit: rate of the site's link, > 0, for dashboards.

    Raises:
        ConfigError: an argument or the model cannot be used; names it.
        RefusedError: the coordinator said no: another model, a site's name in use, ...
        UnreachableError: it did not answer in time.
    """
    if checkpoint_every_rounds < 1:
        raise ConfigError(
            f"checkpoint_every_rounds is {checkpoint_every_rounds}; it must be at least 1"
        )
    if not patience_seconds >= 0:
        raise ConfigError(f"patience_seconds is {patience_seconds}; it must be at least 0")
    check_rate("link_mbit", link_mbit)
    model = bare(model)
    check_trainable(model)
    group = _group()
    device = next(p for p in model.parameters() if p.requires_grad).device
    options = Options(
        coordinator=coordinator,
        site=site,
        data=None,
        device=device.type,
        patience_seconds=patience_seconds,
        threads=torch.get_num_threads(),
        metrics=None,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        checkpoint_every_rounds=checkpoint_every_rounds,
        link_mbit=link_mbit,
        bundle=None if bundle is None else Path(bundle),
        insecure=insecure,
    )
    here = Site(device, group)
    baton = Baton()
    guest = Guest(here, site, model, optimizer, baton, evaluate)
    return Outer(_Rounds(options, here, guest, baton), guest, baton)


def _group() -> Group:
    world = number_from("WORLD_SIZE", 1)
    if not dist.is_initialized() and world > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world} and torch.distributed is not initialised: "
            "call torch.distributed.init_process_group before loco.join"
        )
    return Group()


class _Rounds(threading.Thread):
    """The site's rounds, beside the user's loop."""

    def __init__(self, options: Options, site: Site, guest: Guest, baton: Baton) -> None:
        super().__init__(name="loco rounds", daemon=True)
        access = Access(bundle=options.bundle, insecure=options.insecure)
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        self._session = Session(
            options.coordinator,
            options.site,
            options.patience_seconds,
            wire,
            access,
            num_ranks=site.num_ranks,
        )
        self.worker = GuestWorker(options, site, self._session)
        self.worker.make_guest = lambda: guest
        self.worker.baton = baton
        self._site = site
        self._baton = baton

    def run(self) -> None:
        if self._site.device.type == "cuda":
            torch.cuda.set_device(self._site.device)
        error: BaseException | None = None
        try:
            self.worker.run()
        except Left:
            self._say_goodbye("the training loop has left")
        except NonFiniteError as caught:
            self._say_goodbye(str(caught))
            error = caught
        except BaseException as caught:  # raised in the user's thread
            error = caught
        self._session.close()
        self._site.group.drop()  # the process group is the user's to destroy
        self._baton.end(error)

    def _say_goodbye(self, reason: str) -> None:
        """Else the others wait for the site until it counts as lost."""
        if self._site.speaks_last():
            self._session.leave(reason)


class Outer:
    """A site's membership in a run; a context manager that leaves at the end."""

    def __init__(self, rounds: _Rounds, guest: Guest, baton: Baton) -> None:
        self._rounds = rounds
        self._guest = guest
        self._baton = baton
        rounds.start()
        self._going = self._await_word()

    def __enter__(self) -> Outer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def step(self, tokens: int, loss: float | None = None) -> bool:
        """Tell of an inner step; exchanges when H of them are made. Every rank calls it.

        Args:
            tokens: that this rank trained on in this step, >= 1; a site's weight in the mean.
            loss: mean training loss of the step in nats a token, for the dashboards.

        Returns:
            Whether the run goes on; False once it is finished, and then at every call.

        Raises:
            RefusedError, UnreachableError: the site is out of the run; parameters are as they are.
            NonFiniteError: a parameter or the loss is not finite; nothing of it was sent, and the
                site has left.
        """
        if tokens < 1:
            raise ConfigError(f"tokens is {tokens}; it must be at least 1: the site's weight")
        if self._going:
            self._going = False  # whatever is raised: no further step is wanted
            self._baton.give(Made(tokens=tokens, loss=loss))
            self._going = self._await_word()
        return self._going

    def _await_word(self) -> bool:
        """Whether another step is wanted; what is raised here ends the membership, as `with` does.

        Ctrl+C comes here where others are waited for: the rounds must not outlive it.
        """
        try:
            return self._baton.await_word()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the run; inner steps since the last exchange stay in this replica only."""
        self._going = False
        self._baton.leave()
        self._rounds.join()

    @property
    def finished(self) -> bool:
        """Whether no further inner step is wanted: the run is finished, or the site has left."""
        return not self._going

    @property
    def round(self) -> int:
        """Outer round of the parameters that the site trains from."""
        return self._rounds.worker.round

    @property
    def data_cursor(self) -> int:
        """Inner steps of this site since the run's start: where to go on in its data."""
        return self._guest.data_cursor

    @property
    def local_steps(self) -> int:
        """Inner steps since the last exchange, which only this replica knows."""
        return self._guest.local_steps
