//! Identity of an endpoint, which outlives its epochs: its id, its port and its incoming
//! connections.

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use fabric::arena::Arena;
use fabric::auth::{Key, nonce};
use fabric::descriptors::{Reservation, reserve};
use fabric::interfaces::{Interface, interfaces, source_towards};
use fabric::tcp::Port;

use super::Options;
use super::info::{Info, LocalSockets, VERSION, digest, first_eight, host, refused, refused_on};
use super::neighbors::{Inbox, open_port};
use super::options::{descriptors_needed, descriptors_without_messages, memory_needed};
use crate::communicator::Communicator;
use crate::driver::lock;
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_core::placement::Placement;
use hfreduce_core::reconfigure::RejectedList;
use hfreduce_shm::quota::Charge;

/// A machine with many containers has hundreds of addresses; infos stay small.
const ADDRESSES_MAX: usize = 16;
/// Maximum number of rejected lists that a coordinator reports.
const REJECTED_MAX: usize = 4;

/// Identity of an endpoint. The port is closed with the last communicator or endpoint that uses it.
pub struct EndpointIdentity {
    pub(super) key: Key,
    /// Random id, by which members identify the endpoint in all epochs, independent of its rank.
    pub(super) id: u64,
    /// Addresses at which other ranks reach this one, best first.
    pub(super) reached_at: Vec<Interface>,
    port: Port,
    pub(super) inbox: Arc<Inbox>,
    /// Number of attempts to reconfigure.
    pub(super) attempts: AtomicU32,
    /// The last lists that this endpoint has rejected as their coordinator in the present epoch.
    rejected: Mutex<Vec<RejectedList>>,
    /// Reservation of descriptors for the present epoch.
    descriptors: Mutex<Reservation>,
    memory: Mutex<Charge>,
    descriptor_charge: Mutex<Charge>,
    /// Address space of the registered memory, which may be mapped as long as this exists.
    _addresses: Charge,
    /// Registered memory outlives epochs, like the tensors in it.
    arena: Mutex<Option<Arc<Arena>>>,
}

/// What the next epoch of a communicator is created from.
pub struct ReconfigureSource {
    pub(super) identity: Arc<EndpointIdentity>,
    pub(super) options: Options,
    pub(super) infos: Arc<Vec<Info>>,
    pub(super) epoch: u32,
}

impl ReconfigureSource {
    /// The source of a communicator of this process.
    ///
    /// # Errors
    /// The communicator is a forked child's, or a daemon runs it.
    pub fn of(communicator: &Communicator) -> Result<&Self, String> {
        let session: &dyn Any = communicator.session()?;
        session.downcast_ref().ok_or_else(|| "another process runs this communicator".to_owned())
    }

    /// The infos of all ranks, in rank order.
    pub fn infos(&self) -> Vec<String> {
        self.infos.iter().map(|info| serde_json::to_string(info).unwrap_or_default()).collect()
    }
}

