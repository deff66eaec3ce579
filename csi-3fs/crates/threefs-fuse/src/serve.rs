//! FUSE daemon: runs each request as a task with a deadline, bounds their number, handles
//! interrupts, startup and takeover.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{Client, ReadBytes};
use threefs_core::ids::InodeId;
use threefs_meta::{At, Identity, Inode, InodeKind, MetaQuery, MetaReply};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::appends::Appends;
use crate::claim::Gate;
use crate::config::{FuseConfig, FuseError, Ready};
use crate::daemon::{Call, Daemon};
use crate::device::{Buffer, Device, ReadResult};
use crate::files::Files;
use crate::journal::Journal;
use crate::listings::Listings;
use crate::locks::Locks;
use crate::rings::Rings;
use crate::wire::{self, Body, RESENT, Request, is_append, opcode};
use crate::write_behind::WriteBehind;

mod handshake;
mod notify;

/// Number of requests that are read before the tasks of earlier ones run. A payload of
/// `PAYLOAD_BYTES` counts as one more.
const STARTED_MAX: usize = 32;
const PAYLOAD_BYTES: usize = 32 << 10;
/// Maximum number of running requests. Each may hold a payload of 1 MiB. Further requests wait in
/// the kernel.
const REQUESTS_MAX: usize = 256;
/// While `REQUESTS_MAX` requests are running, each reader takes one request more per such pause:
/// the kernel hands out interrupts first, and they must reach the requests that hold the permits.
const OVERFLOW_PAUSE: Duration = Duration::from_secs(1);
/// A signal ends an operation only if the cluster has not answered for this long. Earlier, the
/// operation finishes by itself: programs do not expect EINTR from file operations.
const INTERRUPT_AFTER: Duration = Duration::from_secs(1);
/// Pause before the kernel is asked for another interrupt of a request.
const INTERRUPT_PAUSE: Duration = Duration::from_millis(100);
/// Pause between updates of the counters of read bytes in the journal.
const READS_PAUSE: Duration = Duration::from_secs(5);

/// Serves a mount until it is unmounted. Calls `on_ready` once it is being served.
///
/// # Errors
/// [`FuseError`].
pub fn serve(
    client: Client,
    descriptor: OwnedFd,
    config: FuseConfig,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
) -> BoxFuture<'static, Result<(), FuseError>> {
    Box::pin(run(client, descriptor, config, on_ready))
}

async fn run(
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
            // Programs that use the mount get errors instead of hanging.
            Err(holder) if config.resume => {
                tracing::error!(by = holder, "lost the claim on this volume");
                Gate::closed()
            }
            Err(holder) => return Err(FuseError::Claimed { holder }),
        }),
    };
    let journal =
        Journal::open(config.state.as_deref(), root, !config.resume).map_err(FuseError::State)?;
    let generation = journal.generation();
    client.tag_as_mount(journal.client(), generation);
    let (rings, mut ring_work) = Rings::new();
    // No other mount uses the files of a mount with a claim: the kernel's own locks suffice.
    let locks = Locks::open(&journal, gate.is_none() && !config.write_back);
    let appends = Appends::open(&journal);
    // With a claim, nothing may be written once the claim is lost, and the kernel defers writes.
    let defers = gate.is_none() && !config.write_back && !config.read_only;
    let former = journal.former_writes().map_err(FuseError::State)?;
    let (pending, write_work) = WriteBehind::new(defers, former);
    let mut daemon = Daemon {
        client,
        device: Arc::new(device),
        locks,
        appends,
        journal,
        files: Files::default(),
        pending,
        listings: Listings::default(),
        rings,
        root,
        read_only: config.read_only,
        valid: config.valid,
        gate,
        write_back: config.write_back,
        timeout: config.timeout,
        permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
        running: Mutex::default(),
        closed: Mutex::default(),
        closed_notify: Notify::new(),
        resumed: config.resume,
        unanswered: config.unanswered,
        tag: u64::from(rand::random::<u32>()) << 32,
    };
    let mut first = None;
    if !config.resume {
        // The kernel sends INIT as soon as the file system is mounted.
        let handshake = tokio::task::spawn_blocking(move || {
            let first = daemon.handshake();
            (daemon, first)
        });
        let (connected, request) =
            handshake.await.map_err(|error| FuseError::Protocol(error.to_string()))?;
        daemon = connected;
        first = request?;
        daemon.resumed = first.is_some();
    }
    let daemon = Arc::new(daemon);
    // In a task: it also writes what is pending at the end.
    drop(tokio::spawn(Arc::clone(&daemon).run_write_behind(write_work)));
    daemon.report_former_lengths(config.timeout).await;
    if let Some(request) = first {
        Arc::clone(&daemon).start(request, None);
    }
    let resent = daemon.resumed && daemon.device.resend();
    on_ready(&Ready { ready: true, root: root.0, generation, resumed: daemon.resumed, resent });
    tokio::select! {
        result = Arc::clone(&daemon).read_in_task() => result.map_err(FuseError::Device)?,
        () = daemon.report_periodically() => {}
        () = daemon.run_rings(&mut ring_work) => {}
        () = daemon.keep_locks() => {}
        () = daemon.release_append_leases() => {}
        () = daemon.release_deferred() => {}
        () = daemon.publish_reads() => {}
    }
    daemon.report_final().await
}

