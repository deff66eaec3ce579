//! A model of TCP over a link with a finite queue: slow start, congestion avoidance, one halving per
//! window with losses (a packet is lost if later ones have arrived), a probe of the last packet and
//! a retransmission timeout if nothing arrives.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(super) const PACKET_BYTES: u64 = 1500;
const INITIAL_WINDOW: f64 = 10.0;
/// Linux' limit of an automatically tuned receive buffer, in packets.
const WINDOW_MAX: f64 = 4000.0;
/// Later transmissions that must arrive before one counts as lost.
const REORDERING: u64 = 3;

/// Direction of a connection from a service to a receiver.
pub(super) struct Tcp {
    window: f64,
    threshold: f64,
    /// Packets that the application has written.
    written: u64,
    next: u64,
    /// Packet of each transmission.
    transmissions: Vec<u64>,
    /// Transmissions that are neither acknowledged nor lost, and their packets.
    in_flight: BTreeMap<u64, u64>,
    lost: VecDeque<u64>,
    /// Losses of earlier transmissions belong to the window that has been halved.
    recovery: u64,
    /// Packets that have arrived, beyond those before `arrived_before`.
    arrived: BTreeSet<u64>,
    arrived_before: u64,
    /// Changes with each acknowledgement; a timer of an older one is void.
    pub timer: u64,
    pub timeouts: u64,
}

impl Default for Tcp {
    fn default() -> Self {
        Self {
            window: INITIAL_WINDOW,
            threshold: WINDOW_MAX,
            written: 0,
            next: 0,
            transmissions: Vec::new(),
            in_flight: BTreeMap::new(),
            lost: VecDeque::new(),
            recovery: 0,
            arrived: BTreeSet::new(),
            arrived_before: 0,
            timer: 0,
            timeouts: 0,
        }
    }
}

impl Tcp {
    /// Writes whole packets; returns the number of packets written so far.
    pub(super) fn write(&mut self, bytes: u64) -> u64 {
        self.written += bytes.div_ceil(PACKET_BYTES);
        self.written
    }

    /// Transmissions to be sent now.
    pub(super) fn send(&mut self) -> Vec<u64> {
        let mut sent = Vec::new();
        while (self.in_flight.len() as f64) < self.window {
            let packet = match self.lost.pop_front() {
                Some(packet) => packet,
                None if self.next < self.written => {
                    self.next += 1;
                    self.next - 1
                }
                None => break,
            };
            sent.push(self.transmit(packet));
        }
        sent
    }

    fn transmit(&mut self, packet: u64) -> u64 {
        let transmission = self.transmissions.len() as u64;
        self.transmissions.push(packet);
        self.in_flight.insert(transmission, packet);
        transmission
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// At the receiver; returns whether the packet is new, and the number of packets that have
    /// arrived without a gap.
    pub(super) fn arrive(&mut self, transmission: u64) -> (bool, u64) {
        let packet = self.transmissions[transmission as usize];
        let is_new = packet >= self.arrived_before && self.arrived.insert(packet);
        while self.arrived.remove(&self.arrived_before) {
            self.arrived_before += 1;
        }
        (is_new, self.arrived_before)
    }

    pub(super) fn acknowledge(&mut self, transmission: u64) {
        self.timer += 1;
        let packet = self.transmissions[transmission as usize];
        if self.in_flight.remove(&transmission).is_none() {
            return;
        }
        // Another transmission of the same packet is not needed any more.
        self.in_flight.retain(|_, other| *other != packet);
        self.window += if self.window < self.threshold { 1.0 } else { 1.0 / self.window };
        self.window = self.window.min(WINDOW_MAX);
        while let Some((&other, &packet)) = self.in_flight.first_key_value()
            && other + REORDERING < transmission
        {
            self.in_flight.remove(&other);
            self.lost.push_back(packet);
            if other >= self.recovery {
                self.recovery = self.transmissions.len() as u64;
                self.threshold = (self.window / 2.0).max(2.0);
                self.window = self.threshold;
            }
        }
    }

    /// Nothing has arrived for a few round trips: sends the last packet again.
    pub(super) fn probe(&mut self) -> Option<u64> {
        let (_, packet) = self.in_flight.last_key_value().map(|it| (*it.0, *it.1))?;
        Some(self.transmit(packet))
    }

    /// No acknowledgement has arrived for the retransmission timeout.
    pub(super) fn time_out(&mut self) {
        self.timer += 1;
        self.timeouts += 1;
        self.threshold = (self.window / 2.0).max(2.0);
        self.window = 1.0;
        self.recovery = self.transmissions.len() as u64;
        let packets: BTreeSet<u64> = std::mem::take(&mut self.in_flight).into_values().collect();
        for packet in packets.into_iter().rev() {
            self.lost.push_front(packet);
        }
    }
}
