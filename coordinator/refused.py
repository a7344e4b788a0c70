"""How a request ends early inside the coordinator."""

from __future__ import annotations

from coordinator.events import Refuse


class RefusedRequest(Exception):  # noqa: N818 - not a fault of ours: an answer
    """A refusal with its reason (wire enum, lower case); no reason means: try again later."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def check_run(run_id: str, own: str) -> None:
    """Refuse a request for another run; the message names both."""
    if run_id != own:
        raise RefusedRequest(
            "run_id",
            f"the request is for run {run_id!r}, this coordinator serves {own!r}: check the "
            "coordinator's address",
        )


def raise_refusal(answer: object) -> None:
    """Raise what the machine refused; any other answer passes."""
    if isinstance(answer, Refuse):
        raise RefusedRequest(answer.reason, answer.message)
