//! What of a rank outlives its epochs: its number, its port, and who comes to it.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use fabric::arena::Arena;
use fabric::auth::{Key, nonce};
use fabric::descriptors::{Reservation, reserve};
use fabric::interfaces::{Interface, interfaces, source_towards};
use fabric::tcp::Port;

use super::Options;
use super::info::{Info, first_eight, refused, refused_on};
use super::neighbours::{Inbox, open_port};
use super::options::{descriptors_needed, descriptors_without_messages, memory_needed};
use crate::driver::lock;
use crate::error::{CollectiveError, ErrorKind};
use crate::placement::Placement;
use crate::share::Charge;

/// A machine full of containers has hundreds of addresses, and what we tell stays small.
const ADDRESSES_MAX: usize = 16;

/// See the module's text. The port closes with the last communicator or endpoint that has it.
pub struct EndpointIdentity {
    pub(super) key: Key,
    /// Nobody else has it; members are known by it, whatever their rank is.
    pub(super) id: u64,
    /// Where others reach us, best first.
    pub(super) reached_at: Vec<Interface>,
    port: Port,
    pub(super) inbox: Arc<Inbox>,
    /// How often it looked for another epoch.
    pub(super) attempts: AtomicU32,
    /// What the connections and the memory of the present epoch may take.
    descriptors: Mutex<Reservation>,
    memory: Mutex<Charge>,
    counted: Mutex<Charge>,
    /// Those of the registered memory, which may be mapped as long as this exists.
    _addresses: Charge,
    /// Registered memory outlives epochs, as tensors do that lie in it.
    arena: Mutex<Option<Arc<Arena>>>,
}

/// What a communicator came from, for the epoch after it.
pub(crate) struct ReconfigureSource {
    pub(super) identity: Arc<EndpointIdentity>,
    pub(super) options: Options,
    pub(super) infos: Arc<Vec<Info>>,
    pub(super) epoch: u32,
}

impl ReconfigureSource {
    /// Memory that the other ranks of the node use in place.
    pub(crate) fn arena(&self) -> io::Result<Arc<Arena>> {
        self.identity.arena(&self.options)
    }

    /// Connections that the port has refused.
    pub(crate) fn refused(&self) -> u64 {
        self.identity.refused()
    }

    /// By rank: where each member came from, and how far it was there.
    pub(crate) fn previous_epochs(&self) -> impl Iterator<Item = Option<(u32, u64)>> {
        self.infos.iter().map(|info| info.previous_epoch)
    }

    /// How often the members have changed.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What all ranks told, in rank order.
    pub(crate) fn told(&self) -> Vec<String> {
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
        let (mut memory, mut counted) = (options.share.memory(), options.share.descriptors());
        charge(&mut memory, &mut counted, options, placement)?;
        let mut addresses = options.share.addresses();
        let taken = addresses.set_to(options.registered_bytes);
        taken.map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))?;
        let refuse = |kind, phase, detail| refused(options, kind, phase, detail);
        let key = Key::from_bytes(key)
            .map_err(|error| refuse(ErrorKind::Invalid, "being called", error.to_string()))?;
        let chance = nonce().map_err(|error| {
            refuse(ErrorKind::Io, "opening", format!("asking the system for chance: {error}"))
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
            descriptors,
            memory: Mutex::new(memory),
            counted: Mutex::new(counted),
            _addresses: addresses,
            arena: Mutex::default(),
        })
    }

    /// Makes room for the connections and the memory of a later epoch, before the first of them.
    pub(super) fn reserve(
        &self,
        options: &Options,
        placement: &Placement,
    ) -> Result<(), CollectiveError> {
        charge(&mut lock(&self.memory), &mut lock(&self.counted), options, placement)?;
        *lock(&self.descriptors) = reserved(options, placement)?;
        Ok(())
    }

    /// Where this rank's registered memory is. Another one once it had to be taken back from a peer.
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

    pub(super) fn port(&self) -> u16 {
        self.port.address().port()
    }

    pub(super) fn refused(&self) -> u64 {
        self.port.counters().refused.load(Ordering::Relaxed)
    }
}

/// Room for the connections of a group, before the first of them.
fn reserved(options: &Options, placement: &Placement) -> Result<Reservation, CollectiveError> {
    let ranks = placement.world_size();
    let locals = placement.members(placement.node_of(options.rank)).len();
    let count = descriptors_needed(ranks, locals, options.streams);
    reserve(count, &format!("a group of {ranks} ranks"))
        .map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))
}

/// Takes what a group may need from the memory and the descriptors that the rank's user may have;
/// connections for messages count when they are made.
fn charge(
    memory: &mut Charge,
    descriptors: &mut Charge,
    options: &Options,
    placement: &Placement,
) -> Result<(), CollectiveError> {
    let taken = memory
        .set_to(memory_needed(options, placement))
        .and_then(|()| descriptors.set_to(descriptors_without_messages(options, placement)));
    taken.map_err(|error| refused(options, ErrorKind::Io, "opening", error.to_string()))
}

/// Raises the limit of descriptors for a group of `ranks` whose nodes are not known yet, as if every
/// rank had its own: a process that cannot have them fails before it has met its peers.
/// [`Endpoint::new`](super::Endpoint::new) reserves what the group's nodes need.
///
/// # Errors
/// The process may not have that many; the error names the limit and the remedy.
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
