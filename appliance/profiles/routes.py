"""Profiles over HTTP, for the operator: what there is, and the switch to another one."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from appliance.errors import ApplianceError, EngineError, SettingsError
from appliance.openai_error import ApiError
from appliance.profiles.choice import apply, replaced
from appliance.profiles.errors import UnknownProfileError
from appliance.profiles.fit import findings
from appliance.profiles.store import Entry, Store
from appliance.settings import Settings, with_profile
from appliance.supervisor import Supervisor
from appliance.target import Switched

LIST = "/admin/profiles"
SWITCH = "/admin/profile"
_LARGEST_BYTES = 4096
_OWN_ADDRESSES = ("127.0.0.1", "::1")
_OWN_NAMES = (*_OWN_ADDRESSES, "localhost")


class Wanted(BaseModel):
    """The body of a switch."""

    model_config = ConfigDict(extra="forbid")

    name: str


def profiles_router(supervisor: Supervisor, settings: Settings) -> APIRouter:
    """Routes under the admin keys; without such keys, only a program on this machine may switch.

    Args:
        supervisor: carries the switch out.
        settings: of the appliance.
    """
    router = APIRouter()
    store = Store(settings.profiles_dir)
    last: dict[str, asyncio.Future[Switched]] = {}

    @router.get(LIST)
    async def listed() -> Response:
        """Every profile, what stands in its way here, and which one runs."""
        rows = await asyncio.to_thread(lambda: [_row(entry, settings) for entry in store.entries()])
        return JSONResponse({"current": supervisor.settings.profile or None, "profiles": rows})

    @router.post(SWITCH)
    async def switch(request: Request) -> Response:
        """Begin a switch: 202, and GET tells how it goes. The present profile returns if the new one fails."""
        refused = foreign(request) or (unguarded(request) if settings.admin_keys_file is None else None)
        if refused is not None:
            return _answer(refused)
        try:
            name = Wanted.model_validate_json(await _body(request)).name
        except ValueError:
            return _answer(ApiError(400, "invalid_body", 'the body must be {"name": "PROFILE"}; "" means no profile'))
        try:
            chosen = await asyncio.to_thread(_chosen, settings, name)
            last["switch"] = supervisor.request_switch(name, chosen)
        except UnknownProfileError as error:
            return _answer(ApiError(404, "profile_not_found", str(error)))
        except EngineError as error:
            return _answer(ApiError(409, "switch_refused", str(error)))
        except ApplianceError as error:
            return _answer(ApiError(422, "profile_invalid", str(error)))
        return JSONResponse({"name": name, "state": "switching", "url": SWITCH}, 202, {"location": SWITCH})

    @router.get(SWITCH)
    async def switched() -> Response:
        """The present profile, and what came of the last switch."""
        told: dict[str, Any] = {"current": supervisor.settings.profile or None, "state": "idle"}
        if (outcome := last.get("switch")) is not None:
            told["state"] = "switching" if not outcome.done() else "done" if outcome.result().done else "returned"
            if outcome.done():
                told |= {"name": outcome.result().name, "reason": outcome.result().reason}
        return JSONResponse(told)

    return router


def _row(entry: Entry, settings: Settings) -> dict[str, Any]:
    row = {"name": entry.name, "from": entry.origin, "description": "", "model": "", "replaced": []}
    if entry.profile is None:
        return row | {"problems": [entry.problem], "notes": []}
    chosen = apply(entry.profile, settings.given)
    found = findings(entry.profile, chosen)
    return row | {
        "description": entry.profile.description,
        "model": chosen.model,
        "replaced": replaced(entry.profile, settings.given),
        "problems": [one.text for one in found if one.fatal],
        "notes": [one.text for one in found if not one.fatal],
    }


def _chosen(settings: Settings, name: str) -> Settings:
    """Settings of the profile that is asked for.

    Raises:
        SettingsError: there is none such, or it can't run here, which is better said before the present one goes.
    """
    chosen = with_profile(settings, name)
    if name:
        fatal = [one.text for one in findings(Store(settings.profiles_dir).get(name), chosen) if one.fatal]
        if fatal:
            raise SettingsError(f"profile {name} can't run here: {'; '.join(fatal)}")
    return chosen


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BYTES:
            raise ValueError("too large")
    return body


def foreign(request: Request) -> ApiError | None:
    """Refuses what a page of another site can make a browser send, which adds the operator's password by itself.

    A form can't send JSON's content type without asking first, and a browser tells where a request comes from.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return ApiError(415, "unsupported_media_type", "the content type must be application/json")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return ApiError(403, "cross_site", "requests from pages of other sites are refused")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return ApiError(403, "cross_site", "requests from pages of other sites are refused")
    return None


def unguarded(request: Request) -> ApiError | None:
    """Without admin keys: only from this machine, and under its own name, which no page of another site has."""
    peer = request.client.host if request.client else ""
    if peer in _OWN_ADDRESSES and (request.url.hostname or "") in _OWN_NAMES:
        return None
    return ApiError(403, "admin_keys_needed", "from elsewhere than this machine this needs admin_keys_file to be set")


def _answer(error: ApiError) -> Response:
    headers: dict[str, Any] = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body, error.status, headers, media_type="application/json")
