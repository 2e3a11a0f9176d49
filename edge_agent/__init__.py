"""The device side: drafts tokens with a small model and asks the cloud which are right."""
