//! Pipelined buffers on the client side: input that has arrived is copied into the arena, and output
//! that is final is copied out of it, while the operation runs.

use super::ClientDriver;
use crate::protocol::Request;

impl ClientDriver {
    /// Copies input that has arrived to the arena, and reports it; true if there was any.
    pub(crate) fn stage_arrived(&mut self) -> bool {
        let mut any = false;
        for ticket in &self.pipelined {
            let Some(call) = self.calls.get_mut(ticket) else { continue };
            let Some(end) = call.operation.input.arrived() else { continue };
            if end > call.copied.0 {
                call.staged.copy_in(&call.operation, call.copied.0..end);
                call.copied.0 = end;
                self.line.send(&Request::Arrived { ticket: *ticket, end });
                any = true;
            }
        }
        any
    }

    /// Copies output that is final to the caller's buffer, and reports it.
    pub(crate) fn copy_delivered(&mut self, ticket: u64, end: usize) {
        let Some(call) = self.calls.get_mut(&ticket) else { return };
        let end = end.min(call.operation.output.bytes());
        if end > call.copied.1 {
            let rank = self.shared.identity.rank;
            call.staged.copy_out_range(&call.operation, call.copied.1..end, rank);
            call.copied.1 = end;
            call.operation.output.deliver(end);
        }
    }
}
