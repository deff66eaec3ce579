//! A kernel that sends the requests of a test, and a metadata service that answers as the test says.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::auth::Key;
use fabric::rpc::{Call, Fault, Reply, Server, ServerConfig, Service, Shutdown, ShutdownHandle};
use rustix::io::Errno;
use threefs_client::{Client, ClientConfig};
use threefs_core::ids::{InodeId, TableId, TableVersion};
use threefs_core::layout::{ChainChoice, Layout};
use threefs_meta::protocol::{CONTEXT, decode_request};
use threefs_meta::{
    Inode, InodeKind, LayoutDefaults, LockAnswer, LockChange, LockQuery, MetaChange, MetaQuery,
    MetaReply, MetaRequest, MetaResult, Nanoseconds, Written,
};
use tokio::sync::oneshot;

use crate::config::{FuseConfig, UnansweredCalls};
use crate::wire::{Body, Fields, opcode};

/// Timeout of the mount's operations.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a test waits for what must happen.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
const ROOT: InodeId = InodeId(1);

/// How the metadata service treats requests of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    Answer,
    /// As a service of an earlier release, which does not know them.
    Refuse,
    Silence,
}

#[derive(Clone, Copy)]
pub(super) struct Script {
    pub locks: Treatment,
    pub renewals: Treatment,
    /// Whether requests that can wait do.
    /// Releases are answered as of a session that has ended.
    pub releases_lost: bool,
    pub wait: bool,
    pub lease_ms: u64,
}

pub(super) struct Meta {
    pub script: Mutex<Script>,
    requests: Mutex<Vec<MetaRequest>>,
}

fn inode(id: InodeId) -> Inode {
    let layout = Layout {
        table: TableId(1),
        table_version: TableVersion(1),
        chunk_bytes: 1 << 20,
        stripe: 1,
        chains: ChainChoice::Explicit(Vec::new()),
    };
    let (length, reserved, truncate_version, content) = (0, 0, 0, 0);
    let written = Written::default();
    let kind = match id {
        ROOT => InodeKind::Directory { parent: ROOT, defaults: LayoutDefaults::default() },
        _ => InodeKind::File { layout, length, reserved, truncate_version, content, written },
    };
    let (mode, uid, gid, links, time) = (0o644, 0, 0, 1, Nanoseconds(0));
    let (accessed, modified, changed) = (time, time, time);
    let (version, quota) = (1, None);
    Inode { id, version, kind, mode, uid, gid, links, accessed, modified, changed, quota }
}

fn locks_of(request: &MetaRequest, script: Script) -> Option<(Treatment, LockAnswer)> {
    let renewed = LockAnswer::Renewed { lease_ms: script.lease_ms };
    Some(match request {
        MetaRequest::Query { query: MetaQuery::Lock(query), .. } => match query {
            LockQuery::Renew { .. } => (script.renewals, renewed),
            LockQuery::Test { .. } => (script.locks, LockAnswer::Granted),
            LockQuery::Await { .. } | LockQuery::Recalls { .. } => {
                (script.locks, LockAnswer::Waiting)
            }
        },
        MetaRequest::Change { change: MetaChange::Lock(change), .. } => {
            let answer = match change {
                LockChange::Start { .. } => renewed,
                LockChange::Set { wait: Some(_), .. } if script.wait => LockAnswer::Waiting,
                LockChange::Set { .. } => LockAnswer::Granted,
                LockChange::Clear { .. } if script.releases_lost => LockAnswer::Lost,
                _ => LockAnswer::Released { in_use: false },
            };
            (script.locks, answer)
        }
        _ => return None,
    })
}

impl Service for Meta {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request = decode_request(&call.message)?;
        let script = *self.script.lock().unwrap();
        let locks = locks_of(&request, script);
        let reply = match (&request, locks) {
            (_, Some((_, answer))) => MetaReply::Lock(answer),
            (MetaRequest::Query { query, .. }, _) => match query {
                MetaQuery::ReportOpenFiles { .. } => {
                    MetaReply::OpenFilesReported { complete: true }
                }
                MetaQuery::Stat { at, .. } | MetaQuery::Open { at, .. } => {
                    MetaReply::Inode(inode(if at.path.is_empty() { at.directory } else { ROOT }))
                }
                other => panic!("{other:?}"),
            },
            (MetaRequest::Change { change, .. }, _) => match change {
                MetaChange::SetLength { at, .. } => MetaReply::Inode(inode(at.directory)),
                other => panic!("{other:?}"),
            },
        };
        self.requests.lock().unwrap().push(request);
        match locks {
            Some((Treatment::Refuse, _)) => Err(Fault::bad_request("unknown request")),
            Some((Treatment::Silence, _)) => std::future::pending().await,
            _ => Reply::of(&MetaResult::Ok(reply)),
        }
    }
}

impl Meta {
    pub(super) fn set(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }

    /// Requests so far, without periodic ones.
    pub(super) fn requests(&self) -> Vec<MetaRequest> {
        let periodic = |request: &MetaRequest| {
            let MetaRequest::Query { query, .. } = request else { return false };
            matches!(
                query,
                MetaQuery::ReportOpenFiles { .. } | MetaQuery::Lock(LockQuery::Renew { .. })
            )
        };
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|request| !periodic(request)).cloned().collect()
    }

    /// Changes of locks so far.
    pub(super) fn changes(&self) -> Vec<LockChange> {
        let change = |request| match request {
            MetaRequest::Change { change: MetaChange::Lock(change), .. } => Some(change),
            _ => None,
        };
        self.requests().into_iter().filter_map(change).collect()
    }
}

