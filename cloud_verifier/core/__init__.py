"""The pure session and scheduling logic of a verifier: no clock, thread, socket or model inside."""
