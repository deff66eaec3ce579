"""The kubelet's device plugin interface: what is offered, the servers, and how they register."""
