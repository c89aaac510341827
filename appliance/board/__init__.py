"""What the board says about itself: temperatures, power, clocks, fans, memory, power mode.

Every reader takes the root of the file tree (``/``, or a recorded one in tests), every field is optional and
nothing here raises: JetPack releases differ in what they show, a container sees less than its host, and a laptop
has other sensors than a Thor board. What can't be read is left out.
"""

from appliance.board.reading import BoardReading, Clock, Memory
from appliance.board.sampler import BoardSampler, Sample, read_board

__all__ = ["BoardReading", "BoardSampler", "Clock", "Memory", "Sample", "read_board"]
