//! Pipelined buffers on the server side: the reduction of the first bytes runs while the last ones
//! are being copied, as without a daemon.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::protocol::Response;
use hfreduce_engine::communicator::Work;
use hfreduce_shm::watermarks::Watermarks;
use hfreduce_transport::message_socket::MessageSocket;

/// Smaller progress is not reported while more follows: a message costs more than the wait for it.
const STEP_BYTES: usize = 256 << 10;

/// A call that a session has submitted to the engine.
pub(crate) struct Served {
    pub ticket: u64,
    pub work: Work,
    pub pipelined: Option<Pipelined>,
    /// Memory charged for the call.
    pub charged_bytes: usize,
}

/// Progress of a pipelined call.
pub(crate) struct Pipelined {
    pub watermarks: Arc<Watermarks>,
    /// Bytes of output that were reported to the rank.
    pub reported: usize,
}

impl Pipelined {
    fn is_worth_a_word(&self) -> bool {
        let delivered = self.watermarks.delivered();
        // All input that has arrived was reduced: the rank may wait for its output before it sends
        // more.
        let all = delivered > self.reported && delivered == self.watermarks.arrived();
        all || delivered >= self.reported + STEP_BYTES
    }
}

impl Served {
    /// Records that more of its input has arrived.
    pub fn arrived(&self, end: usize) {
        if let Some(pipelined) = &self.pipelined {
            self.work.arrived(&pipelined.watermarks, end);
        }
    }

    /// True if there is an update for the rank.
    pub fn has_updates(&self) -> bool {
        self.work.is_done() || self.pipelined.as_ref().is_some_and(Pipelined::is_worth_a_word)
    }

    /// Reports final output; the end of the call reports the rest.
    pub fn send_delivered(&mut self, line: &mut MessageSocket<UnixStream>) {
        if !self.has_updates() || self.work.is_done() {
            return;
        }
        if let Some(pipelined) = &mut self.pipelined {
            pipelined.reported = pipelined.watermarks.delivered();
            line.send(&Response::Delivered { ticket: self.ticket, end: pipelined.reported });
        }
    }
}
