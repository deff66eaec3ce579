//! Requests as tasks: bounded in number, each with a deadline, interruptible; start, takeover, end.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use serde::Serialize;
use threefs_client::{Client, ClientError};
use threefs_core::ids::InodeId;
use threefs_meta::{At, Identity, Inode, InodeKind, MetaQuery, MetaReply};
use tokio::sync::{Notify, Semaphore};

use crate::calls::unexpected;
use crate::claim::{ClaimConfig, Gate};
use crate::device::{Buffer, Device, Received};
use crate::files::Files;
use crate::journal::{Journal, Ticket};
use crate::listing::Listings;
use crate::wire::{self, Body, RESENT, Request, init, opcode};

/// Threads that wait for requests; what they read is worked on by the runtime's threads.
const READERS: usize = 2;
/// Requests in work at once. Each may hold a payload of a mebibyte.
const REQUESTS_MAX: usize = 256;
/// Requests that the kernel sends without waiting for them: readahead, asynchronous writes.
const BACKGROUND_MAX: u16 = 64;
/// A signal ends a wait for a cluster that has not answered for so long. Before, the operation ends
/// by itself: programs do not expect EINTR of file operations.
const INTERRUPT_AFTER: Duration = Duration::from_secs(1);
/// Between two messages about what is held open, and looks for lengths that nobody was told.
const PACE: Duration = Duration::from_secs(1);
/// How long the end waits for each of the things that are still to be told.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How a daemon runs.
pub struct FuseConfig {
    /// The directory that is the mount's root.
    pub root: String,
    /// Refuses every change.
    pub read_only: bool,
    /// Whether another daemon has served the mount before.
    pub resume: bool,
    /// What that one left, and this one leaves.
    pub state: Option<PathBuf>,
    /// How long an operation waits for services that do not answer.
    pub timeout: Duration,
    /// The claim without which nothing is served, if the mount needs one.
    pub claim: Option<ClaimConfig>,
    /// Whether the kernel may keep what is written and write it behind: only where no other node
    /// has the files. An fsync or a close still means durable.
    pub write_back: bool,
    /// How long names and attributes are valid in the kernel without asking; an open always asks.
    pub valid: Duration,
    /// Asked at the end, also by who ends the daemon before the mount.
    pub left_open: Arc<LeftOpen>,
}

/// Operations under a claim of which nobody has seen the answer. Services begin nothing after the
/// end of the renewal that it was sent under; until then the claim must not go to another node.
#[derive(Debug)]
pub struct LeftOpen {
    trusted: Option<Duration>,
    at: Mutex<Option<Instant>>,
}

impl LeftOpen {
    /// `trusted`: how long a renewal of the mount's claim is, if it has one. `resume`: a daemon
    /// before this one may have left some.
    pub fn new(trusted: Option<Duration>, resume: bool) -> Self {
        Self { trusted, at: Mutex::new(resume.then(Instant::now)) }
    }

    fn note(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether all is answered, or too old to be begun.
    ///
    /// # Errors
    /// [`FuseError::Unsure`].
    pub fn check(&self) -> Result<(), FuseError> {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.trusted, at) {
            (Some(trusted), Some(at)) if at.elapsed() < trusted => Err(FuseError::Unsure(trusted)),
            _ => Ok(()),
        }
    }
}

/// Why a daemon cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// The descriptor is none of /dev/fuse, or not mounted.
    #[error("descriptor of /dev/fuse: {0}; open it, mount with `fd=N`, then start the daemon")]
    Device(io::Error),
    /// The state file cannot be used.
    #[error("state file: {0}")]
    State(io::Error),
    /// The root cannot be had.
    #[error("root of the mount: {0}")]
    Root(#[from] ClientError),
    /// The root is no directory.
    #[error("`{0}` is not a directory; name one, or make it first")]
    NotADirectory(String),
    /// Another node uses what only one may use.
    #[error(
        "node `{holder}` uses it and only one node may; end its pods, or wait until it is gone"
    )]
    Claimed {
        /// Which node.
        holder: String,
    },
    /// The kernel said something else than it should.
    #[error("{0}")]
    Protocol(String),
    /// It was unmounted soon after an operation that nobody waited for until its answer came.
    #[error(
        "an operation of the last {} s has no answer and may still be begun: keep the claim for so long",
        .0.as_secs_f64()
    )]
    Unsure(Duration),
    /// It was unmounted while the metadata service did not answer.
    #[error("{0} files are longer than the metadata service knows: it did not answer")]
    Untold(usize),
}

