"""Node agent of Fire-Flyer: inventory, device plugin and health of PCIe GPU nodes."""
