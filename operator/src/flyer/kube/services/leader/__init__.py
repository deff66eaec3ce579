"""Leadership: terms of a leader, the resync that opens one, and the scheduling loop."""
