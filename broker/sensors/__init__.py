"""What a machine can say about itself: energy, temperature, throttling, CPU time and memory.

Edge and cloud read the same files of ``/proc`` and ``/sys`` with it. What a machine does not have
is ``None``: never a zero, never a guess that is not called one. Every reader takes the root of the
tree that it reads, so that tests lay down a board's files in a folder.

* ``sampler.py``: ``Sampler`` asks all readers and never raises; ``BackgroundSampler`` does so on a
  thread of its own and keeps the last answer.
* ``energy.py``: joules since the start, from the one source that the machine has.
* ``power.py``: watts, of the boards that measure power and not energy.
* ``heat.py``, ``machine.py``: the rest.
"""

from __future__ import annotations

from broker.sensors.machine import machine_model
from broker.sensors.sampler import BackgroundSampler, Readings, Sampler
from broker.sensors.settings import add_watts_flag, check_watts

__all__ = [
    "BackgroundSampler",
    "Readings",
    "Sampler",
    "add_watts_flag",
    "check_watts",
    "machine_model",
]
