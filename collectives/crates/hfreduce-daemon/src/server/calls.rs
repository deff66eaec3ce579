//! Calls of a session that are in progress.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::pipelined::Served;
use crate::protocol::Done;
use hfreduce_engine::driver::lock;
use hfreduce_transport::message_socket::MessageSocket;

/// Calls of a session, by ticket. The engine reports completed calls; they are not polled.
#[derive(Default)]
pub(crate) struct Calls {
    calls: HashMap<u64, Served>,
    pipelined: BTreeSet<u64>,
    ended: Arc<Ended>,
    charged_bytes: usize,
}

#[derive(Default)]
struct Ended {
    any: AtomicBool,
    tickets: Mutex<Vec<u64>>,
}

impl Calls {
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Memory charged for the calls.
    pub fn charged_bytes(&self) -> usize {
        self.charged_bytes
    }

    pub fn contains(&self, ticket: u64) -> bool {
        self.calls.contains_key(&ticket)
    }

    pub fn get(&self, ticket: u64) -> Option<&Served> {
        self.calls.get(&ticket)
    }

    pub fn insert(&mut self, call: Served) {
        let (ticket, ended) = (call.ticket, self.ended.clone());
        call.work.when_ended(Box::new(move || {
            lock(&ended.tickets).push(ticket);
            ended.any.store(true, Ordering::SeqCst);
        }));
        if call.pipelined.is_some() {
            self.pipelined.insert(ticket);
        }
        self.charged_bytes += call.charged_bytes;
        self.calls.insert(ticket, call);
    }

    /// True if there is an update for the rank.
    pub fn has_updates(&self) -> bool {
        self.ended.any.load(Ordering::SeqCst) || self.pipelined().any(Served::has_updates)
    }

    fn pipelined(&self) -> impl Iterator<Item = &Served> {
        self.pipelined.iter().filter_map(|ticket| self.calls.get(ticket))
    }

    /// Reports final output of pipelined calls in progress.
    pub fn send_delivered(&mut self, line: &mut MessageSocket<UnixStream>) {
        for ticket in &self.pipelined {
            if let Some(call) = self.calls.get_mut(ticket) {
                call.send_delivered(line);
            }
        }
    }

    /// Removes completed calls. A failed call stays: its group is broken.
    pub fn take_done(&mut self) -> Vec<Done> {
        if !self.ended.any.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        let tickets = std::mem::take(&mut *lock(&self.ended.tickets));
        let mut results = Vec::with_capacity(tickets.len());
        for ticket in tickets {
            let Some(call) = self.calls.get(&ticket) else { continue };
            if call.work.error().is_none() {
                results.push(Done { ticket, source: call.work.source() });
                self.charged_bytes -=
                    self.calls.remove(&ticket).map_or(0, |call| call.charged_bytes);
                self.pipelined.remove(&ticket);
            }
        }
        results
    }

    pub fn have_all_ended(&self) -> bool {
        self.calls.values().all(|call| call.work.is_done())
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