type Answers = Mutex<HashMap<u64, oneshot::Sender<Result<Vec<u8>, Errno>>>>;

/// A mount, seen from the kernel.
pub(super) struct Mount {
    pub meta: Arc<Meta>,
    kernel: Arc<tokio::net::UnixDatagram>,
    answers: Arc<Answers>,
    unique: AtomicU64,
    _keep: ShutdownHandle,
}

/// A request that was sent.
pub(super) struct Sent {
    pub unique: u64,
    answer: oneshot::Receiver<Result<Vec<u8>, Errno>>,
}

impl Sent {
    pub(super) async fn answer(self) -> Result<Vec<u8>, Errno> {
        tokio::time::timeout(PATIENCE, self.answer).await.expect("no answer").unwrap()
    }
}

impl Mount {
    pub(super) async fn new() -> Self {
        let key = Key::from_bytes(b"a key of sixteen bytes or more").unwrap();
        let server = Server::bind("127.0.0.1:0", ServerConfig::new(CONTEXT, key.clone()));
        let server = server.await.unwrap();
        let (address, (keep, shutdown)) = (server.address().to_string(), Shutdown::new());
        let answers = Treatment::Answer;
        let script = Script {
            locks: answers,
            renewals: answers,
            wait: false,
            releases_lost: false,
            lease_ms: 30_000,
        };
        let meta = Arc::new(Meta { script: Mutex::new(script), requests: Mutex::default() });
        tokio::spawn(server.serve(Arc::clone(&meta), shutdown));
        let client = Client::start(ClientConfig::new(Vec::new(), vec![address], key));
        let (kernel, device) = UnixDatagram::pair().unwrap();
        kernel.set_nonblocking(true).unwrap();
        let config = FuseConfig {
            root: "/".into(),
            read_only: false,
            resume: false,
            state: None,
            timeout: TIMEOUT,
            claim: None,
            write_back: false,
            valid: Duration::ZERO,
            unanswered: Arc::new(UnansweredCalls::new(None, false)),
        };
        tokio::spawn(async move {
            crate::serve(client, OwnedFd::from(device), config, Box::new(|_| ())).await.unwrap();
        });
        let kernel = Arc::new(tokio::net::UnixDatagram::from_std(kernel).unwrap());
        let answers = Arc::new(Answers::default());
        tokio::spawn(receive(Arc::clone(&kernel), Arc::clone(&answers)));
        let mount = Self { meta, kernel, answers, unique: AtomicU64::new(2), _keep: keep };
        let init = Body::default().u32(7).u32(38).u32(0).u32(u32::MAX).u32(u32::MAX);
        mount.request(opcode::INIT, ROOT.0, init).await.unwrap();
        mount
    }

    pub(super) async fn send(&self, opcode: u32, node: u64, body: Body) -> Sent {
        let unique = self.unique.fetch_add(2, SeqCst);
        let (sender, answer) = oneshot::channel();
        self.answers.lock().unwrap().insert(unique, sender);
        let length = 40 + body.0.len() as u32;
        let header = Body::default().u32(length).u32(opcode).u64(unique).u64(node).zeros(16);
        self.kernel.send(&[header.0, body.0].concat()).await.unwrap();
        Sent { unique, answer }
    }

    pub(super) async fn request(
        &self,
        opcode: u32,
        node: u64,
        body: Body,
    ) -> Result<Vec<u8>, Errno> {
        self.send(opcode, node, body).await.answer().await
    }

    /// Opens a file; returns its handle.
    pub(super) async fn open(&self, node: u64) -> u64 {
        let body = self.request(opcode::OPEN, node, Body::default().u32(2).u32(0)).await.unwrap();
        Fields(&body).u64().unwrap()
    }

    /// Reports a signal of the process that waits for an answer.
    pub(super) async fn interrupt(&self, unique: u64) {
        self.send(opcode::INTERRUPT, 0, Body::default().u64(unique)).await;
    }

    pub(super) async fn flush(&self, node: u64, handle: u64, owner: u64) -> Result<Vec<u8>, Errno> {
        let body = Body::default().u64(handle).u64(0).u64(owner);
        self.request(opcode::FLUSH, node, body).await
    }

    pub(super) async fn release(&self, node: u64, handle: u64) {
        let body = Body::default().u64(handle).u32(0).u32(0).u64(0);
        self.request(opcode::RELEASE, node, body).await.unwrap();
    }
}

async fn receive(kernel: Arc<tokio::net::UnixDatagram>, answers: Arc<Answers>) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(length) = kernel.recv(&mut buffer).await {
        let mut fields = Fields(&buffer[4..length]);
        let (error, unique) = (fields.u32().unwrap() as i32, fields.u64().unwrap());
        if unique == 0 {
            continue; // A notification.
        }
        let answer = match error {
            0 => Ok(fields.0.to_vec()),
            error => Err(Errno::from_raw_os_error(-error)),
        };
        if let Some(sender) = answers.lock().unwrap().remove(&unique) {
            let _ = sender.send(answer);
        }
    }
}

pub(super) async fn eventually(mut reached: impl FnMut() -> bool) {
    let since = Instant::now();
    while !reached() {
        assert!(since.elapsed() < PATIENCE, "the condition is not reached");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
