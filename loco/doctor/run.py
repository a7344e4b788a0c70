"""Checks that need the coordinator: the way there, the run's config, and what a round will cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from loco.config import Config, config_from_json
from loco.data import find_corpus
from loco.doctor.findings import Finding, fail, ok, warn
from loco.errors import LocoError, RefusedError
from loco.layout import Layout
from loco.outer import k_at
from loco.plan import Prediction, Setting, advice, predict
from loco.plan_view import layout_of_config, own_fragments
from loco.status import Status, human_bytes, human_seconds
from loco.tokens import one_tokenizer
from loco.wire.access import Access, Link, is_loopback
from loco.wire.probe import Way, measure
from loco.wire.protocol import PROTOCOL_VERSION, split_address
from loco.wire.v1 import coordinator_pb2 as pb

CALL_SECONDS = 10.0
MAX_CLOCK_SECONDS = 30.0  # of certificates: they are made valid from five minutes before
MIN_UTILISATION = 0.8  # below it a prediction is a warning


class Run:
    """What the coordinator told of itself; `reach` fills it."""

    def __init__(self, address: str, access: Access, site: str) -> None:
        self._address = address
        self._access = access
        self._site = site
        self.config: Config | None = None
        self.status: Status = {}
        self.way: Way | None = None
        self.layout: Layout | None = None

    def reach(self) -> Iterator[Finding]:
        """Connect, ask for run and status, measure the way; ends early where nothing answers."""
        try:
            yield self._security()
            link = Link(self._address, self._access)
        except LocoError as error:
            yield _failed("security", error)
            return
        try:
            yield from self._reach_by(link)
        finally:
            link.close()

    def _security(self) -> Finding:
        self._access.check(self._address)
        if self._access.bundle is None:
            if is_loopback(split_address(self._address)[0]):
                return ok("security", f"plaintext to {self._address}, on this machine")
            return warn(
                "security",
                f"plaintext to {self._address}",
                "use --bundle with a certificate of the run (loco certs issue)",
            )
        from loco.certs.bundle import read_bundle

        identity = read_bundle(self._access.bundle).identity
        if identity.role == "site" and identity.name != self._site:
            return fail(
                "security",
                f"the bundle is that of {identity}, not of site {self._site!r}",
                f"use --site {identity.name}, or the bundle of {self._site}",
                exit_code=3,
            )
        return ok("security", f"certificate of {identity}, valid from {identity.validity}")

    def _reach_by(self, link: Link) -> Iterator[Finding]:
        try:
            run = link.stub.GetRun(
                pb.GetRunRequest(protocol_version=PROTOCOL_VERSION), timeout=CALL_SECONDS
            )
            answer = link.stub.Status(
                pb.StatusRequest(protocol_version=PROTOCOL_VERSION), timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            yield _failed("coordinator", link.failure(error))
            return
        self.config = config_from_json(run.config_json)
        self.status = json.loads(answer.status_json)
        yield ok("coordinator", f"{self._address} serves run {run.run_id}, {self._where()}")
        yield self._membership()
        try:
            self.way = measure(link)
        except RefusedError as refused:
            yield warn("link", f"not measured: {refused}", "run loco doctor again")
            return
        except LocoError as error:
            yield _failed("link", error)
            return
        yield from self._judge(self.way)

    def _where(self) -> str:
        return f"round {self.status['round']} of {self.status['rounds']}, {self.status['phase']}"

    def _membership(self) -> Finding:
        for site in self.status["sites"]:
            if site["name"] == self._site:
                return self._known(site["status"])
        return ok("site", f"{self._site!r} is new to the run")

    def _known(self, state: str) -> Finding:
        if state in ("quarantined", "evicted"):
            return fail(
                "site",
                f"{self._site!r} is {state}",
                f"an operator lets it in: loco control {self._address} readmit {self._site}",
                exit_code=3,
            )
        if state in ("syncing", "ready"):
            return warn(
                "site",
                f"{self._site!r} takes part already",
                "a second worker of this name takes its place: use another name, or stop the first",
            )
        return ok("site", f"{self._site!r} was here before and may come back")

    def _judge(self, way: Way) -> Iterator[Finding]:
        # What must be equal is the protocol's version: another one is refused at the first call. An
        # image may be called 0.1.0 and a checkout of the same code 0.1.dev7.
        yield ok(
            "version",
            f"both ends speak protocol version {PROTOCOL_VERSION}; the coordinator runs loco "
            f"{way.version}, this machine {version('loco')}",
        )
        message = f"the coordinator's is {way.clock_offset_seconds:+.3f} s from ours"
        if abs(way.clock_offset_seconds) > MAX_CLOCK_SECONDS:
            yield warn("clock", message, "set the clocks (NTP): certificates and logs need them")
        else:
            yield ok("clock", message)
        yield ok(
            "link",
            f"round trip {way.rtt_seconds * 1e3:.1f} ms, up {_mbit(way.up_bytes_per_second):.1f} "
            f"Mbit/s, down {_mbit(way.down_bytes_per_second):.1f} Mbit/s",
        )

    # --- the config, on this machine ------------------------------------------------------------

    def check_config(self, corpus: str | None) -> Iterator[Finding]:
        """Whether this machine can build the model and find the site's data.

        A model of the user's own comes with data of their own: nothing can be said of either.
        """
        assert self.config is not None
        if self.config.model.file:  # which only the coordinator needs
            self.layout = Layout.of([("parameters", (self.status["params"],))])
            yield ok(
                "model", f"your own, {self.status['params']:,} parameters: loco.join checks it"
            )
            return
        try:
            self.layout = layout_of_config(self.config)
            yield ok("model", f"{self.layout.num_parameters:,} parameters")
        except LocoError as error:
            yield _failed("model", error)
        name = corpus or self.config.data.sites.get(self._site, self.config.data.corpus)
        stated = self.config.data.tokenizer_digest
        named = [] if stated is None else [("the run (data.tokenizer_digest)", stated)]
        for text, split in ((name, "train"), (self.config.data.corpus, "validation")):
            try:
                named.append((f"corpus {text!r}", find_corpus(text, split)))  # type: ignore[arg-type]
                one_tokenizer(named)
                yield ok(f"{split} data", f"{text} is here")
            except LocoError as error:
                yield _failed(f"{split} data", error)

    def predict(self, ranks: int, step_seconds: float | None) -> Iterator[Finding]:
        """What a round of this run will cost this site."""
        assert self.config is not None
        if self.way is None or self.layout is None:
            return
        seconds = step_seconds or self._measured_step()
        k = k_at(self.config.codec, self.status["round"], self.config.run.rounds)
        setting = Setting(
            layout=self.layout,
            sites=max(self.config.quorum.min_sites, self.status["sites_alive"], 1),
            ranks=ranks,
            k=k,
            k_sites=self.config.codec.k_sites,
            bits=self.config.codec.bits,
            inner_steps=self.config.inner.steps,
            fragments=self.config.outer.fragments,
            delay_steps=self.config.outer.delay_steps,
            own_fragments=own_fragments(self.config, k),
            unsent=self.config.outer.unsent,
            step_seconds=seconds or 1.0,
            up_mbit=_mbit(self.way.up_bytes_per_second),
            down_mbit=_mbit(self.way.down_bytes_per_second),
            coordinator_mbit=None,
            rtt_ms=self.way.rtt_seconds * 1e3,
            congestion=_congestion(),
        )
        p = predict(setting)
        cost = (
            f"{human_bytes(p.bytes_up)} up and {human_bytes(p.bytes_down)} down a round at "
            f"k = {setting.k}; the exchange takes {p.exchange_seconds:.2f} s"
        )
        if seconds is None:
            yield warn(
                "prediction",
                f"{cost}; no site has said yet how long an inner step takes",
                "give --step-seconds to see the utilisation",
            )
            return
        yield self._utilisation(p, cost, advice(setting))

    def _utilisation(self, p: Prediction, cost: str, told: list[str]) -> Finding:
        assert self.config is not None
        message = (
            f"{cost}, {self.config.inner.steps} inner steps {human_seconds(p.compute_seconds)}: "
            f"utilisation {p.utilisation:.0%}, bound by {p.bound_by}"
        )
        if p.utilisation < MIN_UTILISATION:
            return warn("prediction", message, "; or ".join(told))
        return ok("prediction", message)

    def _measured_step(self) -> float | None:
        """Seconds of an inner step at the slowest site that has made some."""
        seconds = [
            site["phase_seconds"]["compute"] / site["inner_steps"]
            for site in self.status["sites"]
            if site["inner_steps"] and site["phase_seconds"].get("compute")
        ]
        return max(seconds, default=None)


def _failed(check: str, error: LocoError) -> Finding:
    """Its message names the way out already."""
    return fail(check, str(error), "", exit_code=error.exit_code)


def _congestion() -> str:
    """What `loco plan` takes TCP's congestion control of this host for."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return "bbr" if control.exists() and "bbr" in control.read_text() else "cubic"


def _mbit(bytes_per_second: float) -> float:
    return 8 * bytes_per_second / 1e6


def document(findings: list[Finding], run: Run) -> dict[str, Any]:
    """What `loco doctor --json` prints."""
    way = run.way
    return {
        "findings": [
            {key: getattr(f, key) for key in ("check", "state", "message", "remedy")}
            for f in findings
        ],
        "rtt_seconds": way.rtt_seconds if way else None,
        "clock_offset_seconds": way.clock_offset_seconds if way else None,
        "up_bytes_per_second": way.up_bytes_per_second if way else None,
        "down_bytes_per_second": way.down_bytes_per_second if way else None,
    }


def checkpoint_directory(given: Path | None) -> Path:
    """Where checkpoints will lie, for the disk check."""
    return (given or Path.cwd()).absolute()
