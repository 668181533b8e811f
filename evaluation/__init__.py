"""Held-out accuracy on live rollout servers."""
