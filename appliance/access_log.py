"""One line for each request of a client: what an operator asks afterwards, and nothing of what the client said."""

import logging
import time

from appliance.throttle import TokenBucket

log = logging.getLogger("access")

LINES_PER_SECOND = 200.0  # a scanner's refusals must not push everything else out of the log
BURST_LINES = 2000.0
_SUMMARY_SECONDS = 5.0


class AccessLog:
    """Writes the lines, unless it is off; paths are the proxy's routes, never what a client made up."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._bucket = TokenBucket(LINES_PER_SECOND, BURST_LINES)
        self._dropped = 0
        self._told_at = 0.0

    def request_done(
        self, method: str, route: str, status: int, seconds: float, sent: int, key: str, request_id: str
    ) -> None:
        """Tell of a request that has been answered, or was left by its client (status 499).

        Args:
            method: HTTP method; one that is not usual is told as "other".
            route: path of the allow-list, or "other".
            status: HTTP status.
            seconds: from the request's head to the answer's last byte.
            sent: bytes of the answer's body.
            key: name of the client's key; empty where there are no keys, or it had none.
            request_id: as the answer's ``x-request-id`` tells it.
        """
        if not self._on or not log.isEnabledFor(logging.INFO):
            return
        now = time.monotonic()
        if not self._bucket.take(now):
            self._dropped += 1
            return
        if self._dropped and now - self._told_at >= _SUMMARY_SECONDS:
            log.warning(
                "%d lines dropped: more than %g a second",
                self._dropped,
                LINES_PER_SECOND,
                extra={"dropped": self._dropped},
            )
            self._dropped, self._told_at = 0, now
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE") else "other"
        fields = {
            **{"method": method, "route": route, "status": status, "seconds": round(seconds, 4), "bytes": sent},
            **{"key": key or None, "request_id": request_id},
        }
        words = f"{method} {route} {status} {seconds:.3f} s {sent} bytes key={key or '-'} id={request_id}"
        log.info("%s", words, extra=fields)
