//! Services, receivers and links; events in order of their time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt;

use super::tcp::{PACKET_BYTES, Tcp};
use crate::rpc::server::{CreditRequest, Credits};

/// Nanoseconds.
type Time = u64;

const SECOND: Time = 1_000_000_000;
/// One way between a service and a receiver.
const DELAY: Time = 50_000;
/// Linux' minimum.
const RETRANSMISSION_TIMEOUT: Time = SECOND / 5;
const PROBE_TIMEOUT: Time = SECOND / 100;

pub(super) struct Config {
    pub services: usize,
    /// Rate of each receiver's link in bytes per second.
    pub receivers: Vec<u64>,
    pub queue_bytes: u64,
    /// Of a receiver, over all services.
    pub window_bytes: u64,
    pub operations_max: u64,
    pub request_bytes: u64,
    /// Memory of a service for replies.
    pub memory_bytes: u64,
    /// A receiver may hold 1/`shares` of it.
    pub shares: usize,
    /// Shortest and longest read of a disk.
    pub disk_us: (u64, u64),
    pub seconds: u64,
    pub seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Requested(usize),
    Read(usize),
    Queued(usize, u64),
    /// The link of a receiver has sent a packet.
    Sent(usize),
    Acknowledged(usize, u64),
    /// Nothing has arrived since the timer of this number was set.
    Silent(usize, u64),
    TimedOut(usize, u64),
}

/// A connection of a service and a receiver.
#[derive(Default)]
struct Connection {
    tcp: Tcp,
    /// Last packets of the replies that are being sent.
    replies: VecDeque<u64>,
}

struct Receiver {
    rate: u64,
    queue: VecDeque<(usize, u64)>,
    next_service: usize,
    in_flight: u64,
}

struct Simulation<'a> {
    config: &'a Config,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    event_count: u64,
    connections: Vec<Connection>,
    receivers: Vec<Receiver>,
    memory: Vec<Credits<usize>>,
    reads: Vec<HashMap<CreditRequest, usize>>,
    held: Vec<u64>,
    random: u64,
    report: Report,
}

pub(super) struct Report {
    limits: Vec<u64>,
    /// Bytes by receiver and service.
    bytes: Vec<Vec<u64>>,
    pub memory_max: u64,
    pub timeouts: u64,
}

impl Report {
    /// Received bytes relative to those that the link carries.
    pub(super) fn goodput(&self, receiver: usize) -> f64 {
        self.bytes[receiver].iter().sum::<u64>() as f64 / self.limits[receiver] as f64
    }

    pub(super) fn fairness_of_services(&self, receiver: usize) -> f64 {
        jain(self.bytes[receiver].iter().copied())
    }

    pub(super) fn fairness_of_receivers(&self, receivers: &[usize]) -> f64 {
        jain(receivers.iter().map(|receiver| self.bytes[*receiver].iter().sum()))
    }
}

/// Jain's index: 1 if all are equal, 1/n if one has everything.
fn jain(values: impl Iterator<Item = u64>) -> f64 {
    let values: Vec<f64> = values.map(|value| value as f64).collect();
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (squares.max(1.0) * values.len() as f64)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for receiver in 0..self.bytes.len() {
            let jain = self.fairness_of_services(receiver);
            write!(f, "goodput {:.3} Jain {jain:.3}, ", self.goodput(receiver))?;
        }
        write!(f, "{} KiB in a service, {} time-outs", self.memory_max >> 10, self.timeouts)
    }
}

pub(super) fn simulate(config: &Config) -> Report {
    let receivers = config.receivers.len();
    let memory =
        || Credits::new(config.memory_bytes as usize, config.memory_bytes as usize / config.shares);
    let mut simulation = Simulation {
        config,
        now: 0,
        events: BinaryHeap::new(),
        event_count: 0,
        connections: (0..config.services * receivers).map(|_| Connection::default()).collect(),
        receivers: config.receivers.iter().map(|rate| Receiver::new(*rate)).collect(),
        memory: (0..config.services).map(|_| memory()).collect(),
        reads: vec![HashMap::new(); config.services],
        held: vec![0; config.services],
        random: config.seed,
        report: Report {
            limits: config.receivers.iter().map(|rate| rate * config.seconds).collect(),
            bytes: vec![vec![0; config.services]; receivers],
            memory_max: 0,
            timeouts: 0,
        },
    };
    for receiver in 0..receivers {
        simulation.request(receiver);
    }
    while let Some(Reverse((time, _, event))) = simulation.events.pop()
        && time <= config.seconds * SECOND
    {
        simulation.now = time;
        simulation.handle(event);
    }
    simulation.report.timeouts = simulation.connections.iter().map(|it| it.tcp.timeouts).sum();
    simulation.report
}

impl Receiver {
    fn new(rate: u64) -> Self {
        Self { rate, queue: VecDeque::new(), next_service: 0, in_flight: 0 }
    }
}

