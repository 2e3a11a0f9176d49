"""The fleet in a terminal: ``cloud-verifier top``."""
