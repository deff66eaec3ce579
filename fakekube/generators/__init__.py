"""Objects for tests: valid samples, and random ones for property tests."""
