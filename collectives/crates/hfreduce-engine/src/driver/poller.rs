//! One place where a rank sleeps: sockets, processes and wake-ups of other ranks, all in one wait.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{AsFd, OwnedFd};

/// What woke us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// What was registered under this number.
    pub token: u64,
    /// There is something to read, or the end.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

/// Events taken in one call; more come with the next.
const BATCH: usize = 64;

impl Poller {
    /// A new one.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Watches for input (level-triggered).
    ///
    /// # Errors
    /// What the kernel says.
    pub fn watch(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// Watches an [`eventfd`] that nobody ever reads: each write is one event.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn watch_edges(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), flags)?)
    }

    /// Says whether room to write matters too.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn want_room(&self, fd: impl AsFd, token: u64, wanted: bool) -> io::Result<()> {
        let flags = if wanted { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(token), flags)?)
    }

    /// Stops watching.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until something happens, at most `timeout`; what happened goes to `ready`.
    ///
    /// # Errors
    /// What the kernel says; an interruption is an empty answer.
    pub fn wait(&self, timeout: Duration, ready: &mut Vec<Ready>) -> io::Result<()> {
        ready.clear();
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut space = [const { MaybeUninit::<Event>::uninit() }; BATCH];
        let events: &[Event] = match epoll::wait(&self.epoll, &mut space, Some(&timeout)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        let closed = EventFlags::HUP | EventFlags::ERR;
        ready.extend(events.iter().map(|event| {
            let flags = event.flags;
            Ready {
                token: event.data.u64(),
                readable: flags.intersects(EventFlags::IN | closed),
                writable: flags.intersects(EventFlags::OUT | closed),
            }
        }));
        Ok(())
    }
}

/// A doorbell that any process holding the descriptor can ring.
///
/// # Errors
/// Out of descriptors.
pub fn doorbell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Rings a doorbell. It can only fail if the counter is full: then it rings already.
pub fn notify(doorbell: impl AsFd) {
    let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_that_is_never_read_rings_every_time() {
        let poller = Poller::new().unwrap();
        let doorbell = doorbell().unwrap();
        poller.watch_edges(&doorbell, 7).unwrap();
        let mut ready = Vec::new();
        for _ in 0..3 {
            notify(&doorbell);
            poller.wait(Duration::from_secs(5), &mut ready).unwrap();
            assert_eq!(ready, [Ready { token: 7, readable: true, writable: false }]);
            poller.wait(Duration::ZERO, &mut ready).unwrap();
            assert!(ready.is_empty());
        }
    }
}
