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
//! Arrived: more of a paced input     ─▶         Work::arrived
//!                                    ◀─         Delivered: more of a paced output
//!                                    ◀─         Done: tickets, and who sent
//!                                    ◀─         Broken: the cause; nothing is touched any more
//! Reconfigure: the next members      ─▶         Communicator::reconfigure
//!                                    ◀─         Regrouped: everybody's infos, or Refused
//! Leave                              ─▶         Communicator::close
//! ```
//! A newcomer's Open says that it is one; then Join stands for Connect, and Regrouped for its answer.
//!
//! The engine does not know: a session's communicator is that of a rank which is a thread of the
//! daemon. So bits, names of failures and who reads whose memory are those of the first way, and ranks
//! of both ways may be in one group.
//!
//! The daemon makes the memory and lets the rank hand out its blocks. What is registered there is used
//! in place; what is not is copied in when it is called and out when it has ended. Memory that fills
//! and empties meanwhile (that of GPUs, see [`Pace`]) is copied piece by piece in the rank, which
//! alone knows the GPU.

mod admission;
mod attach;
mod attached;
mod check;
mod client;
#[cfg(test)]
mod daemon_test;
mod descriptors;
mod entrance;
mod listener;
mod memory;
mod outstanding;
mod paced;
mod places;
mod regroup;
mod seat;
mod session;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use attach::{Applicant, Attachment};
pub(crate) use attached::Attached;
pub use entrance::{Arrival, Entrance};
pub use listener::{Daemon, ListenError, Rules};
pub(crate) use seat::Seat;

use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::core::{FINGERPRINT_BYTES, OUTSTANDING_MAX};
use crate::endpoint::{Member, Options};
use crate::line::Line;
use crate::operation::Transfer;
#[cfg(doc)]
use crate::pace::Pace;

/// The version of the words; a rank of another release is refused.
const VERSION: u32 = 3;
/// The longest word: the infos of ten thousand ranks.
const WORD_BYTES_MAX: usize = 16 << 20;
/// How often each side gives a sign of life.
const BEAT: Duration = Duration::from_secs(1);
/// How long the other side may take for an answer that needs nobody else's.
const ANSWER: Duration = Duration::from_secs(10);
/// Calls of a rank that are under way here at most, each about 1 KiB; what comes after them waits in
/// the socket.
const CALLS_MAX: usize = COLLECTIVES_MAX + 2 * MESSAGES_MAX;
/// Of them, collective operations: more than one window, so that the engine always has the next.
const COLLECTIVES_MAX: usize = 2 * OUTSTANDING_MAX;
/// Sends, and as many receives: counted apart, since the sends may be what lets another rank's sends
/// reach the receives. Messages that are received in the order in which they are sent may be any number;
/// of others, no more than this may wait for an earlier one.
const MESSAGES_MAX: usize = 32 << 10;

/// What a rank says.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Open(Box<Open>),
    Connect {
        infos: Vec<String>,
        timeout_ms: u64,
    },
    /// As a newcomer.
    Join {
        timeout_ms: u64,
    },
    Call(Box<Call>),
    /// The bytes before `end` of a paced call's input are in the arena.
    Arrived {
        ticket: u64,
        end: usize,
    },
    Abort {
        kind: CauseKind,
        reason: String,
    },
    Beat,
    Reconfigure(Reconfigure),
    /// Ready for the memory of another epoch, which comes next.
    Memory,
    Leave {
        timeout_ms: u64,
    },
}

/// Who comes.
#[derive(Debug, Serialize, Deserialize)]
struct Open {
    version: u32,
    process: u32,
    options: Options,
    key: Vec<u8>,
    /// It has no rank yet: its options have one place, its own.
    newcomer: bool,
}

/// Go on with these; all that was under way has ended on the rank.
#[derive(Debug, Serialize, Deserialize)]
struct Reconfigure {
    members: Vec<Member>,
    /// Operations that ended well on the rank, whatever had ended here when it stopped listening.
    completed: u64,
    /// The rank has taken its memory back: it needs another.
    retired: bool,
    timeout_ms: u64,
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
    /// Its input arrives, and its output is told, piece by piece.
    paced: bool,
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

/// The rank is in another epoch.
#[derive(Debug, Serialize, Deserialize)]
struct Regrouped {
    /// Everybody's, in rank order.
    infos: Vec<String>,
    rank: u32,
    epoch: u32,
    channels: usize,
    /// Its memory is another one, which it asks for.
    other_memory: bool,
}

/// What the daemon says.
#[derive(Debug, Serialize, Deserialize)]
enum Tell {
    Opened {
        info: String,
        process: u32,
    },
    Connected {
        channels: usize,
    },
    Regrouped(Box<Regrouped>),
    Refused(Box<CollectiveError>),
    /// The bytes before `end` of a paced call's output are final.
    Delivered {
        ticket: u64,
        end: usize,
    },
    Done(Vec<Done>),
    Broken {
        cause: Cause,
        record: Option<String>,
        retired: bool,
    },
    Beat,
    Left,
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
