"""Grafana dashboards and Prometheus rules of a fleet: ``python -m dashboards.build``."""
