//! Memory that fills and empties while its operation runs, on both sides of the line: the rank copies
//! what has arrived into the arena and what was delivered out of it, so the sum of the first bytes
//! runs while the last ones are on their way, as without a daemon.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::attached::Attached;
use super::{Ask, Tell};
use crate::communicator::Work;
use crate::line::Line;
use crate::pace::Pace;

/// Less than this is not told while more is sure to follow: a word costs more than the wait for it.
const STEP_BYTES: usize = 256 << 10;

impl Attached {
    /// Copies what has arrived to where the daemon finds it, and says so; true if anything has.
    pub(super) fn bring_arrived(&mut self) -> bool {
        let mut any = false;
        for ticket in &self.paced {
            let Some(call) = self.calls.get_mut(ticket) else { continue };
            let Some(end) = call.operation.input.arrived() else { continue };
            if end > call.copied.0 {
                call.laid.lay(&call.operation, call.copied.0..end);
                call.copied.0 = end;
                self.line.say(&Ask::Arrived { ticket: *ticket, end });
                any = true;
            }
        }
        any
    }

    /// Copies what is final to where its caller has it, and says so.
    pub(super) fn bring_delivered(&mut self, ticket: u64, end: usize) {
        let Some(call) = self.calls.get_mut(&ticket) else { return };
        let end = end.min(call.operation.output.bytes());
        if end > call.copied.1 {
            let rank = self.shared.identity.rank;
            call.laid.bring_range(&call.operation, call.copied.1..end, rank);
            call.copied.1 = end;
            call.operation.output.deliver(end);
        }
    }
}

/// A call that a session has given to the engine.
pub(super) struct Served {
    pub ticket: u64,
    pub work: Work,
    pub paced: Option<Paced>,
    /// Memory that it takes here.
    pub kept: usize,
}

/// Its memory fills and empties meanwhile.
pub(super) struct Paced {
    pub pace: Arc<Pace>,
    /// What of the output the rank knows to be final.
    pub told: usize,
}

impl Paced {
    fn is_worth_a_word(&self) -> bool {
        let delivered = self.pace.delivered();
        // All that came was summed: what is final now may be awaited before more comes.
        let all = delivered > self.told && delivered == self.pace.arrived();
        all || delivered >= self.told + STEP_BYTES
    }
}

impl Served {
    /// More of its input is there.
    pub fn arrived(&self, end: usize) {
        if let Some(paced) = &self.paced {
            self.work.arrived(&paced.pace, end);
        }
    }

    /// True if the rank should be told something.
    pub fn has_news(&self) -> bool {
        self.work.is_done() || self.paced.as_ref().is_some_and(Paced::is_worth_a_word)
    }

    /// Tells what is final; its end tells the rest.
    pub fn tell_delivered(&mut self, line: &mut Line<UnixStream>) {
        if !self.has_news() || self.work.is_done() {
            return;
        }
        if let Some(paced) = &mut self.paced {
            paced.told = paced.pace.delivered();
            line.say(&Tell::Delivered { ticket: self.ticket, end: paced.told });
        }
    }
}
