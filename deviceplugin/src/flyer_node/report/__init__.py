"""The node's NodeHealth object: made of inventory and health, written through the API server."""
