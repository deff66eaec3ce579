//! Endpoint of a rank before it is connected: it publishes its info and connects to the group.
//!
//! ```text
//! new      opens a port (and, as the first rank of its node, a local socket)
//! info     what the others need to know; the caller exchanges it through any store
//! connect  checks that all agree, connects to the ranks of its node (shared memory, doorbell), dials
//!          and accepts its tree neighbors, then waits for all ranks in a first barrier
//! ```

mod agreement;
#[cfg(test)]
mod fuzz_test;
mod identity;
mod info;
mod locals;
mod members;
mod neighbors;
mod options;
mod reconfigure;
mod record;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use hfreduce_plan::Plan;

use crate::communicator::Communicator;
use crate::driver::p2p::P2p;
use crate::driver::{Driver, Identity, Parts, Shared};
pub use crate::member::Member;
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_core::placement::Placement;
use hfreduce_shm::flight::Recorder;
pub use hfreduce_transport::open::TransportKind;
use hfreduce_transport::poller;
use identity::EndpointIdentity;
pub use identity::ReconfigureSource;
pub use identity::check_descriptors;
pub use info::{Info, refused};
use info::{LocalSockets, digest};
pub use members::choose;
use neighbors::{Hello, Purpose, dial};
pub use options::REGISTERED_BYTES_MAX;
use options::check;
use options::default_ring_slots;
pub use options::{LOCALS_MAX, Options, STREAMS_MAX, default_slots, descriptors_needed};
pub use reconfigure::CLOSE;
pub use reconfigure::Newcomer;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of ranks of a node that own chunks: more add system calls, not bandwidth.
const CHANNELS_MAX: usize = 8;

/// The endpoint of one rank.
pub struct Endpoint {
    options: Options,
    placement: Placement,
    plan: Plan,
    identity: Arc<EndpointIdentity>,
    info: Info,
    local_sockets: LocalSockets,
    recorder: OnceLock<Arc<Recorder>>,
}

impl Endpoint {
    /// Opens the port and the local sockets.
    ///
    /// # Errors
    /// Invalid options, or a resource that the system refuses.
    pub fn new(options: Options, key: &[u8]) -> Result<Self, CollectiveError> {
        let (placement, plan) = placed(&options)?;
        let identity = EndpointIdentity::open(&options, &placement, key)?;
        let locals = placement.members(placement.node_of(options.rank));
        let first = locals[0] == options.rank && locals.len() > 1;
        let borrows = options.peer_memory && placement.nodes().len() > 1;
        let local_sockets = LocalSockets::open(first, borrows).map_err(|error| {
            let detail = format!("listening on a local socket: {error}");
            refused(&options, ErrorKind::Io, "opening", detail)
        })?;
        let mut info = identity.info(&options, options.rank, &local_sockets);
        let ranks = options.placement.len();
        info.agree(
            &format!("{ranks} ranks, bridge {:?}", options.bridge),
            &format!("{:?}", options.placement),
        );
        let (identity, recorder) = (Arc::new(identity), OnceLock::new());
        Ok(Self { options, placement, plan, identity, info, local_sockets, recorder })
    }

    /// The endpoint of the same rank in a later epoch, with the same port.
    fn of_epoch(
        identity: Arc<EndpointIdentity>,
        options: Options,
        info: Info,
        local_sockets: LocalSockets,
    ) -> Result<Self, CollectiveError> {
        let (placement, plan) = placed(&options)?;
        identity.reserve(&options, &placement)?;
        Ok(Self {
            options,
            placement,
            plan,
            identity,
            info,
            local_sockets,
            recorder: OnceLock::new(),
        })
    }

    /// The info that the other ranks need, encoded.
    pub fn info(&self) -> Vec<u8> {
        serde_json::to_vec(&self.info).unwrap_or_default()
    }

    /// Registered memory of this rank.
    pub fn arena(&self) -> io::Result<Arc<Arena>> {
        self.identity.arena(&self.options)
    }

