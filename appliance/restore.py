"""The operator's way back up the degrade ladder."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from appliance.errors import EngineError
from appliance.openai_error import ApiError
from appliance.profiles.routes import foreign, unguarded
from appliance.supervisor import Supervisor

RESTORE = "/admin/restore"


def restore_router(supervisor: Supervisor, *, guarded: bool) -> APIRouter:
    """The route under the admin keys; without such keys, only a program on this machine may ask.

    Args:
        supervisor: carries it out.
        guarded: whether there are admin keys.
    """
    router = APIRouter()

    @router.post(RESTORE)
    async def restore(request: Request) -> Response:
        """Restart the engine at the top of its ladder: 202, and `/status` tells how it goes."""
        refused = foreign(request) or (None if guarded else unguarded(request))
        if refused is not None:
            return _answer(refused)
        try:
            supervisor.request_restore()
        except EngineError as error:
            return _answer(ApiError(409, "restore_refused", str(error)))
        return JSONResponse({"state": "switching", "url": "/status"}, 202, {"location": "/status"})

    return router


def _answer(error: ApiError) -> Response:
    return Response(error.body, error.status, media_type="application/json")
