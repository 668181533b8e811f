"""Every mistake of a user that has a line of its own, and the table of them in docs/mistakes.md."""
