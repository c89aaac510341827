"""HEALTHCHECK of the image: does the supervisor answer?

It asks /health, which answers while the supervisor runs, also during a start of an hour. /health/ready would call a
start, a drain or a restart of the engine unhealthy, which the supervisor handles by itself. Standard library only, no
proxy: exit code 0 when /health answers 200, else 1 with one line.
"""

import http.client
import os
import sys

SECONDS = 5.0


def main() -> int:
    """Ask once."""
    port = os.environ.get("MJOLNIR_PORT") or "8000"
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"no answer on port {port}: {error}\n")
        return 1
    finally:
        connection.close()
    sys.stdout.write(f"/health answers {status}\n")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
