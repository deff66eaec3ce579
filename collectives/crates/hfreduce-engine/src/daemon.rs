//! The second way to run: `hfreduced`, a process that has the connections and makes the sums of a
//! machine's ranks; they share memory with it and bring nothing but their calls.
//!
//! ```text
//! rank: Attachment, Attached                    hfreduced: Daemon, a Session for each rank
//! Open: options, key                 ─▶         an Endpoint like any other rank's
//!                                    ◀─         its arena (a descriptor), then Opened: its info
//! Connect: everybody's infos         ─▶         Endpoint::connect
//!                                    ◀─         Connected, or Refused: the error
//! Call: operation, places in the arena ─▶       Communicator::submit
//!                                    ◀─         Done: tickets, and who sent
//!                                    ◀─         Broken: the cause; nothing is touched any more
//! Leave                              ─▶         Communicator::close
//! ```
//! The engine does not know: a session's communicator is that of a rank which is a thread of the
//! daemon. So bits, names of failures and who reads whose memory are those of the first way, and ranks
//! of both ways may be in one group.
//!
//! The daemon makes the memory and lets the rank hand out its blocks. What is registered there is used
//! in place; what is not is copied in when it is called and out when it has ended.

mod attach;
mod attached;
mod check;
#[cfg(test)]
mod daemon_test;
mod listener;
mod memory;
mod session;

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use attach::Attachment;
pub(crate) use attached::Attached;
pub use listener::{Daemon, ListenError, Rules};

use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::communicator::Communicator;
use crate::core::FINGERPRINT_BYTES;
use crate::endpoint::{Endpoint, Options};
use crate::line::Line;
use crate::operation::Transfer;

/// The version of the words; a rank of another release is refused.
const VERSION: u32 = 2;
/// The longest word: the infos of ten thousand ranks.
const WORD_BYTES_MAX: usize = 16 << 20;
/// How often each side gives a sign of life.
const BEAT: Duration = Duration::from_secs(1);
/// How long the other side may take for an answer that needs nobody else's.
const ANSWER: Duration = Duration::from_secs(10);
/// Calls of a rank that are under way; what comes after them waits in the socket.
const CALLS_MAX: usize = 4096;

/// What a rank says.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Open(Box<Open>),
    Connect { infos: Vec<String>, timeout_ms: u64 },
    Call(Box<Call>),
    Abort { kind: CauseKind, reason: String },
    Beat,
    Leave { timeout_ms: u64 },
}

/// Who comes.
#[derive(Debug, Serialize, Deserialize)]
struct Open {
    version: u32,
    process: u32,
    options: Options,
    key: Vec<u8>,
}

/// An operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Call {
    ticket: u64,
    print: [u8; FINGERPRINT_BYTES],
    input: Region,
    output: Region,
    transfers: Vec<Transfer>,
    timeout_ms: u64,
}

/// A range of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Region {
    offset: u64,
    bytes: usize,
}

/// A call that has ended well.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Done {
    ticket: u64,
    /// Of a receive from anybody: who sent.
    source: Option<u32>,
}

/// What the daemon says.
#[derive(Debug, Serialize, Deserialize)]
enum Tell {
    Opened { info: String, process: u32 },
    Connected { channels: usize },
    Refused(Box<CollectiveError>),
    Done(Vec<Done>),
    Broken { cause: Cause, record: Option<String>, retired: bool },
    Beat,
    Left,
}

/// A rank before it knows its peers, in either way to run.
pub enum Entrance {
    /// It has its own connections.
    Own(Box<Endpoint>),
    /// A daemon has them.
    Daemon(Box<Attachment>),
}

impl Entrance {
    /// Opens what the others will connect to, at the daemon behind `daemon` if there is one.
    ///
    /// # Errors
    /// As for [`Endpoint::new`] and [`Attachment::open`].
    pub fn open(
        options: Options,
        key: &[u8],
        daemon: Option<&Path>,
    ) -> Result<Self, CollectiveError> {
        Ok(match daemon {
            None => Self::Own(Box::new(Endpoint::new(options, key)?)),
            Some(socket) => Self::Daemon(Box::new(Attachment::open(options, key, socket)?)),
        })
    }

    /// What the others need to know.
    pub fn info(&self) -> Vec<u8> {
        match self {
            Self::Own(endpoint) => endpoint.info(),
            Self::Daemon(attachment) => attachment.info(),
        }
    }

    /// Connects to everybody, given what all ranks told, in rank order.
    ///
    /// # Errors
    /// Who is missing or does not fit.
    pub fn connect(
        self,
        infos: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        match self {
            Self::Own(endpoint) => endpoint.connect(infos, timeout),
            Self::Daemon(attachment) => attachment.connect(infos, timeout),
        }
    }
}

/// The next word, or why there is none by `until`.
fn await_word<W: DeserializeOwned>(
    line: &mut Line<impl Read + Write + AsFd>,
    until: Instant,
) -> Result<W, String> {
    loop {
        line.flush();
        if let Some(word) = line.next_word() {
            return Ok(word);
        }
        if let Some(why) = line.ended() {
            return Err(why.to_owned());
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it said nothing in time".to_owned());
        }
        let events = if line.unsent() > 0 { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        sleep(&mut [PollFd::new(line.stream(), events)], left);
    }
}

/// Until something happens at one of these, or for that long.
fn sleep(at: &mut [PollFd<'_>], most: Duration) {
    let most = Timespec {
        tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(most.subsec_nanos()),
    };
    // An interruption, the only failure there can be, is one more look.
    let _ = poll(at, Some(&most));
}
