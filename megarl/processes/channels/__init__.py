"""Connections between a run's processes: who may connect, messages, relays of ranks, heartbeats, the groups' stores."""
