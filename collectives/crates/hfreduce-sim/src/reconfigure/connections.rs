//! Connections between members: messages of one connection arrive in order, those of two in any order.

use std::collections::VecDeque;

use hfreduce_core::error::ErrorKind;
use hfreduce_core::reconfigure::{Call, Message, Step};

use super::{Connection, DIAL, Event, Simulation};
use crate::event_queue::{MICROSECOND, MILLISECOND, Time};

impl Simulation {
    pub(super) fn reached(&mut self, id: usize, at: usize) {
        let (attempt, line) = (self.connections[at].attempt, self.connections[at].line);
        self.connections[at].reached = true;
        if self.actors[id].attempt == attempt
            && let Some(core) = &mut self.actors[id].core
        {
            core.connected(line as usize);
            return self.act(id);
        }
        // Too late for the attempt; its refusal is sent nevertheless.
        let mut steps = Vec::new();
        if let Some((refused, core)) = &mut self.actors[id].refusing
            && *refused == attempt
        {
            core.connected(line as usize);
            steps.extend(std::iter::from_fn(|| core.poll()));
        }
        for step in steps {
            if let Step::Send { message, .. } = step {
                self.send(at, id, Some(message));
            }
        }
        self.send(at, id, None);
    }

    /// Processes received messages, if an attempt is in progress.
    pub(super) fn accept_messages(&mut self, id: usize) {
        for at in 0..self.connections.len() {
            if self.connections[at].member != id {
                continue;
            }
            while self.actors[id].core.is_some()
                && let Some(message) = self.connections[at].inbox.pop_front()
            {
                let attempt = self.actors[id].attempt;
                let accepted = self.connections[at].accepted.get_or_insert_with(|| {
                    let line = self.actors[id].next_line;
                    self.actors[id].next_line += 1;
                    (attempt, line)
                });
                let (accepted_by, line) = *accepted;
                self.deliver(id, accepted_by, line, message);
            }
        }
    }

    pub(super) fn deliver(&mut self, id: usize, attempt: u32, line: u64, message: Option<Message>) {
        if self.actors[id].attempt != attempt {
            return;
        }
        let Some(core) = &mut self.actors[id].core else { return };
        match message {
            Some(message) => core.received(line, message),
            None => core.disconnected(line, ErrorKind::PeerDied, "closed"),
        }
        self.act(id);
    }

    pub(super) fn dial(&mut self, id: usize, member: usize) {
        let (now, attempt) = (self.event_queue.now(), self.actors[id].attempt);
        let peer = self.actors[id].list[member];
        let gave_up = Event::GaveUp { coordinator: id, attempt, member };
        if self.severed(id, peer) || self.actors[peer].stopped {
            return self.event_queue.plan(now + DIAL, gave_up);
        }
        let soon = now + self.latency();
        if self.actors[peer].dead {
            return self.event_queue.plan(soon, gave_up);
        }
        let (line, last) = (member as u64, [soon; 2]);
        let (accepted, inbox) = (None, VecDeque::new());
        let (member, reached) = (peer, false);
        let connection =
            Connection { coordinator: id, attempt, line, member, reached, accepted, inbox, last };
        self.connections.push(connection);
        self.event_queue.plan(soon, Event::Reached(self.connections.len() - 1));
    }

    pub(super) fn send_on(&mut self, id: usize, line: u64, message: Message) {
        let attempt = self.actors[id].attempt;
        let connection = self.connections.iter().position(|connection| {
            (connection.coordinator == id
                && (connection.attempt, connection.line) == (attempt, line))
                || (connection.member == id && connection.accepted == Some((attempt, line)))
        });
        if let Some(at) = connection {
            self.send(at, id, Some(message));
        }
    }

    /// Keeps a connection with its call for the member's next attempt, unless the coordinator has
    /// closed it.
    pub(super) fn keep(&mut self, id: usize, line: u64, call: Call) {
        let accepted = Some((self.actors[id].attempt, line));
        let is_kept = |other: &&mut Connection| other.member == id && other.accepted == accepted;
        if let Some(connection) = self.connections.iter_mut().find(is_kept) {
            connection.accepted = None;
            match connection.inbox.contains(&None) {
                true => connection.inbox.clear(),
                false => connection.inbox.push_front(Some(Message::Call(call))),
            }
        }
    }

    pub(super) fn send(&mut self, at: usize, from: usize, message: Option<Message>) {
        let arrival = self.event_queue.now() + self.latency();
        let connection = &mut self.connections[at];
        let outward = connection.coordinator == from;
        let (coordinator, member) = (connection.coordinator, connection.member);
        let last = &mut connection.last[usize::from(outward)];
        *last = arrival.max(*last + 1);
        let arrival = *last;
        if self.severed(coordinator, member) {
            return;
        }
        let event = match outward {
            true => Event::ToMember(at, message),
            false => Event::ToCoordinator(at, message),
        };
        self.event_queue.plan(arrival, event);
    }

    pub(super) fn severed(&self, id: usize, other: usize) -> bool {
        id != other && (self.actors[id].unplugged || self.actors[other].unplugged)
    }

    pub(super) fn latency(&mut self) -> Time {
        20 * MICROSECOND + self.seed.below(5 * MILLISECOND)
    }
}
