//! Connection to a rank: its messages and the end of its process.

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
pub const STOPPED: &str = "hfreduced on this node was stopped";

/// Connection to the process of a rank.
pub struct ClientConnection<'a> {
    pub line: MessageSocket<UnixStream>,
    /// The rank's process, if it is visible.
    process: Option<OwnedFd>,
    /// The daemon is stopping.
    stop: &'a AtomicBool,
}

impl<'a> ClientConnection<'a> {
    pub fn new(line: MessageSocket<UnixStream>, stop: &'a AtomicBool) -> Self {
        let process = shm::peer_process(line.stream());
        Self { line, process, stop }
    }

    /// True once its process or its connection has ended; messages sent before are still read.
    pub fn is_gone(&self) -> bool {
        if self.line.end_reason().is_some() {
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

    /// The reason to stop serving the rank, if any. Called while the rank waits for an answer.
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

    /// Waits for a message or the end of the connection, for `most` at most.
    pub fn wait(&self, most: Duration) {
        let mut events = PollFlags::IN;
        if self.line.unsent() > 0 {
            events |= PollFlags::OUT;
        }
        let mut at = vec![PollFd::new(self.line.stream(), events)];
        at.extend(self.process.iter().map(|process| PollFd::new(process, PollFlags::IN)));
        sleep(&mut at, most);
    }

    /// Passes the arena to the rank, which allocates its blocks from now on.
    ///
    /// # Errors
    /// A system call failed.
    pub fn delegate(&self, arena: &Arc<Arena>) -> std::io::Result<()> {
        arena.delegate();
        let (segment, soon) = (arena.segment(), Deadline::after(ANSWER));
        let size = (segment.bytes() as u64).to_le_bytes();
        shm::send_descriptors(self.line.stream(), &size, &[segment.fd()], soon)
    }
}