/// What is told once the mount is served.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// Always true.
    pub ready: bool,
    /// The root's inode.
    pub root: u64,
    /// Which daemon of the mount this is, from 1.
    pub life: u64,
    /// Whether it took over a mount that another daemon had served.
    pub resumed: bool,
    /// Whether what the other left unanswered is answered now. False on kernels before 6.9: those
    /// requests wait until they are interrupted.
    pub resent: bool,
}

pub(crate) struct Daemon {
    pub client: Client,
    pub device: Device,
    pub journal: Journal,
    pub files: Files,
    pub listings: Listings,
    pub root: InodeId,
    pub read_only: bool,
    pub valid: Duration,
    gate: Option<Gate>,
    write_back: bool,
    timeout: Duration,
    room: Arc<Semaphore>,
    /// Requests in work, for interrupts.
    running: Mutex<HashMap<u64, Arc<Notify>>>,
    /// What the metadata service was told to be held open and is not any more.
    pub released: Mutex<Vec<InodeId>>,
    pub released_now: Notify,
    resumed: bool,
    left_open: Arc<LeftOpen>,
    /// In all handles of this daemon, to tell them from those of others.
    tag: u64,
}

/// A request in work.
pub(crate) struct Call<'a> {
    pub request: &'a Request,
    pub deadline: Deadline,
    /// The change that it makes; given back after the answer.
    pub ticket: Option<Ticket<'a>>,
}

impl Call<'_> {
    /// Number of the request and whether the kernel sends it again.
    pub(crate) fn number(&self) -> (u64, bool) {
        (self.request.unique & !RESENT, self.request.unique & RESENT != 0)
    }

    /// The process that made the system call, as far as the request says.
    pub(crate) fn identity(&self) -> Identity {
        Identity { uid: self.request.uid, gid: self.request.gid, groups: Vec::new() }
    }

    /// Its further groups, which only /proc knows; false if there is nothing to add. Asked only
    /// after a refusal, because it costs more than most operations.
    pub(crate) fn add_groups(&self, who: &mut Identity) -> bool {
        if who.is_root() || !who.groups.is_empty() || self.request.pid == 0 {
            return false;
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.request.pid));
        let status = status.unwrap_or_default();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        who.groups.extend(
            groups.unwrap_or_default().split_whitespace().filter_map(|it| it.parse::<u32>().ok()),
        );
        !who.groups.is_empty()
    }
}

/// Serves a mount until it is unmounted. `on_ready` is called once it is served.
///
/// # Errors
/// [`FuseError`].
pub fn serve(
    client: Client,
    descriptor: OwnedFd,
    config: FuseConfig,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
) -> BoxFuture<'static, Result<(), FuseError>> {
    Box::pin(serve_now(client, descriptor, config, on_ready))
}

