"""Target models behind one port, and what they need: slots, verification, preparation."""

import os

# How long idle threads spin before they sleep; GNU's OpenMP reads it once, when torch brings it in.
# Its own 300,000 turns take the core from the very thread they wait for as soon as other processes
# want it too: beside them a forward on two threads took 900 to 1600 ms so, 150 ms without spinning
# and 85 ms with this; on an idle machine 29, 39 and 32 ms.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
