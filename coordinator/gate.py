"""The gate: every call passes here before it reaches the service.

It asks who calls (the certificate), whether that role may, whether a site acts as itself, and
whether it asks too often; and it is the one place where a refusal becomes gRPC's answer. A method
without a rule is closed to everyone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from cryptography import x509
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from coordinator.audit import Audit, Value
from coordinator.keys import Keys
from coordinator.limits import Limits
from coordinator.monitor import Monitor
from coordinator.notes import printable
from coordinator.refused import RefusedRequest
from loco.certs.identity import Identity, identity_of
from loco.errors import ConfigError
from loco.wire.protocol import REASON_KEY
from loco.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger("loco.coordinator")

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION = reflection.SERVICE_NAME
_LONGEST_MESSAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Who may call a method."""

    roles: frozenset[str]
    site: str | None = None
    """Path to the field of the (first) request that names the site for which it speaks."""
    audit: Callable[[Any, Any], dict[str, Value]] | None = None
    """What the audit log keeps of an accepted call, from request and response."""
    counts_as: float = 1.0
    """Requests of the caller's rate."""


_ANYONE = frozenset({"site", "operator", "reader"})
_WATCHERS = frozenset({"operator", "reader"})
_SITE = frozenset({"site"})
_OPERATOR = frozenset({"operator"})


def _member(site: str = "caller.site", **more: Any) -> Rule:
    return Rule(roles=_SITE, site=site, **more)


RULES: dict[str, Rule] = {
    f"/{SERVICE}/GetRun": Rule(roles=_ANYONE),
    f"/{SERVICE}/Join": _member(
        "site",
        counts_as=20.0,  # it is journaled, and wakes all sites that wait
        audit=lambda request, response: {
            "site": request.site,
            "shards": request.num_shards,
            "incarnation": response.incarnation,
        },
    ),
    f"/{SERVICE}/Heartbeat": _member(),
    f"/{SERVICE}/Push": _member("header.caller.site"),
    f"/{SERVICE}/PushOffset": _member("header.caller.site"),
    f"/{SERVICE}/WaitRound": _member(),
    f"/{SERVICE}/Pull": _member(),
    f"/{SERVICE}/Snapshot": _member(),
    f"/{SERVICE}/Leave": _member(
        audit=lambda request, _: {"site": request.caller.site, "reason": request.reason[:200]}
    ),
    f"/{SERVICE}/Status": Rule(roles=_ANYONE),
    f"/{SERVICE}/Probe": Rule(roles=_SITE | _OPERATOR),
    f"/{SERVICE}/Control": Rule(
        roles=_OPERATOR,
        audit=lambda request, response: {
            "verb": pb.ControlVerb.Name(request.verb).removeprefix("CONTROL_VERB_").lower(),
            "key": request.key or None,
            "value": request.value or None,
            "site": request.site or None,
            "message": response.message,
        },
    ),
    f"/{HEALTH}/Check": Rule(roles=_ANYONE),
    f"/{HEALTH}/List": Rule(roles=frozenset()),  # the library does not implement it
    f"/{HEALTH}/Watch": Rule(roles=_WATCHERS),
    f"/{REFLECTION}/ServerReflectionInfo": Rule(roles=_WATCHERS),
}


@dataclass(frozen=True)
class _Malformed:
    """Stands for a request that could not be read."""

    num_bytes: int


@dataclass
class _Call:
    """One call on its way in."""

    method: str
    rule: Rule
    peer: str
    identity: Identity | None = None

    @property
    def who(self) -> str:
        return str(self.identity or f"a caller without a certificate at {self.peer}")


