//! Options of a rank, and their validation.

use std::sync::Arc;
use std::time::Duration;

use fabric::arena::Arena;
use fabric::interfaces::AddressSelector;
use hfreduce_transport::open::TransportKind;
use serde::{Deserialize, Serialize};

use super::CHANNELS_MAX;
use crate::priority::{HELD, Priority};
use crate::share::Share;
use hfreduce_core::Determinism;
use hfreduce_core::credit::CLASSES;
use hfreduce_core::placement::Placement;
use hfreduce_shm::flight::Folders;
use hfreduce_shm::segment::Shape;

/// Maximum number of ranks per node: the descriptors of all are sent in one message.
pub const LOCALS_MAX: usize = 120;
/// Default maximum of a rank's registered memory: a rank maps the arenas of all others, and the
/// address space of a process is 128 TiB.
pub const REGISTERED_BYTES_MAX: usize = 256 << 30;
/// Default number of slots of a segment, minimum and maximum.
const SLOTS_MIN: usize = 8;
const SLOTS_MAX: usize = 32;
/// Minimum of bytes in flight in a node, within those bounds.
const UNDER_WAY_BYTES: usize = 2 << 20;
/// The same of a communicator below the default priority: an operation of a higher level waits for
/// all bytes in flight.
const UNDER_WAY_BYTES_LOW: usize = UNDER_WAY_BYTES / 4;
/// Bytes of ring accumulators, of all ranks together.
const ROUND_BYTES: usize = 8 << 20;
/// Default number of TCP streams between two neighbor nodes.
pub const STREAMS: usize = 2;
/// Maximum number of TCP streams.
pub const STREAMS_MAX: usize = 16;

/// Descriptors of a rank in addition to its connections: port, doorbells, pollers, segments, flight
/// record.
const DESCRIPTORS: usize = 32;
/// Memory of a rank in addition to segments and slots, and for each rank of its group.
const RANK_BYTES: usize = 1 << 20;
const MEMBER_BYTES: usize = 1 << 10;
/// Maximum number of tree neighbors of a node.
const NEIGHBOURS_MAX: usize = 4;

/// Descriptors that a rank of a group of `ranks` may open, with `locals` of them on its node and
/// `streams` between two nodes: its own, those of its node (doorbell, memory, socket and process of
/// each rank), those to its tree neighbors, and one connection to and one from each rank that it
/// exchanges messages with.
pub fn descriptors_needed(ranks: usize, locals: usize, streams: Option<usize>) -> usize {
    let trees = NEIGHBOURS_MAX * streams.unwrap_or(STREAMS).min(STREAMS_MAX);
    DESCRIPTORS + 4 * locals + trees + 2 * ranks.saturating_sub(1)
}

/// The same without point-to-point connections.
pub fn descriptors_without_messages(options: &Options, placement: &Placement) -> usize {
    let locals = placement.members(placement.node_of(options.rank)).len();
    descriptors_needed(1, locals, options.streams)
}

/// Options of a rank. The sizes must be equal on all ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The job, for messages.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// (node, zone) of every rank, in rank order.
    pub placement: Vec<(String, String)>,
    /// The pair of nodes that connects two zones, if the scheduler has chosen one.
    pub bridge: Option<(String, String)>,
    /// The addresses at which other nodes reach this one. Default: all, best first.
    pub address: AddressSelector,
    /// A host of the group, for example that of rank 0: the source address of the route to it is
    /// preferred.
    pub towards: Option<String>,
    /// The largest chunk, in bytes; a multiple of 4096.
    pub slot_bytes: usize,
    /// Chunks in flight inside a node. Default: depends on its position in the trees.
    pub slots: Option<usize>,
    /// Chunks in flight on one tree edge, in one direction.
    pub window: u32,
    /// Silence after which a peer is considered stopped.
    pub liveness: Duration,
    /// Ranks of a node that own chunks. Default: as many as there are CPUs for.
    pub channels: Option<usize>,
    /// CPUs that this machine has for its ranks. Default: those that this process may use.
    pub processors: Option<usize>,
    /// Folders of the flight recorder and its dumps, in the process that has the connections.
    #[serde(skip, default = "Folders::from_environment")]
    pub folders: Folders,
    /// Maximum of registered memory of this rank, in whole pages; it is not allocated in advance.
    /// 0: none.
    pub registered_bytes: usize,
    /// Nodes on one machine map each other's segments instead of using TCP.
    pub peer_memory: bool,
    /// Kind of transport along the trees; equal on all ranks.
    #[serde(default)]
    pub transport: TransportKind,
    /// TCP streams between two neighbor nodes, divided among the ranks that own chunks; equal on
    /// all ranks. Default: [`STREAMS`].
    #[serde(default)]
    pub streams: Option<usize>,
    /// Determinism modes; equal on all ranks.
    pub determinism: Determinism,
    /// Priority among the communicators with the same share.
    pub priority: Priority,
    /// Resources shared with its user's other ranks in the process that has the connections.
    #[serde(skip, default = "Share::of_process")]
    pub share: Arc<Share>,
    /// Maximum time for which chunks wait for those of a higher level.
    pub held_back: Duration,
    /// A daemon runs this rank: the process that ends is not the rank's.
    pub served: bool,
}

