//! Capacities of nodes and networks: constants with their sources. "Paper" is the Fire-Flyer AI-HPC paper, by
//! section. Rates are in bytes per second, times in seconds.

use serde::Serialize;

const GB: f64 = 1e9;
const GIB: f64 = (1_u64 << 30) as f64;

/// How values move between a node's accelerators and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerators {
    /// The values are in the node's memory: no copies.
    None,
    /// Every accelerator sends all of its values and receives the whole result.
    Single,
    /// Paired accelerators add their values first: each sends and receives one half for its pair.
    NvlinkPairs,
}

/// A node and its share of the network.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hardware {
    /// How values move to and from accelerators.
    pub accelerators: Accelerators,
    /// Accelerators in a node. Paper III-A: 8.
    pub accelerators_per_node: usize,
    /// One accelerator's PCIe 4.0 x16 link, each way. Paper IV-D3: "over 27 GB/s".
    pub pcie_rate: f64,
    /// Capacity shared by two accelerators, both directions together: the port between their PCIe root complex
    /// and the processor's fabric. Paper IV-D3: about 37.5 GB/s, less per direction when both are used. The
    /// paper does not quantify the loss; the port is modelled as one resource for both directions.
    pub root_port_rate: f64,
    /// Bytes of a PCIe packet besides its payload: framing 4, header of 64-bit addresses 16, checksum 4 (PCIe 4.0).
    pub pcie_packet: f64,
    /// Payload of the packets that an accelerator's copy engine writes, and for which the rates above were
    /// measured: 256, the usual maximum.
    pub copy_engine_payload: f64,
    /// Payload of the packets that a processor writes (GDRCopy): one write-combining buffer, 64.
    pub processor_payload: f64,
    /// NVLink between two accelerators, each way. Paper III-A: 600 GB/s both ways together.
    pub nvlink_rate: f64,
    /// Memory bandwidth of a node, reads and writes together. Paper IV-D3: 320 GB/s practical from 16 channels.
    pub memory_rate: f64,
    /// NUMA nodes (sockets). Paper III-A: 2. Values from accelerators are spread over all of them; sums and
    /// network buffers are bound to the NUMA node of the network card (paper IV-D1).
    pub memory_nodes: usize,
    /// Read rate of the processor during sums: assigned cores times the rate of a core. Assumed: 6 cores that
    /// each read 20 GB/s while adding (half of what newer cores do). Above every other limit.
    pub reduce_rate: f64,
    /// The network card, each way. Paper III-A: 200 Gb/s.
    pub network_rate: f64,
    /// Bytes on the wire for a payload of `network_payload` bytes: the payload and its headers.
    pub network_frame: f64,
    /// Payload of a frame. InfiniBand: 4,096, with 30 bytes of headers and checksums; Ethernet over TCP: 1,448
    /// in 1,514.
    pub network_payload: f64,
    /// Latency from card to card, including a few switches. InfiniBand in a fat tree: 2 µs for the wire and 3
    /// µs until a thread has seen the completion.
    pub network_latency: f64,
    /// Capacity of one link between two zones, each way.
    pub zone_link_rate: f64,
    /// Extra latency between zones.
    pub zone_latency: f64,
    /// Rate between an accelerator and the network card directly, if the processor does not chain PCIe writes.
    /// Paper IV-D2: about 9 GiB/s. Only used for the ring.
    pub peer_to_peer_rate: f64,
}

impl Hardware {
    /// The paper's node with eight PCIe A100 and one 200 Gb/s card.
    pub const FIRE_FLYER_2: Self = Self {
        accelerators: Accelerators::Single,
        accelerators_per_node: 8,
        pcie_rate: 27.0 * GB,
        root_port_rate: 37.5 * GB,
        pcie_packet: 24.0,
        copy_engine_payload: 256.0,
        processor_payload: 64.0,
        nvlink_rate: 300.0 * GB,
        memory_rate: 320.0 * GB,
        memory_nodes: 2,
        reduce_rate: 6.0 * 20.0 * GB,
        network_rate: 25.0 * GB,
        network_frame: 4096.0 + 30.0,
        network_payload: 4096.0,
        network_latency: 5e-6,
        zone_link_rate: 25.0 * GB,
        zone_latency: 2e-6,
        peer_to_peer_rate: 9.0 * GIB,
    };

    /// The same node with NVLink bridges between pairs.
    pub const FIRE_FLYER_2_NVLINK: Self =
        Self { accelerators: Accelerators::NvlinkPairs, ..Self::FIRE_FLYER_2 };

    /// The same node with the network as the only limit.
    pub const FIRE_FLYER_2_NETWORK: Self = Self {
        accelerators: Accelerators::None,
        memory_rate: 1e15,
        reduce_rate: 1e15,
        ..Self::FIRE_FLYER_2
    };

    /// Nodes on Ethernet at `bits_per_second` with values in memory and TCP between them, and one such link
    /// between two zones.
    pub fn ethernet(bits_per_second: f64) -> Self {
        Self {
            accelerators: Accelerators::None,
            memory_rate: 20.0 * GB,
            memory_nodes: 1,
            reduce_rate: 20.0 * GB,
            network_rate: bits_per_second / 8.0,
            network_frame: 1514.0,
            network_payload: 1448.0,
            // A one-way hop through two TCP stacks on one node was measured at 6 to 30 µs.
            network_latency: 30e-6,
            zone_link_rate: bits_per_second / 8.0,
            zone_latency: 10e-6,
            ..Self::FIRE_FLYER_2
        }
    }

    /// PCIe cost of a byte that a processor writes, relative to a byte that a copy engine writes.
    pub fn processor_write_cost(&self) -> f64 {
        let cost = |payload: f64| (payload + self.pcie_packet) / payload;
        cost(self.processor_payload) / cost(self.copy_engine_payload)
    }

    /// The limit of a root port that two accelerators share, for HFReduce: each sends its values and receives
    /// the result.
    pub fn root_port_limit(&self) -> f64 {
        let share = if self.accelerators == Accelerators::NvlinkPairs { 0.5 } else { 1.0 };
        self.root_port_rate / (2.0 * share * (1.0 + self.processor_write_cost()))
    }

    /// Number of streams of values that the processor sums on a node.
    pub fn streams(&self) -> usize {
        match self.accelerators {
            Accelerators::None => 1,
            Accelerators::Single => self.accelerators_per_node,
            Accelerators::NvlinkPairs => self.accelerators_per_node / 2,
        }
    }

    /// Bytes on the wire for `payload` bytes.
    pub fn on_the_wire(&self, payload: f64) -> f64 {
        payload * self.network_frame / self.network_payload
    }

    /// Upper bound of an allreduce over a double tree: every card sends and receives each byte twice.
    pub fn network_limit(&self) -> f64 {
        self.network_rate / 2.0 * self.network_payload / self.network_frame
    }

    /// The memory limit if all memory were one NUMA node: the paper's 24 accesses (IV-D3) for eight streams.
    pub fn memory_limit(&self) -> f64 {
        let streams = self.streams() as f64;
        self.memory_rate / (streams + streams + 1.0 + 5.0 + self.memory_nodes as f64)
    }
}
