"""`mjolnir profiles list|show|check|use`.

Exit code 1: the appliance or this machine is at fault; 2: what was typed, or a profile's file.
"""

import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from appliance.errors import ApplianceError, EngineError, SettingsError

if TYPE_CHECKING:
    from appliance.settings import Settings

profiles_app = typer.Typer(no_args_is_help=True, help="Profiles: a model and all that belongs to it.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[
    Path | None,
    typer.Option(help="The user's profiles.", show_default="MJOLNIR_PROFILES_DIR, ~/.config/mjolnir/profiles"),
]
_POLL_SECONDS = 0.5
_USERS_FAULT = (400, 401, 403, 404, 415, 422)
_REQUEST_SECONDS = 10.0


@profiles_app.command("list")
def list_(profiles_dir: Folder = None, as_json: Json = False) -> None:
    """Show every profile; one of the user's hides the shipped one of its name."""
    from appliance.profiles.store import Store  # noqa: PLC0415

    rows = []
    for entry in Store(_given(profiles_dir).profiles_dir).entries():
        told = entry.profile.description if entry.profile else entry.problem
        usable = entry.profile is not None
        rows.append({"name": entry.name, "from": entry.origin, "usable": usable, "description": told})
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    table = Table(box=None)
    for column in ("name", "from", "description"):
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(str(row[column])) for column in ("name", "from", "description")))
    Console().print(table)


@profiles_app.command()
def show(name: str, profiles_dir: Folder = None, as_json: Json = False) -> None:
    """Show a profile, and the flags of `vllm serve` that it stands for."""
    from appliance.profiles.choice import flags  # noqa: PLC0415
    from appliance.profiles.store import Store, read  # noqa: PLC0415

    file = Store(_given(profiles_dir).profiles_dir).file(name)
    profile = read(file)
    words = [word for one in flags(profile) for word in one]
    told: dict[str, Any] = {"file": str(file), **profile.model_dump(mode="json", exclude_none=True), "flags": words}
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    table = Table(show_header=False, box=None)
    for key, value in told.items():
        if value not in ([], {}):
            table.add_row(key, escape(shlex.join(value) if isinstance(value, list) else str(value)))
    Console().print(table)


@profiles_app.command()
def check(
    name: Annotated[str, typer.Argument(help="Name, or a file that ends in .yaml.")],
    profiles_dir: Folder = None,
    as_json: Json = False,
) -> None:
    """Check a profile, and whether this machine has what it needs; asks nobody, starts nothing.

    Exit code 0: nothing is in its way; 1: this machine lacks something; 2: the profile can't be used.
    """
    from appliance.profiles.choice import apply, replaced  # noqa: PLC0415
    from appliance.profiles.fit import findings  # noqa: PLC0415
    from appliance.profiles.store import SUFFIX, Store, read  # noqa: PLC0415

    given = _given(profiles_dir)
    file = Path(name) if name.endswith(SUFFIX) else Store(given.profiles_dir).file(name)
    profile = read(file)
    found = findings(profile, apply(profile, given))
    problems = [one.text for one in found if one.fatal]
    notes = [one.text for one in found if not one.fatal] + replaced(profile, given)
    if as_json:
        sys.stdout.write(json.dumps({"name": profile.name, "problems": problems, "notes": notes}) + "\n")
    else:
        lines = [f"problem: {line}" for line in problems] + [f"note: {line}" for line in notes]
        sys.stdout.write("".join(f"{line}\n" for line in lines or [f"{profile.name}: nothing is in its way here"]))
    if problems:
        raise typer.Exit(1)


@profiles_app.command()
def use(
    name: Annotated[str, typer.Argument(help='Name; "" goes back to the settings of the start.')],
    url: Annotated[str, typer.Option(help="Address of the appliance.")] = "http://127.0.0.1:8000",
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with an admin key.", show_default="MJOLNIR_ADMIN_KEY_FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Have a running appliance switch, and wait until the new profile is ready or the old one is back."""
    from appliance.host.adminkey import admin_key  # noqa: PLC0415
    from appliance.host.readiness import words_of  # noqa: PLC0415
    from appliance.host.status import fetch  # noqa: PLC0415
    from appliance.host.terminal import Terminal  # noqa: PLC0415

    key = admin_key(admin_key_file)
    address = url.rstrip("/")
    try:
        _post(f"{address}/admin/profile", {"name": name}, key)
    except EngineError as error:
        later = f"MJOLNIR_PROFILE={name} in .env, or `mjolnir serve --profile {name}`"
        raise EngineError(f"{error}; for the next start: {later}") from None
    with Terminal(quiet=as_json) as terminal:
        while (outcome := fetch(f"{address}/admin/profile", key))["state"] == "switching":
            terminal.say(words_of(fetch(f"{address}/status", key)))
            time.sleep(_POLL_SECONDS)  # the outcome has no stream of its own, and the switch goes on without us
    if as_json:
        sys.stdout.write(json.dumps(outcome) + "\n")
    if outcome["state"] != "done":
        raise EngineError(f"{name} did not take over, the engine from before runs: {outcome['reason']}")
    if not as_json:
        sys.stdout.write(f"{name or 'the settings of the start'}: ready\n")


def _post(url: str, body: dict[str, Any], key: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{url}: not an address; accepted: http://HOST:PORT")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310  (the user's own address)
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS):  # noqa: S310
            return
    except urllib.error.HTTPError as error:
        try:
            told = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = f"{url} answers {error.code}"
        raise (SettingsError if error.code in _USERS_FAULT else ApplianceError)(told) from None
    except (urllib.error.URLError, OSError) as error:
        raise EngineError(f"no appliance answers at {url}: {getattr(error, 'reason', error)}") from None


def _given(folder: Path | None) -> "Settings":
    """What the environment and .env set."""
    from appliance import settings  # noqa: PLC0415

    return settings.load_given(profiles_dir=folder)
