"""The pure session logic of the device: no clock, thread, socket or model inside."""