    /// Number of connections that the port has refused.
    pub fn refused(&self) -> u64 {
        self.identity.refused()
    }

    /// Connects to all ranks, given the infos of all ranks in rank order.
    ///
    /// # Errors
    /// The rank that is missing or does not match.
    pub fn connect(
        self,
        infos: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let deadline = Deadline::after(timeout);
        let infos = self.read_infos(infos)?;
        let group =
            digest(&infos.iter().flat_map(|info| info.id.to_le_bytes()).collect::<Vec<_>>());
        self.enter(infos, group, 0, deadline)
    }

    /// Connects to the group with this id.
    fn enter(
        self,
        infos: Vec<Info>,
        group: u64,
        epoch: u32,
        deadline: Deadline,
    ) -> Result<Communicator, CollectiveError> {
        self.identity.inbox.start(group, infos.len());
        let about = self.rank_info(&infos, group, epoch);
        let recorder = Arc::new(Recorder::new(&self.options.folders, &about));
        let _ = self.recorder.set(recorder.clone());
        self.meet(infos, (group, epoch), recorder.clone(), deadline)
            .map_err(|error| record::with_dump(error, &recorder))
    }

    fn meet(
        self,
        infos: Vec<Info>,
        (group, epoch): (u64, u32),
        recorder: Arc<Recorder>,
        deadline: Deadline,
    ) -> Result<Communicator, CollectiveError> {
        let channels = self.channels(&infos);
        let options = &self.options;
        let nodes = self.placement.nodes().len();
        let slots = options.slots.unwrap_or_else(|| {
            default_slots(nodes, channels, options.slot_bytes, options.priority)
        });
        let crowded = self.is_crowded(&infos);
        let ring_accumulation = crowded && nodes == 1;
        let ring_slots =
            if ring_accumulation { default_ring_slots(slots, options.slot_bytes) } else { 0 };
        let identity = Identity {
            job: options.job.clone(),
            rank: options.rank,
            placement: self.placement.clone(),
            channels,
            liveness: options.liveness,
            ring_accumulation,
            determinism: options.determinism,
            served: infos.iter().map(|info| info.served).collect(),
            priority: options.priority,
            share: options.share.clone(),
            held_back: options.held_back,
            reached_at: self.info.reached_at(),
        };
        let doorbell =
            poller::doorbell().map_err(|e| self.io_error("connecting", format!("eventfd: {e}")))?;
        let (shm, node_peers, arenas) =
            self.meet_locals(&infos, group, &doorbell, (slots, ring_slots, channels), deadline)?;
        let tree_links = self.meet_neighbors(&infos, group, channels, &shm, deadline)?;
        // With shared CPUs, polling only keeps the other ranks from working.
        let spin = if crowded { 0 } else { 30 };
        let shared = Arc::new(Shared::new(identity, doorbell, recorder));
        let infos = Arc::new(infos);
        let (key, host) = (self.identity.key.clone(), self.info.host.clone());
        let directory = infos.clone();
        let from = self.options.rank;
        if self.placement.local_of(from) == 0 && nodes > 1 {
            let node = self.placement.node_name(from);
            tracing::info!(job = options.job, node, at = shared.identity.reached_at, "reached at");
        }
        let ended = shared.clone();
        let p2p = P2p::new(Arc::new(move |peer, until| {
            let remaining = until.saturating_duration_since(Instant::now());
            let hello = Hello { group, from, purpose: Purpose::Direct, stream: 0 };
            let (to, until) = (&directory[peer as usize], Deadline::after(remaining));
            dial(&key, &host, to, hello, until, &|| ended.broken.get().is_some())
        }));
        let spin = Duration::from_micros(spin);
        let parts =
            Parts { shared: shared.clone(), shm, node_peers, tree_links, p2p, arenas, spin };
        let io_error =
            |error: io::Error| refused(&self.options, ErrorKind::Io, "starting", error.to_string());
        let driver = Driver::new(parts).map_err(io_error)?;
        self.identity.inbox.hand_over_to(group, shared.clone());
        let (identity, options) = (self.identity.clone(), self.options.clone());
        let session = Box::new(ReconfigureSource { identity, options, infos, epoch });
        let communicator =
            Communicator::start(shared, Box::new(driver), self.plan, session).map_err(io_error)?;
        communicator.meet(deadline.remaining().unwrap_or_default())?;
        Ok(communicator)
    }

