"""The autotuner: thresholds R1 and R2 per device, learnt from what the devices tell (paper 3.4)."""
