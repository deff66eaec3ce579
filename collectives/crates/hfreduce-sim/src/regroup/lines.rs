//! Doors, and what is said between members: a line keeps the order, two lines have none.

use std::collections::VecDeque;

use hfreduce_core::error::ErrorKind;
use hfreduce_core::reconfigure::{Message, Step};

use super::{Connection, DIAL, Event, Story};
use crate::agenda::{MICROSECOND, MILLISECOND, Time};

impl Story {
    pub(super) fn reached(&mut self, one: usize, at: usize) {
        let (attempt, line) = (self.connections[at].attempt, self.connections[at].line);
        self.connections[at].reached = true;
        if self.actors[one].attempt == attempt
            && let Some(core) = &mut self.actors[one].core
        {
            core.connected(line as usize);
            return self.act(one);
        }
        // Too late for the attempt; its refusal is told all the same.
        let mut words = Vec::new();
        if let Some((left, core)) = &mut self.actors[one].leaving
            && *left == attempt
        {
            core.connected(line as usize);
            words.extend(std::iter::from_fn(|| core.poll()));
        }
        for step in words {
            if let Step::Send { message, .. } = step {
                self.send(at, one, Some(message));
            }
        }
        self.send(at, one, None);
    }

    /// Takes what has come to the door, as far as an attempt is under way.
    pub(super) fn open_the_door(&mut self, one: usize) {
        for at in 0..self.connections.len() {
            if self.connections[at].member != one {
                continue;
            }
            while self.actors[one].core.is_some()
                && let Some(message) = self.connections[at].came.pop_front()
            {
                let attempt = self.actors[one].attempt;
                let taken = self.connections[at].taken.get_or_insert_with(|| {
                    let line = self.actors[one].next_line;
                    self.actors[one].next_line += 1;
                    (attempt, line)
                });
                let (taken_by, line) = *taken;
                self.tell(one, taken_by, line, message);
            }
        }
    }

    pub(super) fn tell(&mut self, one: usize, attempt: u32, line: u64, message: Option<Message>) {
        if self.actors[one].attempt != attempt {
            return;
        }
        let Some(core) = &mut self.actors[one].core else { return };
        match message {
            Some(message) => core.received(line, message),
            None => core.lost(line, ErrorKind::PeerDied, "closed"),
        }
        self.act(one);
    }

    pub(super) fn dial(&mut self, one: usize, member: usize) {
        let (now, attempt) = (self.agenda.now(), self.actors[one].attempt);
        let whom = self.actors[one].list[member];
        let gave_up = Event::GaveUp { coordinator: one, attempt, member };
        if self.severed(one, whom) || self.actors[whom].stopped {
            return self.agenda.plan(now + DIAL, gave_up);
        }
        let soon = now + self.latency();
        if self.actors[whom].dead {
            return self.agenda.plan(soon, gave_up);
        }
        let (line, last) = (member as u64, [soon; 2]);
        let (taken, came) = (None, VecDeque::new());
        let (member, reached) = (whom, false);
        let connection =
            Connection { coordinator: one, attempt, line, member, reached, taken, came, last };
        self.connections.push(connection);
        self.agenda.plan(soon, Event::Reached(self.connections.len() - 1));
    }

    pub(super) fn say(&mut self, one: usize, line: u64, message: Message) {
        let attempt = self.actors[one].attempt;
        let found = self.connections.iter().position(|connection| {
            (connection.coordinator == one
                && (connection.attempt, connection.line) == (attempt, line))
                || (connection.member == one && connection.taken == Some((attempt, line)))
        });
        if let Some(at) = found {
            self.send(at, one, Some(message));
        }
    }

    pub(super) fn send(&mut self, at: usize, from: usize, message: Option<Message>) {
        let arrival = self.agenda.now() + self.latency();
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
        self.agenda.plan(arrival, event);
    }

    pub(super) fn severed(&self, one: usize, other: usize) -> bool {
        one != other && (self.actors[one].unplugged || self.actors[other].unplugged)
    }

    pub(super) fn latency(&mut self) -> Time {
        20 * MICROSECOND + self.seed.below(5 * MILLISECOND)
    }
}
