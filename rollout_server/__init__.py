"""The rollout server: vLLM behind gRPC, its weight receiver, and the client of a fleet of such servers."""