impl Simulation<'_> {
    fn after(&mut self, delay: Time, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((self.now + delay, self.event_count, event)));
    }

    fn connection(&self, service: usize, receiver: usize) -> usize {
        service * self.receivers.len() + receiver
    }

    fn service_of(&self, connection: usize) -> usize {
        connection / self.receivers.len()
    }

    fn receiver_of(&self, connection: usize) -> usize {
        connection % self.receivers.len()
    }

    /// The receiver requests as much as its window permits, from the services in turn.
    fn request(&mut self, receiver: usize) {
        let bytes = self.config.request_bytes;
        let window = self.config.window_bytes.min(self.config.operations_max * bytes);
        while self.receivers[receiver].in_flight + bytes <= window {
            let service = self.receivers[receiver].next_service % self.config.services;
            self.receivers[receiver].next_service += 1;
            self.receivers[receiver].in_flight += bytes;
            let connection = self.connection(service, receiver);
            self.after(DELAY, Event::Requested(connection));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Requested(connection) => {
                let (service, receiver) =
                    (self.service_of(connection), self.receiver_of(connection));
                let bytes = self.config.request_bytes as usize;
                let request = self.memory[service].request(receiver, None, bytes);
                self.reads[service].insert(request, connection);
                self.read(service);
            }
            Event::Read(connection) => self.write(connection),
            Event::Queued(connection, packet) => self.queue(connection, packet),
            Event::Sent(receiver) => self.sent(receiver),
            Event::Acknowledged(connection, packet) => {
                self.connections[connection].tcp.acknowledge(packet);
                self.send(connection);
            }
            Event::Silent(connection, timer) => {
                let tcp = &mut self.connections[connection].tcp;
                if tcp.timer == timer
                    && let Some(transmission) = tcp.probe()
                {
                    self.after(DELAY, Event::Queued(connection, transmission));
                    self.after(RETRANSMISSION_TIMEOUT, Event::TimedOut(connection, timer));
                }
            }
            Event::TimedOut(connection, timer) => {
                let tcp = &mut self.connections[connection].tcp;
                if tcp.timer == timer && tcp.is_waiting() {
                    tcp.time_out();
                    self.send(connection);
                }
            }
        }
    }

    /// A service reads what it has memory for.
    fn read(&mut self, service: usize) {
        for request in self.memory[service].grant() {
            let Some(connection) = self.reads[service].remove(&request) else { continue };
            self.held[service] += self.config.request_bytes;
            self.report.memory_max = self.report.memory_max.max(self.held[service]);
            let (shortest, longest) = self.config.disk_us;
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let latency = shortest + (self.random >> 33) % (longest - shortest);
            self.after(latency * 1_000, Event::Read(connection));
        }
    }

    fn write(&mut self, connection: usize) {
        let state = &mut self.connections[connection];
        let last = state.tcp.write(self.config.request_bytes);
        state.replies.push_back(last);
        self.send(connection);
    }

    fn send(&mut self, connection: usize) {
        let tcp = &mut self.connections[connection].tcp;
        let (packets, timer) = (tcp.send(), tcp.timer);
        for packet in packets {
            self.after(DELAY, Event::Queued(connection, packet));
        }
        self.after(PROBE_TIMEOUT, Event::Silent(connection, timer));
    }

    /// A packet at the link of its receiver: dropped if the queue is full.
    fn queue(&mut self, connection: usize, packet: u64) {
        let receiver = self.receiver_of(connection);
        let state = &mut self.receivers[receiver];
        if (state.queue.len() as u64 + 1) * PACKET_BYTES > self.config.queue_bytes {
            return;
        }
        state.queue.push_back((connection, packet));
        if state.queue.len() == 1 {
            let transmission = PACKET_BYTES * SECOND / state.rate;
            self.after(transmission, Event::Sent(receiver));
        }
    }

    fn sent(&mut self, receiver: usize) {
        let state = &mut self.receivers[receiver];
        let Some((connection, packet)) = state.queue.pop_front() else { return };
        if !state.queue.is_empty() {
            let transmission = PACKET_BYTES * SECOND / state.rate;
            self.after(transmission, Event::Sent(receiver));
        }
        self.after(DELAY, Event::Acknowledged(connection, packet));
        let (is_new, arrived) = self.connections[connection].tcp.arrive(packet);
        if is_new {
            let service = self.service_of(connection);
            self.report.bytes[receiver][service] += PACKET_BYTES;
        }
        while let Some(last) = self.connections[connection].replies.front()
            && *last <= arrived
        {
            self.connections[connection].replies.pop_front();
            self.received(connection);
        }
    }

    fn received(&mut self, connection: usize) {
        let (service, receiver) = (self.service_of(connection), self.receiver_of(connection));
        let bytes = self.config.request_bytes;
        self.held[service] -= bytes;
        self.memory[service].release(receiver, bytes as usize);
        self.read(service);
        let state = &mut self.receivers[receiver];
        state.in_flight -= bytes;
        self.request(receiver);
    }
}