async fn serve_now(
    client: Client,
    descriptor: OwnedFd,
    config: FuseConfig,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
) -> Result<(), FuseError> {
    let device = Device::new(descriptor).map_err(FuseError::Device)?;
    let root = find_root(&client, &config).await?;
    let gate = match config.claim.clone() {
        None => None,
        Some(claim) => Some(match Gate::open(&client, claim, config.resume).await? {
            Ok(gate) => gate,
            // Programs that have it mounted get errors instead of waiting for ever.
            Err(holder) if config.resume => {
                tracing::error!(by = holder, "the claim on this volume is lost");
                Gate::lost()
            }
            Err(holder) => return Err(FuseError::Claimed { holder }),
        }),
    };
    let journal =
        Journal::open(config.state.as_deref(), root, !config.resume).map_err(FuseError::State)?;
    let life = journal.life();
    let mut daemon = Daemon {
        client,
        device,
        journal,
        files: Files::default(),
        listings: Listings::default(),
        root,
        read_only: config.read_only,
        valid: config.valid,
        gate,
        write_back: config.write_back,
        timeout: config.timeout,
        room: Arc::new(Semaphore::new(REQUESTS_MAX)),
        running: Mutex::default(),
        released: Mutex::default(),
        released_now: Notify::new(),
        resumed: config.resume,
        left_open: config.left_open,
        tag: u64::from(rand::random::<u32>()) << 32,
    };
    let mut first = None;
    if !config.resume {
        let handshake = daemon;
        // The kernel sends it as soon as it is mounted.
        let shaken = tokio::task::spawn_blocking(move || {
            let first = handshake.shake_hands();
            (handshake, first)
        });
        let (shaken, taken) =
            shaken.await.map_err(|error| FuseError::Protocol(error.to_string()))?;
        daemon = shaken;
        first = taken?;
        daemon.resumed = first.is_some();
    }
    let daemon = Arc::new(daemon);
    daemon.tell_former(config.timeout).await;
    let mut threads = Vec::new();
    let runtime = tokio::runtime::Handle::current();
    let (ended, mut over) = tokio::sync::mpsc::channel::<io::Result<()>>(READERS);
    for number in 0..READERS {
        let (daemon, runtime, ended) = (Arc::clone(&daemon), runtime.clone(), ended.clone());
        let thread = std::thread::Builder::new()
            .name(format!("fuse-{number}"))
            .spawn(move || drop(ended.blocking_send(daemon.read_requests(&runtime))))
            .map_err(FuseError::Device)?;
        threads.push(thread);
    }
    if let Some(request) = first {
        Arc::clone(&daemon).start(request);
    }
    let resent = daemon.resumed && daemon.device.resend();
    on_ready(&Ready { ready: true, root: root.0, life, resumed: daemon.resumed, resent });
    tokio::select! {
        ended = over.recv() => ended.unwrap_or(Ok(())).map_err(FuseError::Device)?,
        () = daemon.keep_in_touch() => {}
    }
    daemon.tell_all().await
}

async fn find_root(client: &Client, config: &FuseConfig) -> Result<InodeId, FuseError> {
    let inode: Inode = client.stat(&config.root, true).await?;
    match inode.kind {
        InodeKind::Directory { .. } => Ok(inode.id),
        _ => Err(FuseError::NotADirectory(config.root.clone())),
    }
}

impl Daemon {
    /// Answers INIT. If the first request is another one, somebody has answered it before: gives
    /// that request.
    fn shake_hands(&self) -> Result<Option<Request>, FuseError> {
        let mut buffer = Buffer::new();
        loop {
            let request = match self.device.receive(&mut buffer).map_err(FuseError::Device)? {
                Received::Request(request) => request,
                Received::Nothing => continue,
                Received::End => {
                    return Err(FuseError::Protocol(
                        "it was unmounted before it was served".into(),
                    ));
                }
            };
            if request.opcode != opcode::INIT {
                return Ok(Some(request));
            }
            if self.agree(&request)? {
                return Ok(None);
            }
        }
    }

    /// Answers INIT; false if the kernel will ask again.
    fn agree(&self, request: &Request) -> Result<bool, FuseError> {
        let mut fields = wire::Fields(&request.body);
        let (Some(major), Some(minor), Some(readahead), Some(flags)) =
            (fields.u32(), fields.u32(), fields.u32(), fields.u32())
        else {
            return Err(FuseError::Protocol("INIT is too short".into()));
        };
        if major > wire::MAJOR {
            // It will say it again with ours.
            self.device.answer(request.unique, &Body::default().u32(wire::MAJOR).zeros(60).0);
            return Ok(false);
        }
        if major < wire::MAJOR || minor < 31 {
            self.device.refuse(request.unique, Errno::PROTO);
            return Err(FuseError::Protocol(format!(
                "the kernel speaks FUSE {major}.{minor}; 3FS needs 7.31 (Linux 5.4) or newer"
            )));
        }
        let mut offered = u64::from(flags);
        if offered & init::EXTENDED != 0 {
            offered |= u64::from(fields.u32().unwrap_or(0)) << 32;
        }
        let wanted = init::WANTED | if self.write_back { init::WRITE_BACK } else { 0 };
        let agreed = offered & wanted;
        let body = Body::default()
            .u32(wire::MAJOR)
            .u32(wire::MINOR)
            .u32(readahead.max(wire::WRITE_BYTES_MAX as u32))
            .u32(agreed as u32)
            .u16(BACKGROUND_MAX)
            .u16(BACKGROUND_MAX / 4 * 3)
            .u32(wire::WRITE_BYTES_MAX as u32)
            .u32(1)
            .u16((wire::WRITE_BYTES_MAX / 4096) as u16)
            .u16(0)
            .u32((agreed >> 32) as u32)
            .zeros(28);
        self.device.answer(request.unique, &body.0);
        Ok(true)
    }

