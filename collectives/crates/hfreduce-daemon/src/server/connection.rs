//! The rank at the other end of a session: what it says, and whether it is still there.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use fabric::shm;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;

use crate::protocol::{ANSWER, sleep};
use hfreduce_transport::message_socket::MessageSocket;

pub const ENDED: &str = "its process ended";
pub const STOPPED: &str = "hfreduced on this node was told to stop";

/// See the module's text.
pub struct ClientConnection<'a> {
    pub line: MessageSocket<UnixStream>,
    /// The rank's process, where we can see it.
    process: Option<OwnedFd>,
    /// The daemon is to stop.
    stop: &'a AtomicBool,
}

impl<'a> ClientConnection<'a> {
    pub fn new(line: MessageSocket<UnixStream>, stop: &'a AtomicBool) -> Self {
        let process = shm::peer_process(line.stream());
        Self { line, process, stop }
    }

    /// True once its process or its line has ended; what it said before that is still to be heard.
    pub fn is_gone(&self) -> bool {
        if self.line.ended().is_some() {
            return true;
        }
        let Some(process) = &self.process else { return false };
        let mut end = [PollFd::new(process, PollFlags::IN)];
        sleep(&mut end, Duration::ZERO);
        !end[0].revents().is_empty()
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Why nothing more is done for it, while it waits for an answer.
    pub fn is_over(&mut self) -> Option<String> {
        self.line.has_more();
        let why = if self.is_gone() {
            ENDED
        } else if self.is_stopped() {
            STOPPED
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    /// Until it says something or ends, or for that long.
    pub fn wait(&self, most: Duration) {
        let mut events = PollFlags::IN;
        if self.line.unsent() > 0 {
            events |= PollFlags::OUT;
        }
        let mut at = vec![PollFd::new(self.line.stream(), events)];
        at.extend(self.process.iter().map(|process| PollFd::new(process, PollFlags::IN)));
        sleep(&mut at, most);
    }

    /// Hands over memory whose blocks it hands out from now on.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn entrust(&self, arena: &Arc<Arena>) -> std::io::Result<()> {
        arena.entrust();
        let (segment, soon) = (arena.segment(), Deadline::after(ANSWER));
        let size = (segment.bytes() as u64).to_le_bytes();
        shm::send_descriptors(self.line.stream(), &size, &[segment.fd()], soon)
    }
}
