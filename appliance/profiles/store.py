"""Where profiles are: the recipes of this package and the user's folder, whose files hide recipes of their name."""

import os
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from appliance import demo_model
from appliance.profiles import loader
from appliance.profiles.errors import ProfileError, UnknownProfileError
from appliance.profiles.schema import NAME, Profile

SUFFIX = ".yaml"
DEMO = "mjolnir:demo"  # the model of scripts/demo, which an image has in a place of its own


@dataclass(frozen=True)
class Entry:
    """A profile as it is listed.

    Attributes:
        name: of the file, without its suffix.
        path: the file.
        shipped: whether it is a recipe of ours.
        hides: whether it is the user's in place of a recipe.
        profile: what it holds; None when it can't be used.
        problem: why, in one line.
    """

    name: str
    path: Path
    shipped: bool
    hides: bool
    profile: Profile | None
    problem: str = ""

    @property
    def origin(self) -> str:
        """Whose it is, for people."""
        return "shipped" if self.shipped else "yours, hides a shipped one" if self.hides else "yours"


class Store:
    """The profiles that can be used here.

    Args:
        folder: the user's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recipes = Path(str(resources.files("appliance.profiles").joinpath("recipes")))

    def entries(self) -> list[Entry]:
        """All of them by name, those that can't be used too."""
        shipped, own = _files(self._recipes), _files(self.folder)
        found = {**shipped, **own}
        return [
            _entry(name, path, name not in own, name in shipped and name in own) for name, path in sorted(found.items())
        ]

    def file(self, name: str) -> Path:
        """The file of a profile.

        Raises:
            UnknownProfileError: there is none.
        """
        files = {**_files(self._recipes), **_files(self.folder)}
        if name not in files:
            known = ", ".join(sorted(files))
            raise UnknownProfileError(
                f"profile={name[:80]!r}: there is none; accepted: {known} (yours are looked for in {self.folder})"
            )
        return files[name]

    def get(self, name: str) -> Profile:
        """The profile of a name.

        Raises:
            UnknownProfileError: there is none.
            ProfileError: its file can't be used.
        """
        return read(self.file(name))


def read(path: Path) -> Profile:
    """A profile from its file; the demo's has its model where it is on this machine.

    Raises:
        ProfileError: the file can't be used.
    """
    profile = loader.load(path)
    if profile.model != DEMO:
        return profile
    inside = Path(sys.prefix) / "models" / demo_model.NAME
    return profile.model_copy(update={"model": str(inside if inside.is_dir() else demo_model.model_path())})


def _entry(name: str, path: Path, shipped: bool, hides: bool) -> Entry:
    try:
        return Entry(name, path, shipped, hides, read(path))
    except ProfileError as error:
        return Entry(name, path, shipped, hides, None, str(error))


def _files(folder: Path) -> dict[str, Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    paths = (folder / name for name in names if name.endswith(SUFFIX))
    return {path.stem: path for path in paths if NAME.fullmatch(path.stem)}
