"""The fleet's exporter: telemetry from MQTT in, series for Prometheus out."""
