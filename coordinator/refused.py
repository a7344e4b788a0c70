"""How a request ends early inside the coordinator."""

from __future__ import annotations

from coordinator.events import Refuse


class RefusedRequest(Exception):  # noqa: N818 - not a fault of ours: an answer
    """A refusal with its reason (wire enum, lower case); no reason means: try again later."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def raise_if_refused(answer: object) -> None:
    """Turn the machine's refusal into the end of the request."""
    if isinstance(answer, Refuse):
        raise RefusedRequest(answer.reason, answer.message)
