"""Every error that loco raises for a person to read, in one tree.

    LocoError                     exit 1   a bug or an unforeseen failure
    |- ConfigError                exit 2   bad usage or configuration; names key, value, allowed
    |  `- DataError               exit 2   a corpus that is missing, empty or of the wrong kind
    |- RefusedError               exit 3   the coordinator said no; carries its reason
    |- UnreachableError           exit 4   the coordinator did not answer within the patience
    |- NonFiniteError             exit 5   NaN or infinity in loss, gradient or pseudo-gradient
    |- CheckpointError            exit 1   a checkpoint of a site could not be written
    `- PayloadError               exit 1   malformed bytes; carries a reason from a closed list

The message of an error states the thing, the value, what is allowed and the way out. The command
line prints it as one line and exits with `exit_code`; no traceback reaches a user.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNREACHABLE = 4
EXIT_NON_FINITE = 5
EXIT_INTERRUPTED = 130


class LocoError(Exception):
    """Base of all errors of loco."""

    exit_code = EXIT_FAILED


class ConfigError(LocoError, ValueError):
    """Bad usage or configuration, found before anything starts."""

    exit_code = EXIT_USAGE


class DataError(ConfigError):
    """A corpus that is missing, empty, too short or of the wrong kind."""


class RefusedError(LocoError):
    """The coordinator refused a request; `reason` is the wire enum's name."""

    exit_code = EXIT_REFUSED

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnreachableError(LocoError):
    """The coordinator did not answer within the site's patience."""

    exit_code = EXIT_UNREACHABLE


class NonFiniteError(LocoError):
    """NaN or infinity where training needs a finite number; names the tensor or the step."""

    exit_code = EXIT_NON_FINITE


class CheckpointError(LocoError):
    """A checkpoint of a site could not be written; the ones before it are as they were."""


class PayloadError(LocoError, ValueError):
    """Malformed payload bytes.

    `reason` comes from `loco.codec.REASONS`, a closed list, because it becomes a metric label.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


def install_extra(name: str) -> str:
    """How an extra of loco's is installed; from an index that name may bring another project."""
    return f"run pip install '.[{name}]' in a checkout of loco"
