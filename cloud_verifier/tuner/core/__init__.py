"""What the tuner decides: no clock, no thread, no socket, no study storage."""
