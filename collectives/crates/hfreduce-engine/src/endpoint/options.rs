//! What a rank is told when it starts, and what of it makes no sense.

use std::sync::Arc;
use std::time::Duration;

use fabric::arena::Arena;
use fabric::interfaces::AddressSelector;
use serde::{Deserialize, Serialize};

use super::CHANNELS_MAX;
use crate::core::Determinism;
use crate::core::credit::CLASSES;
use crate::driver::priority::{HELD, Priority};
use crate::flight::Folders;
use crate::placement::Placement;
use crate::share::Share;
use crate::shm::Shape;

/// Ranks of one node at most: descriptors of all travel in one message.
pub const LOCALS_MAX: usize = 120;
/// Registered memory of a rank at most, where nobody says how much: a rank maps the arenas of all
/// others, and the addresses of a process end at 128 TiB.
pub const REGISTERED_BYTES_MAX: usize = 256 << 30;
/// Slots of a node's segment, where nobody says how many.
const SLOTS_MIN: usize = 8;
const SLOTS_MAX: usize = 32;
/// Bytes that a node has under way at least, within those bounds.
const UNDER_WAY_BYTES: usize = 2 << 20;
/// Bytes of sums that go round, of all ranks together.
const ROUND_BYTES: usize = 8 << 20;
/// TCP streams between two neighbouring nodes, where nobody says how many.
pub const STREAMS: usize = 2;
/// The most that can be asked for.
pub const STREAMS_MAX: usize = 16;

/// Descriptors of a rank besides its connections: port, doorbell, pollers, segments, flight record.
const DESCRIPTORS: usize = 32;
/// Memory of a rank besides segments and slots, and for each rank of its group.
const RANK_BYTES: usize = 1 << 20;
const MEMBER_BYTES: usize = 1 << 10;
/// Tree neighbours of a node at most.
const NEIGHBOURS_MAX: usize = 4;

/// Descriptors that a rank of a group of `ranks` may open, with `locals` of them on its node and
/// `streams` between two nodes: its own, those of its node (doorbell, memory, socket and process of each
/// rank), those to its tree neighbours, and one connection to and one from each rank that it
/// exchanges messages with.
pub fn descriptors_needed(ranks: usize, locals: usize, streams: Option<usize>) -> usize {
    let trees = NEIGHBOURS_MAX * streams.unwrap_or(STREAMS).min(STREAMS_MAX);
    DESCRIPTORS + 4 * locals + trees + 2 * ranks.saturating_sub(1)
}

/// The same of a rank before it exchanges messages.
pub(super) fn descriptors_without_messages(options: &Options, placement: &Placement) -> usize {
    let locals = placement.members(placement.node_of(options.rank)).len();
    descriptors_needed(1, locals, options.streams)
}

/// What carries frames along the trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransportKind {
    /// TCP.
    #[default]
    Tcp,
    /// Queues in memory, for ranks that are threads of one process.
    InProcess,
}

/// What a rank is told when it starts. The sizes must be the same on all ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The job, for messages.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// (node, zone) of every rank, in rank order.
    pub placement: Vec<(String, String)>,
    /// The pair of nodes over which two zones are joined, where the scheduler chose one.
    pub bridge: Option<(String, String)>,
    /// At which of its addresses other nodes reach this one; by default all, best first.
    pub address: AddressSelector,
    /// A host of the group, rank 0's say: the address that the route to it begins at is the best.
    pub towards: Option<String>,
    /// The largest chunk, in bytes; a multiple of 4096.
    pub slot_bytes: usize,
    /// Chunks under way inside a node; by default what its place in the trees needs.
    pub slots: Option<usize>,
    /// Chunks under way on one tree edge, in one direction.
    pub window: u32,
    /// Silence after which a peer counts as stopped.
    pub liveness: Duration,
    /// Ranks of a node that share its work; by default as many as there are processors for.
    pub channels: Option<usize>,
    /// Processors that this machine has for its ranks; by default those that this process may use.
    pub processors: Option<usize>,
    /// Where the flight recorder and its dumps are: folders of the process that has the connections.
    #[serde(skip, default = "Folders::from_environment")]
    pub folders: Folders,
    /// Registered memory of this rank at most, whole pages: a limit, not a use of memory. 0: none.
    pub registered_bytes: usize,
    /// Nodes on one machine copy from each other's memory instead of through TCP.
    pub peer_memory: bool,
    /// What carries frames along the trees; the same on all ranks.
    #[serde(default)]
    pub transport: TransportKind,
    /// TCP streams between two neighbouring nodes, which the ranks that share a node's work divide
    /// between them; the same on all ranks. By default [`STREAMS`].
    #[serde(default)]
    pub streams: Option<usize>,
    /// What is promised about bits, beyond the default; the same on all ranks.
    pub determinism: Determinism,
    /// Whose chunks go first, of the communicators with the same share.
    pub priority: Priority,
    /// What it shares with its user's other ranks in the process that has the connections.
    #[serde(skip, default = "Share::of_process")]
    pub share: Arc<Share>,
    /// How long chunks wait for those of a higher level at most.
    pub held_back: Duration,
    /// A daemon runs this rank's part: the process that ends is not the rank's own.
    pub served: bool,
}