impl Options {
    /// Default options of a rank of a group.
    pub fn new(rank: u32, placement: Vec<(String, String)>) -> Self {
        Self {
            job: String::new(),
            rank,
            placement,
            bridge: None,
            address: AddressSelector::default(),
            towards: None,
            slot_bytes: 256 << 10,
            slots: None,
            window: 16,
            liveness: Duration::from_secs(10),
            channels: None,
            processors: None,
            folders: Folders::from_environment(),
            registered_bytes: registered_bytes(),
            peer_memory: true,
            transport: TransportKind::Tcp,
            streams: None,
            determinism: Determinism::DEFAULT,
            priority: Priority::NORMAL,
            share: Share::of_process(),
            held_back: HELD,
            served: false,
        }
    }
}

/// `HFREDUCE_REGISTERED_BYTES` in whole pages. It may differ between ranks, so it is not passed on
/// as a setting; an invalid value is rejected where settings are read.
fn registered_bytes() -> usize {
    let set = std::env::var("HFREDUCE_REGISTERED_BYTES").ok();
    let set = set.and_then(|text| text.parse::<usize>().ok());
    let bytes = set.unwrap_or_else(|| Arena::default_bytes().min(REGISTERED_BYTES_MAX));
    bytes.checked_next_multiple_of(4096).unwrap_or(0)
}

/// Every level of the trees holds a chunk of each tree on its way up and one on its way down, each
/// owner has two of each tree, and a slow link needs bytes in flight. More slots would only evict
/// chunks from the caches.
pub fn default_slots(
    nodes: usize,
    channels: usize,
    slot_bytes: usize,
    priority: Priority,
) -> usize {
    let is_low = priority < Priority::NORMAL;
    let under_way = if is_low { UNDER_WAY_BYTES_LOW } else { UNDER_WAY_BYTES };
    let priority_levels = usize::BITS - nodes.saturating_sub(1).leading_zeros();
    let required = 4 * channels.max(priority_levels as usize);
    required.max(under_way / slot_bytes.max(1)).clamp(SLOTS_MIN, SLOTS_MAX)
}

/// Consecutive ring accumulators, one slot per chunk: enough that ranks seldom wait for each other,
/// and no more than the last-level cache holds.
pub fn default_ring_slots(slots: usize, slot_bytes: usize) -> usize {
    (ROUND_BYTES / slot_bytes.max(1)).clamp(slots, SLOTS_MAX.max(slots))
}

/// Memory of this process that a rank of a group may use, in addition to registered memory: its
/// part of the segment, the slots of its tree links, and per-rank state.
pub fn memory_needed(options: &Options, placement: &Placement) -> usize {
    let (nodes, slot_bytes) = (placement.nodes().len(), options.slot_bytes);
    let locals = placement.members(placement.node_of(options.rank)).len();
    // The maximum; the number is known once the infos of all ranks are.
    let channels = locals.min(CHANNELS_MAX);
    let slots = options
        .slots
        .unwrap_or_else(|| default_slots(nodes, channels, slot_bytes, options.priority));
    let ring_slots = if nodes == 1 { default_ring_slots(slots, slot_bytes) } else { 0 };
    let shm = Shape { locals, slots, ring_slots, slot_bytes }.bytes().div_ceil(locals.max(1));
    let owns = placement.local_of(options.rank) < channels;
    let links = if owns { NEIGHBOURS_MAX.min(nodes - 1) } else { 0 };
    let pools = links * CLASSES * options.window as usize * slot_bytes;
    RANK_BYTES + shm + pools + placement.world_size() * MEMBER_BYTES
}

pub fn check(options: &Options, placement: &Placement) -> Result<(), String> {
    if options.rank as usize >= placement.world_size() {
        let size = placement.world_size();
        return Err(format!("rank {} is not in a group of {size} ranks", options.rank));
    }
    let node = placement.node_of(options.rank);
    let locals = placement.members(node).len();
    if locals > LOCALS_MAX {
        let name = &placement.nodes()[node].name;
        return Err(format!(
            "node `{name}` has {locals} ranks, the maximum is {LOCALS_MAX}: start fewer, or give \
             the node several names in the topology, whose ranks then share memory apart"
        ));
    }
    let slot = options.slot_bytes;
    if !(4096..=64 << 20).contains(&slot) || !slot.is_multiple_of(4096) {
        return Err(format!(
            "invalid chunk_bytes {slot}: expected a multiple of 4096, at most 64 MiB"
        ));
    }
    if let Some(slots) = options.slots.filter(|slots| !(2..=64).contains(slots)) {
        return Err(format!("invalid slots {slots}: expected 2 to 64"));
    }
    if !options.registered_bytes.is_multiple_of(4096) {
        let bytes = options.registered_bytes;
        return Err(format!("invalid registered_bytes {bytes}: expected a multiple of 4096"));
    }
    if !(1..=64).contains(&options.window) {
        return Err(format!("invalid window {}: expected 1 to 64", options.window));
    }
    if let Some(streams) = options.streams.filter(|streams| !(1..=STREAMS_MAX).contains(streams)) {
        return Err(format!(
            "invalid streams {streams} (HFREDUCE_STREAMS): expected 1 to {STREAMS_MAX}"
        ));
    }
    if options.liveness < Duration::from_millis(500) {
        return Err(format!("invalid liveness timeout {:?}: minimum 500 ms", options.liveness));
    }
    Ok(())
}
