//! Requests as tasks: bounded in number, each with a deadline, interruptible; start and takeover.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::Client;
use threefs_core::ids::InodeId;
use threefs_meta::{At, Identity, Inode, InodeKind, MetaQuery, MetaReply};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::claim::Gate;
use crate::config::{FuseConfig, FuseError, LeftOpen, Ready};
use crate::device::{Buffer, Device, Received};
use crate::files::Files;
use crate::journal::{Journal, Ticket};
use crate::listing::Listings;
use crate::wire::{self, Body, RESENT, Request, opcode};

mod handshake;
mod telling;

/// Threads that wait for requests; what they read is worked on by the runtime's threads.
const READERS: usize = 2;
/// Requests in work at once. Each may hold a payload of a mebibyte. Further ones wait in the kernel.
const REQUESTS_MAX: usize = 256;
/// While so many are in work, each reader takes one request more only after this pause: the kernel
/// hands out interrupts first, and they must reach the requests that hold the places.
const OVERFLOW_PAUSE: Duration = Duration::from_secs(1);
/// A signal ends a wait for a cluster that has not answered for so long. Before, the operation ends
/// by itself: programs do not expect EINTR of file operations.
const INTERRUPT_AFTER: Duration = Duration::from_secs(1);

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

    /// Who made the system call. A request names one group only, and from another PID namespace not
    /// even the process, so the kernel decides where a group does: mounts of 3FS have
    /// `default_permissions`, under which it checks every operation with all groups of the caller.
    pub(crate) fn identity(&self) -> Identity {
        let user = Identity::user(self.request.uid, self.request.gid);
        Identity { kernel_checked: true, ..user }
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
    client.tag_as_mount(journal.client(), life);
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
        Arc::clone(&daemon).start(request, None);
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
    // Tenants can make links in volumes: none may lead a mount out of its own.
    let query = MetaQuery::Stat { at: At::path(&config.root), follow: true };
    let what = format!("root of the mount `{}`", config.root);
    let deadline = Deadline::after(config.timeout);
    let found = client.query_for(&Identity::CONTROL_PLANE, &what, query, deadline).await?;
    match found {
        MetaReply::Inode(Inode { id, kind: InodeKind::Directory { .. }, .. }) => Ok(id),
        _ => Err(FuseError::NotADirectory(config.root.clone())),
    }
}

impl Daemon {
    fn read_requests(self: &Arc<Self>, runtime: &tokio::runtime::Handle) -> io::Result<()> {
        let _entered = runtime.enter();
        let mut buffer = Buffer::new();
        loop {
            let room = Arc::clone(&self.room).acquire_owned();
            let place = runtime.block_on(async {
                tokio::time::timeout(OVERFLOW_PAUSE, room).await.ok().and_then(Result::ok)
            });
            match self.device.receive(&mut buffer)? {
                Received::Request(request) => Arc::clone(self).start(request, place),
                Received::Nothing => {}
                Received::End => return Ok(()),
            }
        }
    }

    /// Begins to work on a request; `place` is one of those of `REQUESTS_MAX`, if one was free.
    fn start(self: Arc<Self>, request: Request, place: Option<OwnedSemaphorePermit>) {
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
        let (begun, deadline) = (Instant::now(), Deadline::after(self.timeout));
        let work = async move {
            let _place = place;
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
        drop(tokio::spawn(work));
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
