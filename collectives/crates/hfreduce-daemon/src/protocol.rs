//! Protocol between a rank and `hfreduced`: length-prefixed JSON messages over a UNIX socket.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_core::{FINGERPRINT_BYTES, OUTSTANDING_MAX};
use hfreduce_engine::endpoint::{Member, Options};
use hfreduce_engine::operation::Transfer;
use hfreduce_transport::message_socket::MessageSocket;

/// The version of the words; a rank of another release is refused.
pub(crate) const VERSION: u32 = 3;
/// The longest word: the infos of ten thousand ranks.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Phase of errors that occur before a rank has been admitted.
pub(crate) const PHASE: &str = "attaching to hfreduced";
/// How often each side gives a sign of life.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// How long the other side may take for an answer that needs nobody else's.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);
/// Calls of a rank that are under way here at most, each about 1 KiB; what comes after them waits in
/// the socket.
pub(crate) const CALLS_MAX: usize = COLLECTIVES_MAX + 2 * MESSAGES_MAX;
/// Of them, collective operations: more than one window, so that the engine always has the next.
pub(crate) const COLLECTIVES_MAX: usize = 2 * OUTSTANDING_MAX;
/// Sends, and as many receives: counted apart, since the sends may be what lets another rank's sends
/// reach the receives. Messages that are received in the order in which they are sent may be any number;
/// of others, no more than this may wait for an earlier one.
pub(crate) const MESSAGES_MAX: usize = 32 << 10;

/// What a rank says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
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
        kind: ErrorKind,
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
pub(crate) struct Open {
    pub(crate) version: u32,
    pub(crate) process: u32,
    pub(crate) options: Options,
    pub(crate) key: Vec<u8>,
    /// It has no rank yet: its options have one place, its own.
    pub(crate) newcomer: bool,
}

/// Go on with these; all that was under way has ended on the rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reconfigure {
    pub(crate) members: Vec<Member>,
    /// Operations that ended well on the rank, whatever had ended here when it stopped listening.
    pub(crate) completed: u64,
    /// The rank has taken its memory back: it needs another.
    pub(crate) retired: bool,
    pub(crate) timeout_ms: u64,
}

/// An operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) ticket: u64,
    pub(crate) fingerprint: [u8; FINGERPRINT_BYTES],
    pub(crate) input: Region,
    pub(crate) output: Region,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) timeout_ms: u64,
    /// Its input arrives, and its output is told, piece by piece.
    pub(crate) pipelined: bool,
}

/// A range of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// A call that has ended well.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) ticket: u64,
    /// Of a receive from anybody: who sent.
    pub(crate) source: Option<u32>,
}

/// The rank is in another epoch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reconfigured {
    /// Everybody's, in rank order.
    pub(crate) infos: Vec<String>,
    pub(crate) rank: u32,
    pub(crate) epoch: u32,
    pub(crate) channels: usize,
    /// Its memory is another one, which it asks for.
    pub(crate) other_memory: bool,
}

/// What the daemon says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Opened {
        info: String,
        process: u32,
    },
    Connected {
        channels: usize,
    },
    Reconfigured(Box<Reconfigured>),
    Refused(Box<CollectiveError>),
    /// The bytes before `end` of a paced call's output are final.
    Delivered {
        ticket: u64,
        end: usize,
    },
    Done(Vec<Done>),
    Broken {
        cause: AbortReason,
        record: Option<String>,
        retired: bool,
    },
    Beat,
    Left,
}

/// The next word, or why there is none by `until`.
pub(crate) fn await_message<W: DeserializeOwned>(
    line: &mut MessageSocket<impl Read + Write + AsFd>,
    until: Instant,
) -> Result<W, String> {
    loop {
        line.flush();
        if let Some(word) = line.next_message() {
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
pub(crate) fn sleep(at: &mut [PollFd<'_>], most: Duration) {
    let most = Timespec {
        tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(most.subsec_nanos()),
    };
    // An interruption, the only failure there can be, is one more look.
    let _ = poll(at, Some(&most));
}