class Gate(grpc.aio.ServerInterceptor):
    """`keys` is None where the coordinator speaks plaintext: then there are neither roles nor
    limits by caller."""

    def __init__(self, keys: Keys | None, limits: Limits, monitor: Monitor, audit: Audit) -> None:
        self._keys = keys
        self._limits = limits
        self._monitor = monitor
        self._audit = audit
        self._handlers: dict[str, Handler] = {}  # of the methods that exist

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._handlers[method] = self._guarded(method, handler)
        return self._handlers[method]

    def _guarded(self, method: str, handler: Handler) -> Handler:
        """The same handler behind the checks."""
        rule = RULES.get(method, Rule(roles=frozenset()))
        call = functools.partial(_Call, method, rule)
        # Generated handlers are plain tuples: the one behaviour of the four that is set is wrapped.
        if handler.response_streaming:
            behavior = handler.stream_stream or handler.unary_stream
            wrapped: Any = functools.partial(self._stream, call, behavior)
        else:
            behavior = handler.stream_unary or handler.unary_unary
            wrapped = functools.partial(self._unary, call, behavior)
        kinds = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        make = kinds[handler.request_streaming, handler.response_streaming]
        assert handler.request_deserializer is not None
        decode = functools.partial(_decode, handler.request_deserializer)
        return make(wrapped, decode, handler.response_serializer)

    # --- the two kinds of answers ---------------------------------------------------------------

    async def _unary(
        self, make_call: Callable[[str], _Call], behavior: Any, request: Any, context: Context
    ) -> Any:
        call = make_call(str(context.peer()))
        try:
            with self._admitted(call, context):
                response = await behavior(self._checked(call, request), context)
        except RefusedRequest as refused:
            await self._refuse(call, context, refused)
        except Exception as error:
            _say(call, error)
            raise
        if call.identity is not None and call.rule.site is not None:
            self._monitor.certificate(call.identity)
        if call.rule.audit is not None:
            self._audit.write(
                call.method.rpartition("/")[2].lower(),
                call.who,
                call.peer,
                **call.rule.audit(request, response),
            )
        return response

    async def _stream(
        self, make_call: Callable[[str], _Call], behavior: Any, request: Any, context: Context
    ) -> AsyncIterator[Any]:
        call = make_call(str(context.peer()))
        try:
            with self._admitted(call, context):
                answers = behavior(self._checked(call, request), context)
                if inspect.isawaitable(answers):  # it writes to the context itself
                    await answers
                    return
                async for answer in answers:
                    self._check_still(call)
                    yield answer
        except RefusedRequest as refused:
            await self._refuse(call, context, refused)
        except Exception as error:
            _say(call, error)
            raise

    # --- checks ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _admitted(self, call: _Call, context: Context) -> Iterator[None]:
        if self._keys is None:  # nobody to keep an account of: a new connection is a new caller
            if not call.rule.roles:
                raise _wrong_role(call)
            yield
            return
        call.identity = _identity(context)
        self._keys.check(call.identity)
        with self._limits.call(str(call.identity), call.rule.counts_as):
            if call.identity.role not in call.rule.roles:
                raise _wrong_role(call)
            yield

    def _checked(self, call: _Call, request: Any) -> Any:
        """The request, or the stream of them, once it is known to speak for its own site."""
        if isinstance(request, Message | _Malformed):
            message = self._check_form(call, request)
            self._check_site(call, message)
            return message
        return self._checked_stream(call, request)

    async def _checked_stream(
        self, call: _Call, requests: AsyncIterator[Message | _Malformed]
    ) -> AsyncIterator[Message]:
        first = True
        async for received in requests:
            request = self._check_form(call, received)
            if first:
                self._check_site(call, request)
                first = False
            self._check_still(call)
            if call.identity is not None:
                await self._limits.message(str(call.identity))
            yield request

    def _check_form(self, call: _Call, request: Message | _Malformed) -> Message:
        if isinstance(request, _Malformed):
            raise RefusedRequest(
                "malformed",
                f"{call.who} sent {request.num_bytes} bytes to {call.method.rpartition('/')[2]} "
                "that are not its request: install the same version of loco on both sides",
            )
        return request

    def _check_site(self, call: _Call, request: Message) -> None:
        if call.identity is None or call.rule.site is None:
            return
        named: Any = request
        for field in call.rule.site.split("."):
            named = getattr(named, field)
        if named != call.identity.name:
            raise RefusedRequest(
                "identity",
                f"{call.who} speaks for site {named!r}: a certificate acts for its own site only; "
                f"use --site {call.identity.name}, or the bundle of {named}",
            )

    def _check_still(self, call: _Call) -> None:
        if self._keys is not None and call.identity is not None:
            self._keys.check(call.identity)

    async def _refuse(self, call: _Call, context: Context, refused: RefusedRequest) -> None:
        # It may quote what a stranger sent.
        message = printable(refused.message[:_LONGEST_MESSAGE])
        if not refused.reason:
            await context.abort(grpc.StatusCode.UNAVAILABLE, message)
        self._monitor.refused(refused.reason, message)
        self._audit.refusal(
            call.who,
            call.peer,
            method=call.method,
            reason=refused.reason,
            message=message,
        )
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            message,
            trailing_metadata=((REASON_KEY, refused.reason),),
        )


def _wrong_role(call: _Call) -> RefusedRequest:
    roles = " and ".join(sorted(call.rule.roles)) or "nobody"
    return RefusedRequest(
        "role",
        f"{call.who} may not call {call.method.rpartition('/')[2]}: that is for {roles}; "
        "use another bundle",
    )


def _say(call: _Call, error: Exception) -> None:
    """What gRPC would keep to itself: the caller gets no more than the kind of the error."""
    if not isinstance(error, grpc.aio.BaseError):  # that is how `abort` leaves a method
        log.exception("%s of %s failed", call.method, call.who)


def _decode(deserialize: Callable[[bytes], Message], data: bytes) -> Message | _Malformed:
    """An exception in here would end in gRPC's own log, with a traceback, at a stranger's will."""
    try:
        return deserialize(data)
    except DecodeError:
        return _Malformed(len(data))


def _identity(context: Context) -> Identity:
    pems = tuple(context.auth_context().get("x509_pem_cert", ()))
    try:
        return _parse(bytes(pems[0]))
    except ConfigError as error:
        raise RefusedRequest("identity", str(error)) from error


@functools.lru_cache(maxsize=4096)
def _parse(pem: bytes) -> Identity:
    return identity_of(x509.load_pem_x509_certificate(pem))
