"""Nodes: their state for the engine, and failure detection."""
