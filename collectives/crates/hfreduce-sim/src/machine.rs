//! Transfers inside one node: values to the processor, sums, results back, and the network card's reads and
//! writes of memory. Every step queues at each resource that it needs and ends with the slowest.
//!
//! ```text
//!   GPU ─ PCIe ─┬─ root port ─┐                     ┌─ far memory:  half of the values
//!   GPU ─ PCIe ─┘             ├─ processor's fabric ┤
//!   GPU ─ PCIe ─── (own port) ┘                     └─ near memory: the other half, sums, network ── card
//! ```

use crate::event_queue::{Pipe, Time};
use crate::hardware::{Accelerators, Hardware};

/// The resources of one node.
#[derive(Debug, Clone)]
pub struct Machine {
    hardware: Hardware,
    near_memory: Pipe,
    far_memory: Pipe,
    /// One accelerator with a separate port represents all of them: they do the same at the same time.
    pcie_up: Pipe,
    pcie_down: Pipe,
    root_port: Pipe,
    nvlink: Pipe,
    processor: Pipe,
    /// The two directions of the network card.
    pub transmit: Pipe,
    /// See above.
    pub receive: Pipe,
}

impl Machine {
    /// A node whose resources are idle.
    pub fn new(hardware: &Hardware) -> Self {
        let memory_node = hardware.memory_rate / hardware.memory_nodes as f64;
        Self {
            hardware: *hardware,
            near_memory: Pipe::new(memory_node),
            far_memory: Pipe::new(memory_node),
            pcie_up: Pipe::new(hardware.pcie_rate),
            pcie_down: Pipe::new(hardware.pcie_rate),
            root_port: Pipe::new(hardware.root_port_rate),
            nvlink: Pipe::new(hardware.nvlink_rate),
            processor: Pipe::new(hardware.reduce_rate),
            transmit: Pipe::new(hardware.network_rate),
            receive: Pipe::new(hardware.network_rate),
        }
    }

    /// Memory traffic that is spread over all NUMA nodes.
    fn spread(&mut self, now: Time, bytes: f64) -> Time {
        if self.hardware.memory_nodes == 1 {
            return self.near_memory.carry(now, bytes);
        }
        // More than two NUMA nodes behave as two: the near one and any other.
        let share = bytes / self.hardware.memory_nodes as f64;
        self.near_memory.carry(now, share).max(self.far_memory.carry(now, share))
    }

    /// Copies `bytes` bytes of values from every accelerator to memory.
    pub fn fetch(&mut self, now: Time, bytes: f64) -> Time {
        let each = match self.hardware.accelerators {
            Accelerators::None => return now,
            Accelerators::Single => bytes,
            Accelerators::NvlinkPairs => bytes / 2.0,
        };
        // The accelerators of a pair exchange halves and add them before they send.
        let paired = match self.hardware.accelerators {
            Accelerators::NvlinkPairs => self.nvlink.carry(now, each),
            _ => now,
        };
        let written = self.spread(now, bytes * self.hardware.streams() as f64);
        let link = self.pcie_up.carry(now, each);
        let port = self.root_port.carry(now, each * 2.0);
        paired.max(written).max(link).max(port)
    }

    /// One pass over the node's values and `partials` sums from the network.
    pub fn reduce(&mut self, now: Time, bytes: f64, partials: usize) -> Time {
        let streams = self.hardware.streams();
        if self.hardware.accelerators == Accelerators::None && partials == 0 {
            return now; // A single input is sent from where it is.
        }
        let read = self.spread(now, bytes * streams as f64);
        let near = self.near_memory.carry(now, bytes * (partials + 1) as f64);
        let added = self.processor.carry(now, bytes * (streams + partials) as f64);
        read.max(near).max(added)
    }

    /// Copies the result to every accelerator. The processor writes it (GDRCopy, paper IV-D1), so that the
    /// processor of each NUMA node reads it once, whatever the number of accelerators.
    pub fn deliver(&mut self, now: Time, bytes: f64) -> Time {
        let each = match self.hardware.accelerators {
            Accelerators::None => return now,
            Accelerators::Single => bytes,
            Accelerators::NvlinkPairs => bytes / 2.0,
        };
        let read = self.near_memory.carry(now, bytes * self.hardware.memory_nodes as f64);
        let packets = each * self.hardware.processor_write_cost();
        let link = self.pcie_down.carry(now, packets);
        let port = self.root_port.carry(now, packets * 2.0);
        let paired = match self.hardware.accelerators {
            Accelerators::NvlinkPairs => self.nvlink.carry(now, each),
            _ => now,
        };
        read.max(link).max(port).max(paired)
    }

    /// The card reads data to send, or writes received data.
    pub fn card_memory(&mut self, now: Time, bytes: f64) -> Time {
        self.near_memory.carry(now, bytes)
    }

    /// (name, busy time) of each resource, to find the bottleneck.
    pub fn busy(&self) -> [(&'static str, Time); 9] {
        [
            ("near memory", self.near_memory.busy()),
            ("far memory", self.far_memory.busy()),
            ("PCIe up", self.pcie_up.busy()),
            ("PCIe down", self.pcie_down.busy()),
            ("root port", self.root_port.busy()),
            ("NVLink", self.nvlink.busy()),
            ("processor", self.processor.busy()),
            ("network out", self.transmit.busy()),
            ("network in", self.receive.busy()),
        ]
    }
}