impl Options {
    /// The defaults for a rank of a group.
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
            priority: Priority::Normal,
            share: Share::of_process(),
            held_back: HELD,
            served: false,
        }
    }
}

/// `HFREDUCE_REGISTERED_BYTES` in whole pages. It differs from rank to rank as it likes, so it is no
/// setting that anybody has to hand on; what is no number is refused where settings are read.
fn registered_bytes() -> usize {
    let set = std::env::var("HFREDUCE_REGISTERED_BYTES").ok();
    let set = set.and_then(|text| text.parse::<usize>().ok());
    let bytes = set.unwrap_or_else(|| Arena::default_bytes().min(REGISTERED_BYTES_MAX));
    bytes.checked_next_multiple_of(4096).unwrap_or(0)
}

/// Every level of the trees holds a chunk of each tree on its way up and one on its way down, each
/// of the ranks that share the work has two of each tree, and a slow link wants bytes under way.
/// More than that only pushes chunks out of the caches.
pub fn default_slots(nodes: usize, channels: usize, slot_bytes: usize) -> usize {
    let priority_levels = usize::BITS - nodes.saturating_sub(1).leading_zeros();
    let wanted = 4 * channels.max(priority_levels as usize);
    wanted.max(UNDER_WAY_BYTES / slot_bytes.max(1)).clamp(SLOTS_MIN, SLOTS_MAX)
}

/// Sums that go round lie behind one another, one slot a chunk: so many that the ranks before and
/// behind are seldom waited for, and no more than the last level of caches holds.
pub(super) fn default_ring_slots(slots: usize, slot_bytes: usize) -> usize {
    (ROUND_BYTES / slot_bytes.max(1)).clamp(slots, SLOTS_MAX.max(slots))
}

/// Memory of this process that a rank of a group may cause to be used, besides what it registers: its
/// part of the node's segment, the slots of its tree links, and what is kept for each rank.
pub(super) fn memory_needed(options: &Options, placement: &Placement) -> usize {
    let (nodes, slot_bytes) = (placement.nodes().len(), options.slot_bytes);
    let locals = placement.members(placement.node_of(options.rank)).len();
    // As many as there can be; how many there are is known once all have told what they have.
    let channels = locals.min(CHANNELS_MAX);
    let slots = options.slots.unwrap_or_else(|| default_slots(nodes, channels, slot_bytes));
    let ring_slots = if nodes == 1 { default_ring_slots(slots, slot_bytes) } else { 0 };
    let shm = Shape { locals, slots, ring_slots, slot_bytes }.bytes().div_ceil(locals.max(1));
    let owns = placement.local_of(options.rank) < channels;
    let links = if owns { NEIGHBOURS_MAX.min(nodes - 1) } else { 0 };
    let pools = links * CLASSES * options.window as usize * slot_bytes;
    RANK_BYTES + shm + pools + placement.world_size() * MEMBER_BYTES
}

pub(super) fn check(options: &Options, placement: &Placement) -> Result<(), String> {
    if options.rank as usize >= placement.world_size() {
        let size = placement.world_size();
        return Err(format!("rank {} does not exist in a world of {size}", options.rank));
    }
    let node = placement.node_of(options.rank);
    let locals = placement.members(node).len();
    if locals > LOCALS_MAX {
        let name = &placement.nodes()[node].name;
        return Err(format!(
            "node `{name}` has {locals} ranks; at most {LOCALS_MAX} are possible: start fewer, or give \
             the node several names in the topology, whose ranks then share memory apart"
        ));
    }
    let slot = options.slot_bytes;
    if !(4096..=64 << 20).contains(&slot) || !slot.is_multiple_of(4096) {
        return Err(format!("chunk_bytes {slot} is no multiple of 4096 from 4096 to 64 MiB"));
    }
    if let Some(slots) = options.slots.filter(|slots| !(2..=64).contains(slots)) {
        return Err(format!("slots {slots} is not from 2 to 64"));
    }
    if !options.registered_bytes.is_multiple_of(4096) {
        let bytes = options.registered_bytes;
        return Err(format!("registered_bytes {bytes} is no multiple of 4096"));
    }
    if !(1..=64).contains(&options.window) {
        return Err(format!("window {} is not from 1 to 64", options.window));
    }
    if let Some(streams) = options.streams.filter(|streams| !(1..=STREAMS_MAX).contains(streams)) {
        return Err(format!("streams {streams} (HFREDUCE_STREAMS) is not from 1 to {STREAMS_MAX}"));
    }
    if options.liveness < Duration::from_millis(500) {
        return Err(format!("a liveness time-out of {:?} is under 500 ms", options.liveness));
    }
    Ok(())
}
