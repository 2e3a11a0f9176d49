"""What measures policies against each other: emulated links and devices."""
