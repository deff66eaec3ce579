//! NCCL's ring over all accelerators, for comparison.
//!
//! In each of 2(N - 1) steps every rank sends one chunk of S/N bytes to its successor: the chunk that it
//! received in the previous step, as soon as its outgoing link is free. The ring runs through the eight
//! accelerators of a node and then over the network card, so every byte passes each accelerator's PCIe link
//! twice in and twice out, and the slowest hop determines the rate.

use crate::event_queue::{SECOND, Time, seconds};
use crate::hardware::Hardware;

/// One hop over PCIe in NCCL's tuning table, for rings with its bulk protocol: 5.7 µs.
pub const PCIE_HOP: f64 = 5.7e-6;
/// One hop over the network, from the same table: 9.6 µs.
pub const NETWORK_HOP: f64 = 9.6e-6;
/// Factor of NCCL's table for the latency of large rings over several nodes ("plateau").
pub const PLATEAU: f64 = 1.9;

/// The slowest hop of a ring through these nodes, in bytes per second.
///
/// Between accelerator and network card, the limit is the processor's rate without chained writes. Between the
/// two accelerators of a shared root port, it is the port: each of them sends and receives at once, all through
/// one port.
pub fn slowest_hop(hardware: &Hardware) -> f64 {
    let shared_port = hardware.root_port_rate / 4.0;
    hardware.peer_to_peer_rate.min(shared_port).min(hardware.pcie_rate).min(hardware.network_rate)
}

/// Duration of an allreduce of `bytes` over `nodes` nodes, in seconds.
pub fn allreduce_seconds(hardware: &Hardware, nodes: usize, bytes: u64) -> f64 {
    let per_node = hardware.accelerators_per_node;
    let ranks = nodes * per_node;
    if ranks < 2 {
        return 0.0;
    }
    let chunk = bytes as f64 / ranks as f64;
    let span = |seconds: f64| (seconds * SECOND as f64) as Time;
    let inside = (span(chunk / slowest_hop(hardware)), span(PCIE_HOP * PLATEAU));
    let between = (span(chunk / hardware.peer_to_peer_rate), span(NETWORK_HOP * PLATEAU));
    // For each rank: when its next chunk is ready, and when its outgoing link is free.
    let (mut ready, mut free): (Vec<Time>, Vec<Time>) = (vec![0; ranks], vec![0; ranks]);
    let mut next = ready.clone();
    for _ in 0..2 * (ranks - 1) {
        for (rank, next) in next.iter_mut().enumerate() {
            let before = (rank + ranks - 1) % ranks;
            let crosses = rank.is_multiple_of(per_node) && nodes > 1;
            let (busy, latency) = if crosses { between } else { inside };
            free[before] = ready[before].max(free[before]) + busy;
            *next = free[before] + latency;
        }
        std::mem::swap(&mut ready, &mut next);
    }
    seconds(ready.into_iter().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_limited_by_unchained_writes() {
        let hardware = Hardware::FIRE_FLYER_2;
        let rate = slowest_hop(&hardware);
        assert!((9.0e9..9.7e9).contains(&rate), "{rate}");
        let bytes = 186 << 20;
        let two = bytes as f64 / allreduce_seconds(&hardware, 2, bytes);
        assert!((4.4e9..5.1e9).contains(&two), "{two}");
    }
}
