//! Memory that fills and empties while its operation runs, on both sides of the line: the rank copies
//! what has arrived into the arena and what was delivered out of it, so the sum of the first bytes
//! runs while the last ones are on their way, as without a daemon.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::protocol::Response;
use hfreduce_engine::communicator::Work;
use hfreduce_shm::watermarks::Watermarks;
use hfreduce_transport::message_socket::MessageSocket;

/// Less than this is not told while more is sure to follow: a word costs more than the wait for it.
const STEP_BYTES: usize = 256 << 10;

/// A call that a session has given to the engine.
pub(crate) struct Served {
    pub ticket: u64,
    pub work: Work,
    pub pipelined: Option<Pipelined>,
    /// Memory that it takes here.
    pub kept: usize,
}

/// Its memory fills and empties meanwhile.
pub(crate) struct Pipelined {
    pub watermarks: Arc<Watermarks>,
    /// What of the output the rank knows to be final.
    pub told: usize,
}

impl Pipelined {
    fn is_worth_a_word(&self) -> bool {
        let delivered = self.watermarks.delivered();
        // All that came was summed: what is final now may be awaited before more comes.
        let all = delivered > self.told && delivered == self.watermarks.arrived();
        all || delivered >= self.told + STEP_BYTES
    }
}

impl Served {
    /// More of its input is there.
    pub fn arrived(&self, end: usize) {
        if let Some(pipelined) = &self.pipelined {
            self.work.arrived(&pipelined.watermarks, end);
        }
    }

    /// True if the rank should be told something.
    pub fn has_updates(&self) -> bool {
        self.work.is_done() || self.pipelined.as_ref().is_some_and(Pipelined::is_worth_a_word)
    }

    /// Tells what is final; its end tells the rest.
    pub fn tell_delivered(&mut self, line: &mut MessageSocket<UnixStream>) {
        if !self.has_updates() || self.work.is_done() {
            return;
        }
        if let Some(pipelined) = &mut self.pipelined {
            pipelined.told = pipelined.watermarks.delivered();
            line.send(&Response::Delivered { ticket: self.ticket, end: pipelined.told });
        }
    }
}
