"""Errors of profiles: all are of the one who wrote or named one.

SettingsError
├── ProfileError           a file that is no profile
└── UnknownProfileError    a name that no file has
"""

from appliance.errors import SettingsError


class ProfileError(SettingsError):
    """A file that is no profile: names it, the line, the key, the value and what is accepted."""


class UnknownProfileError(SettingsError):
    """A name that no file has; the message names those there are."""
