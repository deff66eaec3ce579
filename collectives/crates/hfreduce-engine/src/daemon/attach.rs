//! A rank at the daemon's door: from a path to a communicator.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use fabric::shm::{self, Segment};
use hfreduce_plan::Plan;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{ANSWER, Ask, Attached, Open, Tell, VERSION, WORD_BYTES_MAX, await_word};
use crate::cause::{CauseKind, CollectiveError};
use crate::communicator::Communicator;
use crate::drivers::{Identity, Shared, poller};
use crate::endpoint::{Options, placed, reached_at, refused};
use crate::flight::{About, Recorder};
use crate::line::{Line, framed};
use crate::placement::Placement;

/// Memory without which nothing can be laid where the daemon finds it.
const ARENA_BYTES_MIN: usize = 1 << 20;
/// How much later than the daemon itself we give up the connecting.
const LATER: Duration = Duration::from_secs(5);
const PHASE: &str = "attaching to hfreduced";

/// One rank that has a place at a daemon and does not know its peers yet.
pub struct Attachment {
    options: Options,
    placement: Placement,
    plan: Plan,
    arena: Arc<Arena>,
    line: Line<UnixStream>,
    info: String,
    /// The daemon, for messages.
    name: String,
}

impl Attachment {
    /// Goes to the daemon that listens at `socket`.
    ///
    /// # Errors
    /// Nobody is there, it has no place or no memory for us, or arguments that make no sense.
    pub fn open(mut options: Options, key: &[u8], socket: &Path) -> Result<Self, CollectiveError> {
        options.served = true;
        let (placement, plan) = placed(&options)?;
        let refuse = |kind, detail: String| refused(&options, kind, PHASE, detail);
        if options.registered_bytes < ARENA_BYTES_MIN {
            let detail = format!(
                "registered memory of {} bytes is too little: set HFREDUCE_REGISTERED_BYTES to \
                 {ARENA_BYTES_MIN} or more, lift the limit of address space, or unset \
                 HFREDUCE_DAEMON",
                options.registered_bytes
            );
            return Err(refuse(CauseKind::Invalid, detail));
        }
        let at = socket.display();
        let absent = |error: &dyn std::fmt::Display| {
            let detail = format!(
                "{at}: {error}; start hfreduced there, or unset HFREDUCE_DAEMON to do without"
            );
            refuse(CauseKind::Io, detail)
        };
        let deadline = Deadline::after(ANSWER);
        let mut stream = dial(socket).map_err(|error| absent(&error))?;
        let (process, key) = (std::process::id(), key.to_vec());
        let open = Open { version: VERSION, process, options: options.clone(), key };
        let mut size = [0; 8];
        // A daemon that is full says so and hangs up, maybe before it has heard all of this.
        let said = stream.write_all(&framed(&Ask::Open(Box::new(open))));
        let fds = shm::receive_descriptors(&stream, &mut size, deadline)
            .map_err(|error| absent(&said.err().unwrap_or(error)))?;
        stream.set_nonblocking(true).map_err(|error| absent(&error))?;
        let mut line = Line::over(stream, WORD_BYTES_MAX);
        let answer = await_word::<Tell>(&mut line, Instant::now() + ANSWER);
        let (info, process) = match answer.map_err(|why| absent(&why))? {
            Tell::Opened { info, process } => (info, process),
            Tell::Refused(error) => return Err(*error),
            other => return Err(absent(&format!("it said {other:?} first"))),
        };
        let bytes = usize::try_from(u64::from_le_bytes(size)).unwrap_or(usize::MAX);
        let fd = fds.into_iter().next().ok_or_else(|| absent(&"it sent no memory"))?;
        let segment = Segment::open(fd, bytes).map_err(|error| {
            let detail = format!("mapping its {bytes} bytes of shared memory: {error}");
            refuse(CauseKind::Io, detail)
        })?;
        let name = format!("hfreduced (process {process}, {at})");
        let arena = Arc::new(Arena::of(segment));
        Ok(Self { options, placement, plan, arena, line, info, name })
    }

    /// What the others need to know.
    pub fn info(&self) -> Vec<u8> {
        self.info.clone().into_bytes()
    }

    /// Has the daemon connect to everybody, given what all ranks told, in rank order.
    ///
    /// # Errors
    /// Who is missing or does not fit, or the end of the daemon.
    pub fn connect(
        mut self,
        infos: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let text = |info: &Vec<u8>| String::from_utf8_lossy(info).into_owned();
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.line.say(&Ask::Connect { infos: infos.iter().map(text).collect(), timeout_ms });
        let lost = |options: &Options, why: &str| {
            let detail = format!("{} on this node: {why}; its log says more", self.name);
            refused(options, CauseKind::PeerDied, PHASE, detail)
        };
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400)) + LATER;
        let channels = match await_word::<Tell>(&mut self.line, until) {
            Ok(Tell::Connected { channels }) => channels,
            Ok(Tell::Refused(error)) => return Err(*error),
            Ok(other) => return Err(lost(&self.options, &format!("it said {other:?}"))),
            Err(why) => return Err(lost(&self.options, &why)),
        };
        let options = self.options;
        let trouble = |error: io::Error| refused(&options, CauseKind::Io, PHASE, error.to_string());
        let place = &options.placement[options.rank as usize];
        let about = About {
            job: options.job.clone(),
            rank: options.rank,
            world_size: options.placement.len(),
            node: place.0.clone(),
            zone: place.1.clone(),
            reached_at: reached_at(&self.info),
            group: 0,
            epoch: 0,
            links: Vec::new(),
        };
        let identity = Identity {
            job: options.job.clone(),
            rank: options.rank,
            placement: self.placement,
            channels,
            liveness: options.liveness,
            determinism: options.determinism,
            relays: false, // The daemon's part.
            served: Vec::new(),
            priority: options.priority,
            held_back: options.held_back,
            reached_at: reached_at(&self.info),
        };
        let bell = poller::bell().map_err(trouble)?;
        let shared = Arc::new(Shared::new(identity, bell, Arc::new(Recorder::unseen(&about))));
        let driver = Attached::new(shared.clone(), self.line, self.arena.clone(), self.name)
            .map_err(trouble)?;
        Communicator::attached(shared, driver, self.plan, self.arena).map_err(trouble)
    }
}

/// Connects, and does not wait for ever where the daemon accepts nobody.
fn dial(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
