"""Errors of the host commands.

ApplianceError
├── HostError          something on this machine that can't be used or did not work
│   ├── DaemonError    Docker's daemon does not answer, or refused
│   ├── UpgradeError   a new version that did not take over; the old one serves again
│   └── JournalError   the record of an interrupted change can't be read or is held by another command
└── UsageError         a user's input that can't be used
"""

from appliance.errors import ApplianceError


class HostError(ApplianceError):
    """Something on this machine that can't be used or did not work."""


class DaemonError(HostError):
    """Docker's daemon does not answer, or refused."""


class UpgradeError(HostError):
    """A new version that did not take over."""


class JournalError(HostError):
    """The record of a change can't be read or written, or another command holds it."""


class UsageError(ApplianceError):
    """A user's input that can't be used: names it and what is accepted."""

    exit_code = 2