    fn io_error(&self, phase: &str, detail: String) -> CollectiveError {
        refused(&self.options, ErrorKind::Io, phase, detail)
    }

    /// The error of `connect` that names another rank.
    fn peer_error(
        &self,
        kind: ErrorKind,
        rank: u32,
        phase: &str,
        detail: String,
    ) -> CollectiveError {
        let mut error = refused(&self.options, kind, phase, detail);
        *error.cause = error.cause.clone().with_peer(rank, self.placement.node_name(rank));
        error
    }

    fn read_infos(&self, infos: &[Vec<u8>]) -> Result<Vec<Info>, CollectiveError> {
        let want = self.placement.world_size();
        if infos.len() != want {
            let detail = format!("{} infos for {want} ranks; give one per rank", infos.len());
            return Err(refused(&self.options, ErrorKind::Invalid, "connecting", detail));
        }
        let mut read = Vec::with_capacity(want);
        for (rank, bytes) in infos.iter().enumerate() {
            let phase = "reading the infos of the ranks";
            let peer_error =
                |detail: String| self.peer_error(ErrorKind::Mismatch, rank as u32, phase, detail);
            let info: Info = serde_json::from_slice(bytes)
                .map_err(|error| peer_error(format!("invalid info: {error}")))?;
            if info.version != info::VERSION {
                let detail = format!(
                    "it has protocol version {} and this rank {}: install the same release",
                    info.version,
                    info::VERSION
                );
                return Err(peer_error(detail));
            }
            if info.rank != rank as u32 {
                return Err(peer_error(format!(
                    "info {rank} is that of rank {}: sort them",
                    info.rank
                )));
            }
            if info.agreement != self.info.agreement {
                let detail = format!("it has {}, this rank {}", info.agreed, self.info.agreed);
                return Err(peer_error(format!(
                    "{detail}; give all ranks the same placement and sizes"
                )));
            }
            read.push(info);
        }
        Ok(read)
    }

    /// True if this machine has more ranks than CPUs; equal on all of its ranks.
    fn is_crowded(&self, infos: &[Info]) -> bool {
        let local = infos.iter().filter(|info| info.host == self.info.host);
        let processors = local.clone().map(|info| info.processors).min().unwrap_or(1);
        local.count() > processors
    }

    /// Number of ranks of each node that own chunks: as many as the busiest machine has CPUs for
    /// each of its nodes. Equal on all ranks, since all use the same infos.
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
        let requested = infos.iter().filter_map(|info| info.channels).min();
        requested
            .or_else(|| per_node.min())
            .unwrap_or(1)
            .clamp(1, self.placement.members_min().min(CHANNELS_MAX))
    }
}

/// The placement of the ranks, and the plan.
pub fn placed(options: &Options) -> Result<(Placement, Plan), CollectiveError> {
    let refuse = |detail: String| refused(options, ErrorKind::Invalid, "being called", detail);
    let placement =
        Placement::new(&options.placement).map_err(|error| refuse(error.to_string()))?;
    check(options, &placement).map_err(refuse)?;
    let plan = match &options.bridge {
        Some((a, b)) => Plan::with_bridge(placement.nodes(), (a, b)),
        None => Plan::new(placement.nodes()),
    }
    .map_err(|error| refuse(error.to_string()))?;
    Ok((placement, plan))
}
