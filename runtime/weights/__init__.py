"""How weights cross between processes: what is sent, how it is proven, and the two ends of the group."""
