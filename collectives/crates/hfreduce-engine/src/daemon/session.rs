//! One rank at the daemon, from its first word to its last: a thread that takes its calls, moves its
//! data while any is under way, and tells it what has ended.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use fabric::shm;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;

use super::{
    ANSWER, Ask, BEAT, CALLS_MAX, Call, Done, Open, Tell, VERSION, WORD_BYTES_MAX, await_word,
    check, sleep,
};
use crate::cause::{CauseKind, CollectiveError};
use crate::communicator::{Communicator, Work};
use crate::drivers::TICK;
use crate::endpoint::{Endpoint, Options, refused};
use crate::flight::Folders;
use crate::line::Line;
use crate::operation::Operation;

/// How long a rank may look for the others before it connects.
const MEETS_WITHIN: Duration = Duration::from_secs(3600);
/// How long connecting may take.
const CONNECTS_WITHIN: Duration = Duration::from_secs(3600);
/// Bytes that a rank may leave unread; it gets no more calls in before.
const UNREAD_MAX: usize = 256 << 10;
const PHASE: &str = "attaching to hfreduced";

/// See the module's text.
pub struct Session<'a> {
    line: Line<UnixStream>,
    /// The rank's process, where we can see it.
    process: Option<OwnedFd>,
    stop: &'a AtomicBool,
    communicator: Communicator,
    arena: Arc<Arena>,
    liveness: Duration,
    calls: Vec<(u64, Work)>,
    heard: Instant,
    beat: Instant,
}

/// How a session goes on.
enum Next {
    Wait,
    End,
}

