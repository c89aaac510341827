"""Errors of the appliance.

ApplianceError
├── SettingsError      a setting, flag or profile that can't be used
├── PatchError         a patch queue that does not fit the tree, or a tree of another version
├── ModelError         a model folder that is missing, incomplete or corrupt
├── NoRoomError        not enough memory for a start now
├── DownloadError      a wheel that can't be had, or that is not the pinned one
├── StoppedError       a calibration that was stopped and can go on
└── EngineError        an engine that did not start or did not stay up
"""


class ApplianceError(Exception):
    """Base of every error that this package raises on purpose; its message is one line for the user."""

    exit_code = 1


class SettingsError(ApplianceError):
    """A setting or flag that can't be used: names it, its value and what is accepted."""

    exit_code = 2


class PatchError(ApplianceError):
    """A patch queue that does not fit the tree, or a tree of another version."""


class ModelError(ApplianceError):
    """A model folder that is missing, incomplete or corrupt."""


class NoRoomError(ApplianceError):
    """Not enough memory for a start now; another start may find it."""


class DownloadError(ApplianceError):
    """A wheel that can't be had, or that is not the pinned one."""


class StoppedError(ApplianceError):
    """A calibration that was stopped by a signal; started again, it goes on where it was."""

    exit_code = 130  # what a shell says of Ctrl-C


class EngineError(ApplianceError):
    """An engine that did not start or did not stay up."""
