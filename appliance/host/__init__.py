"""Host side of the appliance: its container through Docker's API, upgrades that survive a power loss, the doctor.

``docker compose up -d`` and ``mjolnir up`` make the same container with the same limits, from the same ``.env``; the
second needs no compose plugin. One of them owns a container: what compose made is shown by ``mjolnir status`` and
``mjolnir logs``, and the commands that would change it name the compose line to use instead.

Names of the containers, for the appliance ``mjolnir``: ``mjolnir`` serves, ``mjolnir-previous`` is what ``rollback``
goes back to; ``mjolnir-next`` and ``mjolnir-old`` exist only while one takes over from the other.
"""