impl Session<'_> {
    /// Serves whoever is at the other end, as long as he makes sense.
    pub fn run(stream: UnixStream, folders: Folders, stop: &AtomicBool) {
        let process = shm::peer_process(&stream);
        if let Err(error) = stream.set_nonblocking(true) {
            tracing::warn!(%error, "a connection was dropped");
            return;
        }
        let mut line = Line::over(stream, WORD_BYTES_MAX);
        let open = match await_word(&mut line, Instant::now() + ANSWER) {
            Ok(Ask::Open(open)) => {
                Open { options: Options { served: true, folders, ..open.options }, ..*open }
            }
            Ok(_) => return tracing::warn!("a connection was closed: it did not say who it is"),
            Err(why) => return tracing::warn!(why, "a connection was closed"),
        };
        let (rank, job, id) = (open.options.rank, open.options.job.clone(), open.process);
        match Session::admit(line, process, open, stop) {
            Err(why) => tracing::warn!(rank, job, process = id, why, "a rank was not taken in"),
            Ok(mut session) => {
                tracing::info!(rank, job, process = id, "a rank is served");
                while let Next::Wait = session.step() {
                    session.wait();
                }
                tracing::info!(rank, job, process = id, "a rank has gone");
            }
        }
    }

    /// From who it is to a connected group, or why not; the rank was told.
    fn admit(
        mut line: Line<UnixStream>,
        process: Option<OwnedFd>,
        open: Open,
        stop: &AtomicBool,
    ) -> Result<Session<'_>, String> {
        let Open { version, options, key, .. } = open;
        if version != VERSION {
            let detail = format!(
                "hfreduced speaks version {VERSION} and this rank {version}: install one release"
            );
            return Err(turn_away(line, refused(&options, CauseKind::Mismatch, PHASE, detail)));
        }
        let (liveness, own) = (options.liveness, options.clone());
        let io = |error: io::Error| refused(&own, CauseKind::Io, PHASE, error.to_string());
        let opened = Endpoint::new(options, &key)
            .and_then(|endpoint| Ok((endpoint.arena().map_err(io)?, endpoint)));
        let (arena, endpoint) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(turn_away(line, error)),
        };
        arena.entrust();
        let (segment, soon) = (arena.segment(), Deadline::after(ANSWER));
        let size = (segment.bytes() as u64).to_le_bytes();
        shm::send_descriptors(line.stream(), &size, &[segment.fd()], soon)
            .map_err(|error| error.to_string())?;
        let info = String::from_utf8_lossy(&endpoint.info()).into_owned();
        line.say(&Tell::Opened { info, process: std::process::id() });
        let (infos, timeout_ms) = match await_word(&mut line, Instant::now() + MEETS_WITHIN)? {
            Ask::Connect { infos, timeout_ms } => (infos, timeout_ms),
            Ask::Leave { .. } => return Err("it left before it connected".to_owned()),
            _ => return Err("it did not connect when it was its turn".to_owned()),
        };
        let infos: Vec<Vec<u8>> = infos.into_iter().map(String::into_bytes).collect();
        let timeout = Duration::from_millis(timeout_ms).min(CONNECTS_WITHIN);
        let connected = endpoint.connect(&infos, timeout).and_then(|communicator| {
            Ok((communicator.serve(line.stream()).map_err(io)?, communicator))
        });
        let communicator = match connected {
            Ok(((), communicator)) => communicator,
            Err(error) => return Err(refuse(line, error)),
        };
        line.say(&Tell::Connected { channels: communicator.channels() });
        let (calls, now) = (Vec::new(), Instant::now());
        let (heard, beat) = (now, now);
        Ok(Session { line, process, stop, communicator, arena, liveness, calls, heard, beat })
    }

    /// Takes what the rank says and tells what has ended.
    fn step(&mut self) -> Next {
        let gone = self.is_gone(); // What it said before that is still heard.
        while self.calls.len() < CALLS_MAX
            && self.line.unsent() < UNREAD_MAX
            && let Some(word) = self.line.next_word()
        {
            self.heard = Instant::now();
            match word {
                Ask::Call(call) => self.call(&call),
                Ask::Beat => {}
                Ask::Abort { kind, reason } => self.fail(kind, reason),
                Ask::Leave { timeout_ms } => {
                    self.communicator.close(Duration::from_millis(timeout_ms).min(ANSWER));
                    self.line.say(&Tell::Left);
                    return Next::End;
                }
                Ask::Open(_) | Ask::Connect { .. } => {
                    let detail = "it said what it had said before it was connected";
                    self.fail(CauseKind::Protocol, detail.to_owned());
                }
            }
        }
        if gone {
            self.fail(CauseKind::PeerDied, "its process ended".to_owned());
            return Next::End;
        }
        let silent = self.heard.elapsed();
        if silent > self.liveness.max(3 * BEAT) && self.calls.len() < CALLS_MAX {
            let seconds = silent.as_secs_f64();
            let detail = format!("no sign of life for {seconds:.1} s; the process is stopped");
            self.fail(CauseKind::PeerStalled, detail);
        }
        if self.stop.load(Ordering::SeqCst) {
            let detail = "hfreduced on this node was told to stop".to_owned();
            self.fail(CauseKind::Aborted, detail);
        }
        self.tell()
    }

    fn is_gone(&self) -> bool {
        if self.line.ended().is_some() {
            return true;
        }
        let Some(process) = &self.process else { return false };
        let mut end = [PollFd::new(process, PollFlags::IN)];
        sleep(&mut end, Duration::ZERO);
        !end[0].revents().is_empty()
    }

    fn call(&mut self, call: &Call) {
        let (rank, world) = (self.communicator.rank(), self.communicator.world_size());
        let Operation { print, input, output, transfers } =
            match check::operation(call, self.arena.segment(), rank, world) {
                Ok(operation) => operation,
                Err(why) => {
                    let detail = format!("its call cannot be: {why}");
                    return self.fail(CauseKind::Protocol, detail);
                }
            };
        let timeout = Duration::from_millis(call.timeout_ms);
        // An error has broken the group, which it is told below.
        if let Ok(work) = self.communicator.submit(print, input, output, transfers, timeout, true) {
            self.calls.push((call.ticket, work));
        }
    }

    /// What has ended, and whether all has.
    fn tell(&mut self) -> Next {
        let mut done = Vec::new();
        self.calls.retain(|(ticket, work)| {
            let well = work.is_done() && work.error().is_none();
            if well {
                done.push(Done { ticket: *ticket, source: work.source() });
            }
            !well
        });
        if !done.is_empty() {
            self.line.say(&Tell::Done(done));
        }
        // All works of a broken group end, after which nobody touches their memory.
        if let Some(error) = self.communicator.error()
            && self.calls.iter().all(|(_, work)| work.is_done())
        {
            let record = error.flight_record.map(String::from);
            let retired = self.arena.is_retired();
            self.line.say(&Tell::Broken { cause: *error.cause, record, retired });
            return Next::End;
        }
        if self.beat.elapsed() >= BEAT {
            self.beat = Instant::now();
            self.line.say(&Tell::Beat);
        }
        self.line.flush();
        Next::Wait
    }

    fn fail(&self, kind: CauseKind, detail: String) {
        if self.communicator.error().is_none() {
            self.communicator.fail(kind, "serve", detail);
        }
    }

    fn wait(&mut self) {
        if !self.calls.is_empty() {
            let Self { line, calls, communicator, .. } = self;
            let done = || calls.iter().any(|(_, work)| work.is_done());
            communicator.wait_for_client(Instant::now() + TICK, done, || line.has_more());
            return;
        }
        let mut events = PollFlags::IN;
        if self.line.unsent() > 0 {
            events |= PollFlags::OUT;
        }
        let mut at = vec![PollFd::new(self.line.stream(), events)];
        at.extend(self.process.iter().map(|process| PollFd::new(process, PollFlags::IN)));
        sleep(&mut at, TICK);
    }
}

/// Tells a rank why it is not served; why, for the log.
fn refuse(mut line: Line<UnixStream>, error: CollectiveError) -> String {
    let why = error.to_string();
    line.say(&Tell::Refused(Box::new(error)));
    why
}

/// The same where it waits for memory first: there is none.
fn turn_away(line: Line<UnixStream>, error: CollectiveError) -> String {
    // Who does not hear it sees the end of the connection.
    let _ = shm::send_descriptors(line.stream(), &[0; 8], &[], Deadline::after(ANSWER));
    refuse(line, error)
}

/// The same before it has said who it is.
pub fn full(stream: UnixStream, detail: String) {
    if stream.set_nonblocking(true).is_ok() {
        let nobody = Options::new(0, Vec::new());
        let error = refused(&nobody, CauseKind::Io, PHASE, detail);
        turn_away(Line::over(stream, WORD_BYTES_MAX), error);
    }
}
