//! Calls under way: how many a rank hands to its daemon, and which of them have ended there.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::paced::Served;
use super::{COLLECTIVES_MAX, Done, MESSAGES_MAX};
use crate::core::Kind;
use crate::drivers::{Submission, lock};
use crate::line::Line;

/// Calls that wait until fewer of their class are under way, in order within each class.
#[derive(Default)]
pub(super) struct Queued {
    classes: [VecDeque<Submission>; 3],
    under_way: [usize; 3],
}

impl Queued {
    // One fewer than the daemon takes: with as many it hears nothing, of what has arrived neither.
    const MOST: [usize; 3] = [COLLECTIVES_MAX - 1, MESSAGES_MAX, MESSAGES_MAX];

    fn class(kind: Kind) -> usize {
        match kind {
            Kind::Send => 1,
            Kind::Recv => 2,
            _ => 0,
        }
    }

    pub fn push(&mut self, call: Submission) {
        self.classes[Self::class(call.operation.print.kind)].push_back(call);
    }

    /// The next call that may be handed over, counted as under way.
    pub fn next(&mut self) -> Option<Submission> {
        let may = |class: &usize| self.under_way[*class] < Self::MOST[*class];
        let class = (0..3).filter(may).find(|class| !self.classes[*class].is_empty())?;
        self.under_way[class] += 1;
        self.classes[class].pop_front()
    }

    /// A call is not under way any more; true if others may have waited for that.
    pub fn ended(&mut self, kind: Kind) -> bool {
        let class = Self::class(kind);
        self.under_way[class] = self.under_way[class].saturating_sub(1);
        !self.classes[class].is_empty()
    }

    /// Those that wait.
    pub fn iter(&self) -> impl Iterator<Item = &Submission> {
        self.classes.iter().flatten()
    }

    /// Takes all of them; nothing is under way any more.
    pub fn take_all(&mut self) -> Vec<Submission> {
        std::mem::take(self).classes.into_iter().flatten().collect()
    }
}

/// The calls of a session, by ticket. What has ended is reported by the engine and not looked for.
#[derive(Default)]
pub(super) struct Calls {
    calls: HashMap<u64, Served>,
    paced: BTreeSet<u64>,
    ended: Arc<Ended>,
    kept: usize,
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

    /// Memory that they take.
    pub fn kept(&self) -> usize {
        self.kept
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
        if call.paced.is_some() {
            self.paced.insert(ticket);
        }
        self.kept += call.kept;
        self.calls.insert(ticket, call);
    }

    /// True if the rank should be told something.
    pub fn has_news(&self) -> bool {
        self.ended.any.load(Ordering::SeqCst) || self.paced().any(Served::has_news)
    }

    fn paced(&self) -> impl Iterator<Item = &Served> {
        self.paced.iter().filter_map(|ticket| self.calls.get(ticket))
    }

    /// Tells what is final of those that are under way.
    pub fn tell_delivered(&mut self, line: &mut Line<UnixStream>) {
        for ticket in &self.paced {
            if let Some(call) = self.calls.get_mut(ticket) {
                call.tell_delivered(line);
            }
        }
    }

    /// Takes out those that have ended well. One that failed stays: its group is broken.
    pub fn take_done(&mut self) -> Vec<Done> {
        if !self.ended.any.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        let tickets = std::mem::take(&mut *lock(&self.ended.tickets));
        let mut done = Vec::with_capacity(tickets.len());
        for ticket in tickets {
            let Some(call) = self.calls.get(&ticket) else { continue };
            if call.work.error().is_none() {
                done.push(Done { ticket, source: call.work.source() });
                self.kept -= self.calls.remove(&ticket).map_or(0, |call| call.kept);
                self.paced.remove(&ticket);
            }
        }
        done
    }

    pub fn have_all_ended(&self) -> bool {
        self.calls.values().all(|call| call.work.is_done())
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
