//! Session of a rank at a daemon, over all epochs: its connections, port and id belong to the
//! daemon, so the daemon reconfigures on its behalf.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use rustix::fd::AsFd;

use super::ClientDriver;
use super::arena::receive_arena;
use crate::protocol::{ANSWER, PHASE, Reconfigure, Reconfigured, Request, Response, await_message};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_engine::communicator::{Communicator, Session, TIMEOUT_MAX};
use hfreduce_engine::driver::{Identity, Shared, lock};
use hfreduce_engine::endpoint::{CLOSE, Info, Member, Options, choose, placed, refused};
use hfreduce_shm::flight::{RankInfo, Recorder};
use hfreduce_transport::message_socket::MessageSocket;
use hfreduce_transport::poller;

/// Time after the daemon's deadline at which the rank stops to wait.
const LATER: Duration = Duration::from_secs(5);

/// The session of one rank.
pub(crate) struct ClientSession {
    options: Options,
    arena: Arc<Arena>,
    /// The daemon, for messages.
    name: String,
    infos: Vec<Info>,
    epoch: u32,
    /// The connection between two epochs; during an epoch the driver has it.
    line: Mutex<Option<MessageSocket<UnixStream>>>,
}

/// The daemon's answer to a rank that requests to enter an epoch.
pub(crate) enum Answer {
    Reconfigured(Box<Reconfigured>),
    Refused(Box<CollectiveError>),
}

impl ClientSession {
    pub(crate) fn new(
        options: Options,
        arena: Arc<Arena>,
        name: String,
        infos: Vec<Info>,
        epoch: u32,
    ) -> Self {
        Self { options, arena, name, infos, epoch, line: Mutex::default() }
    }

    /// The session in the epoch that the daemon reports.
    pub(crate) fn following(
        (options, arena, name): (&Options, &Arc<Arena>, &str),
        line: &mut MessageSocket<UnixStream>,
        update: Reconfigured,
    ) -> Result<Self, String> {
        let read = update.infos.iter().map(|info| serde_json::from_str(info));
        let infos: Vec<Info> =
            read.collect::<Result<_, _>>().map_err(|error| format!("invalid info: {error}"))?;
        let arena = match update.other_memory {
            true => other_arena(line)?,
            false => arena.clone(),
        };
        let options = options.clone().of_epoch(&infos, update.rank as usize);
        Ok(Self::new(options, arena, name.to_owned(), infos, update.epoch))
    }

    /// Creates the communicator of an epoch that the daemon has connected.
    pub(crate) fn start(
        self,
        line: MessageSocket<UnixStream>,
        channels: usize,
    ) -> Result<Communicator, CollectiveError> {
        let options = &self.options;
        let (placement, plan) = placed(options)?;
        let own = &self.infos[options.rank as usize];
        let place = &options.placement[options.rank as usize];
        let about = RankInfo {
            job: options.job.clone(),
            rank: options.rank,
            world_size: options.placement.len(),
            node: place.0.clone(),
            zone: place.1.clone(),
            reached_at: own.reached_at(),
            group: 0,
            epoch: self.epoch,
            links: Vec::new(),
        };
        let identity = Identity {
            job: options.job.clone(),
            rank: options.rank,
            placement,
            channels,
            liveness: options.liveness,
            determinism: options.determinism,
            ring_accumulation: false, // Decided by the daemon.
            served: Vec::new(),
            priority: options.priority,
            share: options.share.clone(),
            held_back: options.held_back,
            reached_at: own.reached_at(),
        };
        let options = options.clone();
        let trouble =
            |error: std::io::Error| refused(&options, ErrorKind::Io, PHASE, error.to_string());
        let doorbell = poller::doorbell().map_err(trouble)?;
        let shared = Arc::new(Shared::new(identity, doorbell, Arc::new(Recorder::private(&about))));
        let driver = ClientDriver::new(shared.clone(), line, self.arena.clone(), self.name.clone())
            .map_err(trouble)?;
        Communicator::with_remote(shared, Box::new(driver), plan, Box::new(self)).map_err(trouble)
    }
}