async fn find_root(client: &Client, config: &FuseConfig) -> Result<InodeId, FuseError> {
    // Tenants can create symbolic links in volumes: a link must not lead a mount out of its volume.
    let query = MetaQuery::Stat { at: At::path(&config.root), follow: true };
    let operation = format!("root of the mount `{}`", config.root);
    let deadline = Deadline::after(config.timeout);
    let reply = client.query_for(&Identity::CONTROL_PLANE, &operation, query, deadline).await?;
    match reply {
        MetaReply::Inode(Inode { id, kind: InodeKind::Directory { .. }, .. }) => Ok(id),
        _ => Err(FuseError::NotADirectory(config.root.clone())),
    }
}

impl Daemon {
    /// In a task: the runtime's threads execute it next to the requests.
    async fn read_in_task(self: Arc<Self>) -> io::Result<()> {
        let task = tokio::spawn(async move { self.read_requests().await });
        task.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    async fn read_requests(self: &Arc<Self>) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::ERROR;
        let device = Arc::clone(&self.device);
        // SAFETY: the device owns its descriptor, which stays the same and open until the `AsyncFd`
        // is dropped.
        let device = unsafe { AsyncFd::register_with_interest(device, interest) }?;
        let mut buffer = Buffer::new();
        let mut started = 0;
        loop {
            let permit = Arc::clone(&self.permits).acquire_owned();
            let permit =
                tokio::time::timeout(OVERFLOW_PAUSE, permit).await.ok().and_then(Result::ok);
            let request = loop {
                let mut ready = device.ready(interest).await?;
                match self.device.receive(&mut buffer)? {
                    ReadResult::Request(request) => break request,
                    ReadResult::Nothing => {}
                    ReadResult::Empty => ready.clear_ready(),
                    ReadResult::End => return Ok(()),
                }
            };
            started += 1 + request.body.len() / PAYLOAD_BYTES;
            Arc::clone(self).start(request, permit);
            if started >= STARTED_MAX {
                started = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    /// Starts a request; `permit` is one of `REQUESTS_MAX`, if one was free.
    fn start(self: Arc<Self>, request: Request, permit: Option<OwnedSemaphorePermit>) {
        match request.opcode {
            opcode::FORGET | opcode::BATCH_FORGET => return,
            opcode::INTERRUPT => return self.interrupt(&request),
            // The previous daemon died before it answered.
            opcode::INIT => {
                if let Err(error) = self.answer_init(&request) {
                    tracing::error!(%error, "FUSE handshake with the kernel failed");
                }
                return;
            }
            _ => {}
        }
        let interrupted = Arc::new(Notify::new());
        let number = request.unique & !RESENT;
        self.running().insert(number, Arc::clone(&interrupted));
        let (started, deadline) = (Instant::now(), Deadline::after(self.timeout));
        let definite = self.must_be_definite(&request);
        let work = async move {
            let signal = Arc::clone(&interrupted);
            let (ticket, drops_pages, data, request) = (None, false, Vec::new(), &request);
            let mut call =
                Call { request, deadline, ticket, permit, interrupted, drops_pages, data };
            let result = tokio::select! {
                result = self.answer(&mut call) => result,
                () = give_up(&signal, started), if !definite => {
                    self.unanswered.note();
                    Err(Errno::INTR)
                }
            };
            match result {
                Ok(body) => self.device.answer(request.unique, &body.0, &call.data),
                Err(error) => self.device.refuse(request.unique, error),
            }
            if call.drops_pages {
                let (daemon, id) = (Arc::clone(&self), self.inode(request.node));
                let deadline = Deadline::after(self.timeout);
                drop(tokio::spawn(async move { daemon.drop_pages(id, 0, 0, deadline).await }));
            }
            // The change ends only after the kernel has its answer: until then a successor must
            // know it.
            drop(call);
            self.running().remove(&number);
        };
        drop(tokio::spawn(work));
    }

    /// Adds what the client reads to the counters of the journal.
    async fn publish_reads(&self) {
        let mut published = ReadBytes::default();
        loop {
            tokio::time::sleep(READS_PAUSE).await;
            let now = self.client.read_bytes();
            self.journal.add_reads(published, now);
            published = now;
        }
    }

    /// Whether a request must not be given up: its effect would be unknown.
    fn must_be_definite(&self, request: &Request) -> bool {
        match request.opcode {
            opcode::SETLK | opcode::SETLKW => true,
            // Nor may it change the file after the locks of its process were released.
            opcode::WRITE => {
                let id = self.inode(request.node);
                self.locks.is_locked(id) || is_append(request)
            }
            opcode::FLUSH | opcode::RELEASE | opcode::FALLOCATE | opcode::SETATTR => {
                self.locks.is_locked(self.inode(request.node))
            }
            _ => false,
        }
    }

    fn interrupt(&self, request: &Request) {
        let number = wire::Fields(&request.body).u64().unwrap_or(0) & !RESENT;
        if let Some(interrupted) = self.running().get(&number) {
            return interrupted.notify_one();
        }
        // Answered, or not resent by the kernel yet: it sends the interrupt again if the request is
        // still unanswered.
        let (device, unique) = (Arc::clone(&self.device), request.unique);
        drop(tokio::spawn(async move {
            tokio::time::sleep(INTERRUPT_PAUSE).await;
            device.refuse(unique, Errno::AGAIN);
        }));
    }

    async fn answer<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let deadline = call.deadline;
        self.wait_servable(deadline).await?;
        let body = tokio::select! {
            body = self.execute(call) => body?,
            () = self.wait_lost() => return Err(Errno::IO),
        };
        // The result is valid only if no other node can hold the claim by now.
        self.wait_servable(deadline).await?;
        Ok(body)
    }
}

/// Returns once the caller has a signal and the cluster has not answered for `INTERRUPT_AFTER`.
async fn give_up(interrupted: &Notify, started: Instant) {
    interrupted.notified().await;
    tokio::time::sleep_until((started + INTERRUPT_AFTER).into()).await;
}
