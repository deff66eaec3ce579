"""What runs on each node: inventory, device plugin, health. Knows no other part of the suite."""
