//! From strangers to a group: what a rank tells the others, and how they connect.
//!
//! ```text
//! new      opens a port (and, as the first rank of its node, a local socket)
//! info     what the others need to know; the caller exchanges it through any store
//! connect  checks that all agree, meets the ranks of its node (shared memory, bells), dials and
//!          accepts its tree neighbours, then meets everybody in a first barrier
//! ```

mod locals;
mod neighbours;
mod options;
mod record;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use fabric::auth::{Key, nonce};
use fabric::deadline::Deadline;
use fabric::shm;
use fabric::tcp::{self, Port};
use hfreduce_plan::Plan;
use serde::{Deserialize, Serialize};

use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::communicator::Communicator;
use crate::drivers::mesh::Mesh;
use crate::drivers::{Driver, Identity, Parts, Shared, poller};
use crate::flight::Recorder;
use crate::placement::Placement;
pub use options::{LOCALS_MAX, Options, default_slots};

use neighbours::{Hello, Inbox, dial, open_port};
use options::check;

const INFO_VERSION: u32 = 2;
const ADDRESSES_MAX: usize = 16;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a direct connection is tried for.
const DIRECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Ranks of a node that share its work at most: more add system calls, not bandwidth.
const CHANNELS_MAX: usize = 8;

/// What the others need to know about a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Info {
    version: u32,
    rank: u32,
    id: u64,
    /// Machine and network namespace: equal ones reach each other over loopback.
    host: String,
    processors: usize,
    addresses: Vec<IpAddr>,
    port: u16,
    local_socket: String,
    /// Where neighbours on this machine leave their boards for us.
    #[serde(default)]
    counter: String,
    /// A digest of everything that must be the same on all ranks.
    agreement: u64,
    agreed: String,
    channels: Option<usize>,
}

/// One rank before it knows its peers.
pub struct Endpoint {
    options: Options,
    placement: Placement,
    plan: Plan,
    key: Key,
    info: Info,
    port: Port,
    inbox: Arc<Inbox>,
    local_listener: Option<UnixListener>,
    recorder: OnceLock<Arc<Recorder>>,
    counter: Option<UnixListener>,
}

