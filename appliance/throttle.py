"""How much of something is let through: a token bucket. Pure."""


class TokenBucket:
    """Lets ``rate`` a second through for ever and ``burst`` at once; it is full to begin with."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = self._left = burst
        self._filled = 0.0

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Whether one more may pass at ``now`` (seconds of any clock that does not go back)."""
        if now > self._filled:
            self._left = min(self._burst, self._left + (now - self._filled) * self._rate)
            self._filled = now
        if self._left < cost:
            return False
        self._left -= cost
        return True
