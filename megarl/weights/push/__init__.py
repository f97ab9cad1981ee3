"""One push: the transports, what servers are asked, and what came of it."""
