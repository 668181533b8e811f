"""Training: prompts, rollouts collected and scored, the policy update, checkpoints, the ledger and the main loop."""