impl Session for ClientSession {
    fn arena(&self) -> io::Result<Arc<Arena>> {
        Ok(self.arena.clone())
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn previous_epochs(&self) -> Vec<Option<(u32, u64)>> {
        self.infos.iter().map(|info| info.previous_epoch).collect()
    }

    fn reconfigure(
        &self,
        communicator: &Communicator,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let until = answer_deadline(timeout);
        let refuse = |kind, detail| communicator.refused(kind, "reconfigure", detail);
        // An invalid list changes nothing.
        choose(members, &self.infos, self.options.rank)
            .map_err(|detail| refuse(ErrorKind::Invalid, detail))?;
        let driver = communicator.detach(CLOSE.min(timeout));
        let driver = driver.and_then(|driver| driver.downcast::<ClientDriver>().ok());
        if let Some(line) = driver.and_then(|driver| driver.into_line()) {
            *lock(&self.line) = Some(line);
        }
        let Some(mut line) = lock(&self.line).take() else {
            let detail = format!(
                "this communicator has left {}: reconfigure it before it is closed, and only once",
                self.name
            );
            return Err(refuse(ErrorKind::Invalid, detail));
        };
        let remaining = until.saturating_duration_since(Instant::now()).saturating_sub(LATER);
        line.send(&Request::Reconfigure(Reconfigure {
            members: members.to_vec(),
            completed: communicator.completed(),
            retired: self.arena.is_retired(),
            timeout_ms: remaining.as_millis() as u64,
        }));
        let daemon_error = |why: &str| {
            let detail = format!(
                "{} on this node, which runs this rank, ended: {why}. See its log; this rank's \
                 port is closed: the others can continue without this rank, and accept it as a \
                 newcomer",
                self.name
            );
            refuse(ErrorKind::PeerDied, detail)
        };
        let error = match await_answer(&mut line, until) {
            Ok(Answer::Reconfigured(update)) => {
                let (channels, own) = (update.channels, (&self.options, &self.arena, &*self.name));
                let session =
                    Self::following(own, &mut line, *update).map_err(|why| daemon_error(&why))?;
                return session.start(line, channels);
            }
            Ok(Answer::Refused(error)) => *error,
            Err(why) => {
                let error = daemon_error(&why);
                // A late answer would be taken for that of the next request.
                line.end(why);
                let _ = line.stream().shutdown(Shutdown::Both);
                error
            }
        };
        *lock(&self.line) = Some(line);
        Err(error)
    }
}

/// Deadline for the daemon's answer to a request with this timeout.
pub(crate) fn answer_deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(TIMEOUT_MAX) + LATER
}

/// Waits for the daemon's answer, skipping messages of the previous epoch.
pub(crate) fn await_answer(
    line: &mut MessageSocket<impl Read + Write + AsFd>,
    until: Instant,
) -> Result<Answer, String> {
    loop {
        match await_message::<Response>(line, until)? {
            Response::Reconfigured(update) => return Ok(Answer::Reconfigured(update)),
            Response::Refused(error) => return Ok(Answer::Refused(error)),
            Response::Delivered { .. }
            | Response::Done(_)
            | Response::Broken { .. }
            | Response::Beat => {}
            other => return Err(format!("unexpected message {other:?}")),
        }
    }
}

/// Receives the arena of this epoch, if the previous one was revoked.
fn other_arena(line: &mut MessageSocket<UnixStream>) -> Result<Arc<Arena>, String> {
    // The daemon sends nothing until it reads this: the descriptor is next on the socket.
    line.send(&Request::Memory);
    let stream = line.stream();
    let blocks = |mode: bool| stream.set_nonblocking(!mode).map_err(|error| error.to_string());
    blocks(true)?;
    let arena = receive_arena(stream, Deadline::after(ANSWER)).map_err(|error| error.to_string());
    blocks(false)?;
    arena
}