impl EndpointIdentity {
    pub(super) fn open(
        options: &Options,
        placement: &Placement,
        key: &[u8],
    ) -> Result<Self, CollectiveError> {
        let descriptors = Mutex::new(reserved(options, placement)?);
        let (mut memory, mut descriptor_charge) =
            (options.share.memory(), options.share.descriptors());
        charge(&mut memory, &mut descriptor_charge, options, placement)?;
        let mut addresses = options.share.addresses();
        let reserved_addresses = addresses.set_to(options.registered_bytes);
        reserved_addresses
            .map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))?;
        let refuse = |kind, phase, detail| refused(options, kind, phase, detail);
        let key = Key::from_bytes(key)
            .map_err(|error| refuse(ErrorKind::Invalid, "being called", error.to_string()))?;
        let chance = nonce().map_err(|error| {
            refuse(ErrorKind::Io, "opening", format!("reading random bytes: {error}"))
        })?;
        let id = u64::from_le_bytes(first_eight(&chance));
        let inbox = Arc::new(Inbox::new(options.share.clone()));
        let route = source_towards(options.towards.as_deref());
        let mut reached_at = options.address.select(&interfaces(), route).map_err(|error| {
            refuse(
                ErrorKind::Invalid,
                "being called",
                format!("address (HFREDUCE_ADDRESS): {error}"),
            )
        })?;
        reached_at.truncate(ADDRESSES_MAX);
        let port = open_port(options, &reached_at, &key, id, inbox.clone()).map_err(|error| {
            refuse(ErrorKind::Io, "opening", format!("listening on a TCP port: {error}"))
        })?;
        Ok(Self {
            key,
            id,
            reached_at,
            port,
            inbox,
            attempts: AtomicU32::new(0),
            rejected: Mutex::default(),
            descriptors,
            memory: Mutex::new(memory),
            descriptor_charge: Mutex::new(descriptor_charge),
            _addresses: addresses,
            arena: Mutex::default(),
        })
    }

    /// The lists that it has rejected as their coordinator in the present epoch.
    pub(super) fn rejected(&self) -> Vec<RejectedList> {
        lock(&self.rejected).clone()
    }

    /// Records that it has rejected a list as its coordinator.
    pub(super) fn reject(&self, list: RejectedList) {
        let mut rejected = lock(&self.rejected);
        rejected.retain(|other| other.list_digest != list.list_digest);
        rejected.push(list);
        if rejected.len() > REJECTED_MAX {
            rejected.remove(0);
        }
    }

    /// Called at the start of an epoch.
    pub(super) fn forget_rejected(&self) {
        lock(&self.rejected).clear();
    }

    /// Reserves resources for the connections and the memory of a later epoch.
    pub(super) fn reserve(
        &self,
        options: &Options,
        placement: &Placement,
    ) -> Result<(), CollectiveError> {
        charge(&mut lock(&self.memory), &mut lock(&self.descriptor_charge), options, placement)?;
        *lock(&self.descriptors) = reserved(options, placement)?;
        Ok(())
    }

    /// Registered memory of this rank; a new arena after it was reclaimed from a peer.
    pub(super) fn arena(&self, options: &Options) -> io::Result<Arc<Arena>> {
        let mut arena = lock(&self.arena);
        match &*arena {
            Some(arena) if !arena.is_retired() => Ok(arena.clone()),
            _ => {
                let new = Arc::new(Arena::create("hfreduce-arena", options.registered_bytes)?);
                *arena = Some(new.clone());
                Ok(new)
            }
        }
    }

    /// The info of a rank with this identity.
    pub(super) fn info(&self, options: &Options, rank: u32, local_sockets: &LocalSockets) -> Info {
        let place = options.placement.get(options.rank as usize).cloned().unwrap_or_default();
        let streams = options.streams.map_or("auto".to_owned(), |streams| streams.to_string());
        let agreed = format!(
            "slot_bytes {}, slots {:?}, window {}, determinism {}, streams {streams} over {:?}",
            options.slot_bytes,
            options.slots,
            options.window,
            options.determinism,
            options.transport
        );
        let first = self.reached_at.first();
        Info {
            version: VERSION,
            rank,
            id: self.id,
            host: host(),
            processors: options
                .processors
                .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
            addresses: self.reached_at.iter().map(|interface| interface.address).collect(),
            interface: first.map(|interface| interface.name.clone()).unwrap_or_default(),
            port: self.port(),
            local_socket: local_sockets.local_name.clone(),
            mapping_socket: local_sockets.mapping_socket_name.clone(),
            registered_bytes: options.registered_bytes as u64,
            agreement: digest(agreed.as_bytes()),
            agreed,
            channels: options.channels,
            served: options.served,
            node: place.0,
            zone: place.1,
            bridge: options.bridge.clone(),
            previous_epoch: None,
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port.address().port()
    }

    pub(super) fn refused(&self) -> u64 {
        self.port.counters().refused.load(Ordering::Relaxed)
    }
}

/// Reserves descriptors for the connections of a group.
fn reserved(options: &Options, placement: &Placement) -> Result<Reservation, CollectiveError> {
    let ranks = placement.world_size();
    let locals = placement.members(placement.node_of(options.rank)).len();
    let count = descriptors_needed(ranks, locals, options.streams);
    reserve(count, &format!("a group of {ranks} ranks"))
        .map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))
}

/// Charges the memory and the descriptors that a group may need to the rank's user; point-to-point
/// connections are charged when they are made.
fn charge(
    memory: &mut Charge,
    descriptors: &mut Charge,
    options: &Options,
    placement: &Placement,
) -> Result<(), CollectiveError> {
    let result = memory
        .set_to(memory_needed(options, placement))
        .and_then(|()| descriptors.set_to(descriptors_without_messages(options, placement)));
    result.map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))
}

/// Raises the limit of descriptors for a group of `ranks` whose nodes are unknown, as if every rank
/// had a node: a process with too low a limit fails before it has met its peers.
/// [`Endpoint::new`](super::Endpoint::new) reserves what the group's nodes need.
///
/// # Errors
/// The limit is too low; the error names the limit and the remedy.
pub fn check_descriptors(
    job: &str,
    rank: u32,
    node: &str,
    ranks: usize,
    streams: Option<usize>,
) -> Result<(), CollectiveError> {
    let count = descriptors_needed(ranks, 1, streams);
    reserve(count, &format!("a group of {ranks} ranks"))
        .map(drop)
        .map_err(|error| refused_on((job, rank, node), ErrorKind::Io, "opening", error.to_string()))
}
