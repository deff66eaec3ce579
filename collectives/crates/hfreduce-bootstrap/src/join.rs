//! Joining a group: the ranks exchange their places, then their endpoints, then connect.
//!
//! 1. Every rank publishes its place and its view of the group. A rank that was started with
//!    another topology, world size or job is reported here, before any connection of the group is
//!    opened. A group of ranks whose places are known from the exchange of the world skips this.
//! 2. Every rank publishes its endpoint (addresses and ports).
//! 3. The engine connects; every connection is authenticated with the group's key.
//!
//! All three have one deadline.

use std::net::IpAddr;
use std::time::Duration;

use fabric::deadline::Deadline;
use hfreduce_daemon::{AnyEndpoint, AnyNewcomer};
use hfreduce_engine::{Communicator, Options, check_descriptors};

use crate::error::JoinError;
use crate::membership::Membership;
use crate::phases::{PlaceValue, exchange_infos, exchange_places};
use crate::rendezvous::Rendezvous;
use crate::settings::Settings;
use crate::tcp_rendezvous::{RankIdentity, TcpRendezvous};
use crate::topology::{Place, Topology};
use crate::variables::SettingError;
use crate::world::World;

/// Minimum time to connect, even if the rendezvous used up the deadline.
const CONNECT_MIN: Duration = Duration::from_millis(100);

/// A connected group.
pub struct Joined {
    /// The communicator of this rank.
    pub communicator: Communicator,
    /// The places of all ranks, in group order.
    pub places: Vec<Place>,
}

impl Settings {
    /// Exchanges endpoints with the other ranks at the address of the rendezvous, and connects.
    ///
    /// # Errors
    /// [`JoinError`] names the ranks that are absent or disagree.
    pub fn join(&self) -> Result<Communicator, JoinError> {
        let deadline = Deadline::after(self.connect);
        let rendezvous = self.open_rendezvous()?;
        let membership = Membership::world(self.rank, self.world_size)?;
        Ok(self.join_through(&rendezvous, &membership, deadline)?.communicator)
    }

    /// Opens the rendezvous of all ranks at its address.
    ///
    /// # Errors
    /// The address cannot be used, or as for [`TcpRendezvous::new`].
    pub fn open_rendezvous(&self) -> Result<TcpRendezvous, JoinError> {
        let (host, port) = self.rendezvous_address()?;
        let identity =
            RankIdentity { job: self.job.clone(), rank: self.rank, world_size: self.world_size };
        TcpRendezvous::new(identity, &host, port, &self.key).map_err(JoinError::Rendezvous)
    }

    /// Exchanges endpoints with the other members through `rendezvous`, and connects. All members call this
    /// at about the same time.
    ///
    /// # Errors
    /// As for [`Settings::join`].
    pub fn join_through<R: Rendezvous>(
        &self,
        rendezvous: &R,
        membership: &Membership,
        deadline: Deadline,
    ) -> Result<Joined, JoinError<R::Error>> {
        let (rank, ranks) = (membership.rank(), membership.global_ranks());
        let topology = self.topology.as_deref().map(Topology::load).transpose()?;
        let expected = match &topology {
            Some(file) => file.places(ranks.iter().copied(), membership.world_size() as usize)?,
            None => Vec::new(),
        };
        let place = expected.get(rank as usize).cloned().unwrap_or_else(|| Place {
            node: self.node.clone(),
            zone: self.zone.clone(),
            address: None,
        });
        if self.daemon.is_none() {
            // Before anything is published: peers would wait for the endpoint of a rank that has none.
            check_descriptors(&self.job, rank, &place.node, ranks.len(), self.streams)?;
        }
        let world = if membership.is_world() { None } else { World::of(&self.job, membership) };
        let places = match world.as_ref().and_then(|world| world.places(ranks)) {
            Some(places) => places,
            None => {
                let own = PlaceValue::new(place, &self.job, membership, topology.as_ref());
                exchange_places(rendezvous, membership, &own, topology.as_ref(), deadline)?
            }
        };
        let key = match &self.key_file {
            _ if !self.key.is_empty() => self.key.clone(),
            Some(path) => Self::key_in(path)?,
            None => rendezvous.key(deadline).map_err(JoinError::Rendezvous)?,
        };
        let address = places[rank as usize].address.as_deref();
        let mut options = self.options(rank, &places, address, rendezvous.host())?;
        options.bridge = topology.and_then(|file| file.bridge(&places));
        let endpoint = AnyEndpoint::open(options, &key, self.daemon.as_deref())?;
        let infos =
            exchange_infos(rendezvous, membership, world.as_ref(), endpoint.info(), deadline)?;
        let remaining = deadline.remaining().unwrap_or_default().max(CONNECT_MIN);
        Ok(Joined { communicator: endpoint.connect(&infos, remaining)?, places })
    }

    /// Opens a newcomer: a process that waits for admission to an existing group. It has a place
    /// and a key; the members assign its rank, so it does not participate in a rendezvous.
    ///
    /// # Errors
    /// A setting cannot be used, or the engine fails.
    pub fn newcomer(&self) -> Result<AnyNewcomer, JoinError> {
        let place = Place { node: self.node.clone(), zone: self.zone.clone(), address: None };
        let host = self.rendezvous_address().ok().map(|(host, _)| host);
        let options = self.options(0, &[place], None, host)?;
        Ok(AnyNewcomer::open(options, &self.key, self.daemon.as_deref())?)
    }

    /// The options of the engine. `address`: the address of this rank in the topology file;
    /// `towards`: a host in the network of the other ranks.
    fn options(
        &self,
        rank: u32,
        places: &[Place],
        address: Option<&str>,
        towards: Option<String>,
    ) -> Result<Options, SettingError> {
        let placement = places.iter().map(|place| (place.node.clone(), place.zone.clone()));
        let mut options = Options::new(rank, placement.collect());
        options.job.clone_from(&self.job);
        options.slot_bytes = self.chunk_bytes.unwrap_or(options.slot_bytes);
        options.peer_memory = self.peer_memory;
        options.streams = self.streams;
        options.determinism = self.determinism;
        options.priority = self.priority;
        options.liveness = self.liveness.min(Duration::from_secs(86_400));
        let address = address.map(|text| {
            let expected = "an IP address in the topology file";
            text.parse::<IpAddr>().map_err(|_| SettingError::new("address", text, expected))
        });
        options.address = match address.transpose()? {
            Some(address) if self.address.is_default() => address.into(),
            _ => self.address.clone(),
        };
        options.towards = towards;
        Ok(options)
    }
}
