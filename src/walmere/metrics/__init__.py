"""Metrics for Prometheus: their names, and how they are made from the status of a subscription."""