    fn read_requests(self: &Arc<Self>, runtime: &tokio::runtime::Handle) -> io::Result<()> {
        let _entered = runtime.enter();
        let mut buffer = Buffer::new();
        loop {
            match self.device.receive(&mut buffer)? {
                Received::Request(request) => Arc::clone(self).start(request),
                Received::Nothing => {}
                Received::End => return Ok(()),
            }
        }
    }

    /// Begins to work on a request; waits while too many are in work.
    fn start(self: Arc<Self>, request: Request) {
        match request.opcode {
            opcode::FORGET | opcode::BATCH_FORGET => return,
            opcode::INTERRUPT => return self.interrupt(&request),
            // The former daemon died before it answered.
            opcode::INIT => {
                if let Err(error) = self.agree(&request) {
                    tracing::error!(%error, "no handshake with the kernel");
                }
                return;
            }
            _ => {}
        }
        let interrupted = Arc::new(Notify::new());
        let number = request.unique & !RESENT;
        self.running().insert(number, Arc::clone(&interrupted));
        let room = Arc::clone(&self.room);
        let permit = tokio::runtime::Handle::current();
        let work = async move {
            // Closed never.
            let _permit = room.acquire_owned().await;
            let begun = Instant::now();
            let deadline = Deadline::after(self.timeout);
            let mut call = Call { request: &request, deadline, ticket: None };
            let answered = tokio::select! {
                answered = self.answer(&mut call) => answered,
                () = give_up(&interrupted, begun) => {
                    self.left_open.note();
                    Err(Errno::INTR)
                }
            };
            match answered {
                Ok(body) => self.device.answer(request.unique, &body.0),
                Err(error) => self.device.refuse(request.unique, error),
            }
            // The change is given back only after the kernel has its answer: a successor of ours
            // must know it until then.
            drop(call);
            self.running().remove(&number);
        };
        drop(permit.spawn(work));
    }

    fn interrupt(&self, request: &Request) {
        let number = wire::Fields(&request.body).u64().unwrap_or(0) & !RESENT;
        if let Some(interrupted) = self.running().get(&number) {
            interrupted.notify_one();
        }
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Notify>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this mount may be used.
    pub(crate) async fn pass(&self, deadline: Deadline) -> Result<(), Errno> {
        match &self.gate {
            Some(gate) => gate.pass(deadline).await,
            None => Ok(()),
        }
    }

    /// Ends when this mount may not be used ever again.
    async fn lost(&self) {
        match &self.gate {
            Some(gate) => gate.lost_for_good().await,
            None => std::future::pending().await,
        }
    }

    /// Whether this mount may be used now.
    pub(crate) fn may_be_used(&self) -> bool {
        self.gate.as_ref().is_none_or(Gate::is_open)
    }

    async fn answer<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let deadline = call.deadline;
        self.pass(deadline).await?;
        let body = tokio::select! {
            answered = self.work_on(call) => answered?,
            () = self.lost() => return Err(Errno::IO),
        };
        // What was read or done counts only if no other node can have had the claim by now.
        self.pass(deadline).await?;
        Ok(body)
    }

