//! The steps of one node: slots, copies, sums, frames, and the actions of the core.

use hfreduce_core::credit::Key;
use hfreduce_core::{Action, DataHead, Stage};
use hfreduce_transport::wire::HEAD_BYTES;

use super::{Cluster, DELIVERED, DeferredStep, Event, SETTLED};
use crate::event_queue::{Pipe, SECOND, Time};

impl Cluster {
    /// Assigns slots to the next chunks.
    pub(super) fn stage(&mut self, me: usize) {
        while self.nodes[me].staged < self.chunks
            && self.nodes[me].staged - self.nodes[me].freed < self.settings.slots as u64
        {
            let number = self.nodes[me].staged;
            let (sequence, chunk) = self.chunk(number);
            let fingerprint = self.operations[sequence as usize].fingerprint;
            let node = &mut self.nodes[me];
            node.staged += 1;
            node.state.push_back(0);
            node.to_fetch.push_back(number);
            let activated =
                if chunk.index == 0 { node.core.start(sequence, fingerprint) } else { Ok(()) };
            let activated = activated.and_then(|()| node.core.activate(sequence, chunk, None));
            debug_assert_eq!(activated, Ok(()), "nodes follow the protocol");
            self.drain(me);
        }
        self.fetch(me);
    }

    pub(super) fn settle(&mut self, me: usize, number: u64, what: u8) {
        let node = &mut self.nodes[me];
        node.state[(number - node.freed) as usize] |= what;
        while node.state.front() == Some(&(DELIVERED | SETTLED)) {
            node.state.pop_front();
            node.freed += 1;
        }
        self.stage(me);
    }

    pub(super) fn fetch(&mut self, me: usize) {
        while self.nodes[me].fetching < self.settings.depth
            && let Some(number) = self.nodes[me].to_fetch.pop_front()
        {
            let bytes = self.chunk(number).1.bytes as f64;
            let node = &mut self.nodes[me];
            node.fetching += 1;
            let at = node.machine.fetch(self.event_queue.now(), bytes);
            self.event_queue.plan(at, Event::Fetched(me, number));
        }
    }

    pub(super) fn reduce(&mut self, me: usize) {
        while self.nodes[me].reducing < self.settings.depth
            && let Some((key, partials)) = self.nodes[me].to_reduce.pop_front()
        {
            let bytes = self.bytes(key);
            let node = &mut self.nodes[me];
            node.reducing += 1;
            let at = node.machine.reduce(self.event_queue.now(), bytes, partials);
            self.event_queue.plan(at, Event::Reduced(me, key));
        }
    }

    pub(super) fn publish(&mut self, me: usize, key: Key) {
        let number = self.number(key);
        self.nodes[me].to_deliver.push_back(number);
        self.deliver(me);
    }

    pub(super) fn deliver(&mut self, me: usize) {
        while self.nodes[me].delivering < self.settings.depth
            && let Some(number) = self.nodes[me].to_deliver.pop_front()
        {
            let bytes = self.chunk(number).1.bytes as f64;
            let node = &mut self.nodes[me];
            node.delivering += 1;
            let at = node.machine.deliver(self.event_queue.now(), bytes);
            self.event_queue.plan(at, Event::Delivered(me, number));
        }
    }

    /// Sends the oldest chunk of all links first, as every link does for itself.
    pub(super) fn send(&mut self, me: usize) {
        while self.nodes[me].sending < self.settings.depth
            && let Some((key, stage, link)) = self.nodes[me].outbox.pop_first()
        {
            self.transmit(me, key, if stage == 0 { Stage::Up } else { Stage::Down }, link);
        }
    }

    fn transmit(&mut self, me: usize, key: Key, stage: Stage, link: usize) {
        let now = self.event_queue.now();
        let (_, chunk) = self.chunk(self.number(key));
        let bytes = chunk.bytes_in(stage);
        let payload = bytes as f64;
        let wire = self.hardware.on_the_wire(payload + HEAD_BYTES as f64);
        let (to, back) = self.nodes[me].ends[link];
        let node = &mut self.nodes[me];
        node.sending += 1;
        let credits = node.core.take_returns(link);
        let transmitted =
            node.machine.transmit.carry(now, wire).max(node.machine.card_memory(now, payload));
        let (from_zone, to_zone) = (node.zone, self.nodes[to].zone);
        let crossed = self.cross(from_zone, to_zone, wire, payload);
        let machine = &mut self.nodes[to].machine;
        let received = machine.receive.carry(now, wire).max(machine.card_memory(now, payload));
        let at = transmitted.max(crossed).max(received) + self.latency(from_zone, to_zone);
        self.event_queue.plan(transmitted, Event::Sent(me, key));
        let head = DataHead {
            sequence: key.0,
            chunk: key.1,
            tree: chunk.tree,
            stage,
            bytes,
            fingerprint: self.operations[key.0 as usize].fingerprint,
        };
        self.event_queue.plan(at, Event::Arrived { to, link: back, head, credits });
    }

    /// Uses the link between two zones, if the nodes are in different zones.
    fn cross(&mut self, from: usize, to: usize, wire: f64, payload: f64) -> Time {
        if from == to {
            return 0;
        }
        let rate = self.hardware.zone_link_rate;
        let link = self.zone_links.entry((from, to)).or_insert_with(|| (Pipe::new(rate), 0.0));
        link.1 += payload;
        link.0.carry(self.event_queue.now(), wire)
    }

    fn latency(&self, from: usize, to: usize) -> Time {
        let between = if from == to { 0.0 } else { self.hardware.zone_latency };
        ((self.hardware.network_latency + between) * SECOND as f64) as Time
    }

    pub(super) fn drain(&mut self, me: usize) {
        while let Some(action) = self.nodes[me].core.poll() {
            match action {
                Action::Reduce { key, partials } => {
                    self.nodes[me].deferred.insert(key, Vec::new());
                    self.nodes[me].to_reduce.push_back((key, partials.len()));
                }
                Action::Send { link, key, stage, .. } => {
                    let node = &mut self.nodes[me];
                    match node.deferred.get_mut(&key) {
                        Some(steps) => steps.push(DeferredStep::Send { link, stage }),
                        None => drop(node.outbox.insert((key, stage as u8, link))),
                    }
                }
                Action::Publish { key } => match self.nodes[me].deferred.get_mut(&key) {
                    Some(steps) => steps.push(DeferredStep::Deliver),
                    None => self.publish(me, key),
                },
                Action::Done { key } => {
                    let number = self.number(key);
                    self.settle(me, number, SETTLED);
                }
                // A result that arrives before its chunk has a slot costs one more copy; this is rare.
                Action::Move { .. } | Action::Abort { .. } => {}
            }
        }
        self.reduce(me);
        self.send(me);
        for link in 0..self.nodes[me].ends.len() {
            if self.nodes[me].core.should_return(link) {
                let credits = self.nodes[me].core.take_returns(link);
                let (to, back) = self.nodes[me].ends[link];
                let at =
                    self.event_queue.now() + self.latency(self.nodes[me].zone, self.nodes[to].zone);
                self.event_queue.plan(at, Event::Credits { to, link: back, credits });
            }
        }
    }
}