impl Endpoint {
    /// Opens what the others will connect to.
    ///
    /// # Errors
    /// Arguments that make no sense, and what the machine refuses.
    pub fn new(options: Options, key: &[u8]) -> Result<Self, CollectiveError> {
        let refuse = |detail: String| refused(&options, CauseKind::Invalid, "being called", detail);
        let placement =
            Placement::new(&options.placement).map_err(|error| refuse(error.to_string()))?;
        check(&options, &placement).map_err(refuse)?;
        let plan = match &options.bridge {
            Some((a, b)) => Plan::with_bridge(placement.nodes(), (a, b)),
            None => Plan::new(placement.nodes()),
        }
        .map_err(|error| refuse(error.to_string()))?;
        let key = Key::from_bytes(key).map_err(|error| refuse(error.to_string()))?;
        let trouble = |what: &str, error: io::Error| {
            refused(&options, CauseKind::Io, "opening", format!("{what}: {error}"))
        };
        let chance = || nonce().map_err(|error| trouble("asking the system for chance", error));
        let id = u64::from_le_bytes(first_eight(&chance()?));
        let inbox: Arc<Inbox> = Arc::default();
        let port = open_port(&options, &key, id, inbox.clone())
            .map_err(|error| trouble("listening on a TCP port", error))?;
        let node = placement.node_of(options.rank);
        let first = placement.members(node)[0] == options.rank && placement.members(node).len() > 1;
        let listen = |wanted: bool| {
            let name = format!("hfreduce-{:016x}", u64::from_le_bytes(first_eight(&chance()?)));
            let listener = wanted.then(|| shm::listen(&name)).transpose();
            listener
                .map(|listener| (name, listener))
                .map_err(|error| trouble("listening on a local socket", error))
        };
        let (local_socket, local_listener) = listen(first)?;
        let (counter, counter_listener) = listen(options.lend && placement.nodes().len() > 1)?;
        let agreed = format!(
            "placement {:?}, bridge {:?}, slot_bytes {}, slots {:?}, window {}",
            options.placement, options.bridge, options.slot_bytes, options.slots, options.window
        );
        let info = Info {
            version: INFO_VERSION,
            rank: options.rank,
            id,
            host: host(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            addresses: options.address.map_or_else(own_addresses, |address| vec![address]),
            port: port.address().port(),
            local_socket,
            counter,
            agreement: digest(agreed.as_bytes()),
            agreed: format!(
                "{} ranks, slot_bytes {}, slots {:?}, window {}, bridge {:?}",
                options.placement.len(),
                options.slot_bytes,
                options.slots,
                options.window,
                options.bridge
            ),
            channels: options.channels,
        };
        let (recorder, counter) = (OnceLock::new(), counter_listener);
        Ok(Self {
            options,
            placement,
            plan,
            key,
            info,
            port,
            inbox,
            local_listener,
            counter,
            recorder,
        })
    }

    /// What the others need to know.
    pub fn info(&self) -> Vec<u8> {
        serde_json::to_vec(&self.info).unwrap_or_default()
    }

    /// How many connections the port has refused.
    pub fn refused(&self) -> u64 {
        self.port.counters().refused.load(std::sync::atomic::Ordering::Relaxed)
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
        let deadline = Deadline::after(timeout);
        let infos = self.read_infos(infos)?;
        let group =
            digest(&infos.iter().flat_map(|info| info.id.to_le_bytes()).collect::<Vec<_>>());
        let recorder = Arc::new(Recorder::new(&self.options.folders, &self.about(group)));
        let _ = self.recorder.set(recorder.clone());
        self.meet(infos, group, recorder.clone(), deadline)
            .map_err(|error| record::recorded(error, &recorder))
    }

    fn meet(
        self,
        infos: Vec<Info>,
        group: u64,
        recorder: Arc<Recorder>,
        deadline: Deadline,
    ) -> Result<Communicator, CollectiveError> {
        let channels = self.channels(&infos);
        let options = &self.options;
        let nodes = self.placement.nodes().len();
        let slots =
            options.slots.unwrap_or_else(|| default_slots(nodes, channels, options.slot_bytes));
        let identity = Identity {
            job: options.job.clone(),
            rank: options.rank,
            placement: self.placement.clone(),
            channels,
            liveness: options.liveness,
        };
        let bell =
            poller::bell().map_err(|e| self.trouble("connecting", format!("eventfd: {e}")))?;
        let (board, neighbourhood) = self.meet_locals(&infos, group, &bell, slots, deadline)?;
        let trunk = self.meet_neighbours(&infos, group, channels, &board, deadline)?;
        let on_host = infos.iter().filter(|info| info.host == self.info.host).count();
        // With more ranks than processors whoever looks longer only keeps the others from working.
        let spin = if on_host <= self.info.processors { 30 } else { 0 };
        let shared = Arc::new(Shared {
            identity,
            submissions: Mutex::default(),
            admitted: Mutex::default(),
            dialled: Mutex::default(),
            abort_asked: Mutex::default(),
            news: false.into(),
            bell,
            room: Default::default(),
            broken: Default::default(),
            counters: Default::default(),
            recorder,
        });
        let (key, host, directory) = (self.key.clone(), self.info.host.clone(), infos);
        let from = self.options.rank;
        let mesh = Mesh::new(Arc::new(move |peer, until| {
            let left = until.saturating_duration_since(Instant::now()).min(DIRECT_TIMEOUT);
            let hello = Hello { group, from, tree: false };
            dial(&key, &host, &directory[peer as usize], hello, Deadline::after(left))
        }));
        let spin = Duration::from_micros(spin);
        let parts = Parts { shared: shared.clone(), board, neighbourhood, trunk, mesh, spin };
        let trouble =
            |error: io::Error| refused(&self.options, CauseKind::Io, "starting", error.to_string());
        let driver = Driver::new(parts).map_err(trouble)?;
        let _ = self.inbox.group.set((group, shared.clone()));
        self.inbox.pass_on();
        let communicator =
            Communicator::start(shared, driver, self.plan, self.port).map_err(trouble)?;
        communicator.meet(deadline.remaining().unwrap_or_default())?;
        Ok(communicator)
    }

    fn trouble(&self, phase: &str, detail: String) -> CollectiveError {
        refused(&self.options, CauseKind::Io, phase, detail)
    }

    /// An error during `connect` that blames a rank.
    fn blame(&self, kind: CauseKind, rank: u32, phase: &str, detail: String) -> CollectiveError {
        let mut error = refused(&self.options, kind, phase, detail);
        *error.cause = error.cause.clone().blaming(rank, self.placement.node_name(rank));
        error
    }

    fn read_infos(&self, infos: &[Vec<u8>]) -> Result<Vec<Info>, CollectiveError> {
        let want = self.placement.world_size();
        if infos.len() != want {
            let detail = format!("{} infos for {want} ranks; give one per rank", infos.len());
            return Err(refused(&self.options, CauseKind::Invalid, "connecting", detail));
        }
        let mut read = Vec::with_capacity(want);
        for (rank, bytes) in infos.iter().enumerate() {
            let phase = "reading what the ranks told";
            let blame =
                |detail: String| self.blame(CauseKind::Mismatch, rank as u32, phase, detail);
            let info: Info = serde_json::from_slice(bytes)
                .map_err(|error| blame(format!("its info cannot be read: {error}")))?;
            if info.version != INFO_VERSION {
                let detail = format!(
                    "it speaks version {} and we {INFO_VERSION}: install the same release",
                    info.version
                );
                return Err(blame(detail));
            }
            if info.rank != rank as u32 {
                return Err(blame(format!("info {rank} is rank {}'s: order them", info.rank)));
            }
            if info.agreement != self.info.agreement {
                let detail = format!("it has {} and we have {}", info.agreed, self.info.agreed);
                return Err(blame(format!(
                    "{detail}; give all ranks the same placement and sizes"
                )));
            }
            read.push(info);
        }
        Ok(read)
    }

    /// How many ranks of each node share its work: as many as the busiest machine has processors
    /// for each of its nodes. The same on all ranks, because all look at the same infos.
    fn channels(&self, infos: &[Info]) -> usize {
        let mut machines: HashMap<&str, (usize, Vec<usize>)> = HashMap::new();
        for info in infos {
            let (processors, nodes) =
                machines.entry(&info.host).or_insert((info.processors, vec![]));
            *processors = (*processors).min(info.processors);
            nodes.push(self.placement.node_of(info.rank));
        }
        let per_node = machines.into_values().map(|(processors, mut nodes)| {
            nodes.sort_unstable();
            nodes.dedup();
            processors / nodes.len().max(1)
        });
        let asked = infos.iter().filter_map(|info| info.channels).min();
        asked
            .or_else(|| per_node.min())
            .unwrap_or(1)
            .clamp(1, self.placement.members_min().min(CHANNELS_MAX))
    }
}

fn context(id: u64) -> String {
    format!("hfreduce/{id:016x}")
}
fn first_eight(bytes: &[u8]) -> [u8; 8] {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    eight
}

/// FNV-1a: a digest for comparison, not for security (the connection is authenticated).
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Where others may reach us; a machine full of containers has hundreds, and the info stays small.
fn own_addresses() -> Vec<IpAddr> {
    let mut addresses = tcp::own_addresses();
    addresses.truncate(ADDRESSES_MAX);
    addresses
}

/// This machine and network namespace: processes with equal ones reach each other over loopback.
fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net")
        .map(|link| link.display().to_string())
        .unwrap_or_default();
    format!("{} {network}", boot.trim())
}

fn refused(options: &Options, kind: CauseKind, phase: &str, detail: String) -> CollectiveError {
    let node = options.placement.get(options.rank as usize);
    let node = node.map(|(node, _)| node.clone()).unwrap_or_default();
    CollectiveError {
        job: options.job.as_str().into(),
        rank: options.rank,
        operation: "connect".to_owned(),
        sequence: -1,
        phase: phase.to_owned(),
        cause: Box::new(Cause::new(kind, options.rank, detail).blaming(options.rank, &node)),
        node: node.into(),
        flight_record: None,
    }
}