    async fn work_on<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let changes = matches!(
            call.request.opcode,
            opcode::WRITE | opcode::FALLOCATE | opcode::SETXATTR | opcode::REMOVEXATTR
        );
        if changes && self.read_only {
            return Err(Errno::ROFS);
        }
        match call.request.opcode {
            opcode::LOOKUP => self.lookup(call).await,
            opcode::GETATTR => self.get_attributes(call).await,
            opcode::SETATTR => self.set_attributes(call).await,
            opcode::READLINK => self.read_link(call).await,
            opcode::SYMLINK => self.symlink(call).await,
            opcode::MKNOD => self.make_node(call).await,
            opcode::MKDIR => self.make_directory(call).await,
            opcode::UNLINK | opcode::RMDIR => self.remove(call).await,
            opcode::RENAME | opcode::RENAME2 => self.rename(call).await,
            opcode::LINK => self.link(call).await,
            opcode::OPEN => self.open(call).await,
            opcode::CREATE => self.create(call).await,
            opcode::READ => self.read(call).await,
            opcode::WRITE => self.write(call).await,
            opcode::FLUSH => self.flush(call).await,
            opcode::FSYNC => self.fsync(call).await,
            opcode::RELEASE => self.release(call).await,
            opcode::FALLOCATE => self.allocate(call).await,
            // What is written behind is longer than this daemon knows: the kernel answers itself.
            opcode::LSEEK if self.write_back => Err(Errno::NOSYS),
            opcode::LSEEK => self.seek(call).await,
            opcode::OPENDIR => self.open_directory(call).await,
            opcode::READDIR | opcode::READDIRPLUS => self.read_directory(call).await,
            opcode::RELEASEDIR => Ok(self.release_directory(call)),
            opcode::FSYNCDIR | opcode::SYNCFS | opcode::DESTROY => Ok(Body::default()),
            opcode::STATFS => self.space(call).await,
            opcode::SETXATTR => self.set_attribute(call).await,
            opcode::GETXATTR => self.get_attribute(call).await,
            opcode::LISTXATTR => self.list_attributes(call).await,
            opcode::REMOVEXATTR => self.remove_attribute(call).await,
            _ => Err(Errno::NOSYS),
        }
    }

    /// Whether a handle was given out by a former daemon of this mount.
    pub(crate) fn is_former(&self, handle: u64) -> bool {
        self.resumed && handle & !0xffff_ffff != self.tag
    }

    /// A handle of this daemon, with a number below 2^32. Handles of files say nothing but who gave
    /// them out.
    pub(crate) fn handle(&self, number: u64) -> u64 {
        self.tag | number & 0xffff_ffff
    }

    /// Tells the metadata service, again and again, what is held open and how long files are.
    async fn keep_in_touch(&self) {
        let mut all = true;
        loop {
            let paced = tokio::time::timeout(PACE, self.released_now.notified()).await;
            if paced.is_err() {
                self.tell_lengths().await;
            }
            all = self.tell_holds(all).await;
        }
    }

    /// What is about to lose its name must not count as open only because nobody was told that it
    /// was closed: it would count for its quota until it is collected.
    pub(crate) async fn tell_released(&self) {
        let any = !self.released.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if any {
            self.tell_holds(false).await;
        }
    }

    /// Gives whether everything must be told next time.
    async fn tell_holds(&self, all: bool) -> bool {
        let release = {
            let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *released)
        };
        // What was opened again meanwhile is held.
        let release: Vec<InodeId> =
            release.into_iter().filter(|inode| self.files.get(*inode).is_none()).collect();
        let add = if all { self.files.inodes() } else { Vec::new() };
        let client = self.journal.client();
        let hold = MetaQuery::Hold { client, add, release: release.clone(), all };
        let deadline = Deadline::after(self.timeout);
        let told = self.client.query_for(&Identity::ROOT, "hold open files", hold, deadline).await;
        match told {
            Ok(MetaReply::Held { complete }) => !complete,
            Ok(other) => {
                unexpected(&other);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the metadata service does not hear what is open");
                self.released.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
                true
            }
        }
    }

    /// The end: nothing is open any more. What is in work still may tell something, too.
    async fn tell_all(&self) -> Result<(), FuseError> {
        let deadline = Instant::now() + LAST_WORDS;
        while !self.running().is_empty() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if !self.running().is_empty() {
            self.left_open.note();
        }
        self.tell_lengths().await;
        // Of files, too, that were closed while the metadata service was away.
        self.tell_former(LAST_WORDS).await;
        let release = self.files.inodes();
        self.released.lock().unwrap_or_else(PoisonError::into_inner).extend(release);
        let _ = self.tell_holds(false).await;
        match self.journal.all_untold().len() {
            0 => self.left_open.check(),
            files => Err(FuseError::Untold(files)),
        }
    }

    /// The inode's newest attributes.
    pub(crate) async fn stat(&self, call: &Call<'_>, inode: InodeId) -> Result<Inode, Errno> {
        let query = MetaQuery::Stat { at: At::inode(inode), follow: false };
        let reply = self.query_as_root(call, &format!("stat {inode}"), query).await?;
        crate::calls::inode_of(reply)
    }
}

/// Ends when the caller has a signal and the cluster has not answered for a while.
async fn give_up(interrupted: &Notify, begun: Instant) {
    interrupted.notified().await;
    tokio::time::sleep_until((begun + INTERRUPT_AFTER).into()).await;
}
