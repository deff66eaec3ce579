//! Reconfiguration of a communicator with other members.
//!
//! The coordinator dials every member at the port that it has had since its first epoch. Then all
//! ranks connect again: new segment, new connections, new plan. Nothing of the previous epoch is
//! used, and its connections are refused because they name another group.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fabric::arena::Arena;
use fabric::auth::nonce;
use fabric::deadline::Deadline;

use super::agreement::{AgreementDriver, Watch};
use super::identity::{EndpointIdentity, ReconfigureSource};
use super::info::{Info, LocalSockets, digest, first_eight, refused};
use super::members::{choose, list_digest};
use super::record;
use super::{Endpoint, Options};
use crate::communicator::{Communicator, Session};
use crate::member::Member;
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_core::reconfigure::{Agreement, RejectedList, Rejection, Start};

/// Time in which operations of the previous epoch may end.
pub const CLOSE: Duration = Duration::from_secs(2);

/// A process that waits to join an existing communicator.
pub struct Newcomer {
    identity: Arc<EndpointIdentity>,
    options: Options,
    /// Its connections belong to a group.
    joined: AtomicBool,
}

impl Newcomer {
    /// Opens its port. The placement in `options` has one entry, for the newcomer.
    ///
    /// # Errors
    /// As [`Endpoint::new`].
    pub fn new(options: Options, key: &[u8]) -> Result<Self, CollectiveError> {
        if options.placement.len() != 1 || options.rank != 0 {
            let detail = "a newcomer has one place, its own, and no rank yet".to_owned();
            return Err(refused(&options, ErrorKind::Invalid, "being called", detail));
        }
        let endpoint = Endpoint::new(options, key)?;
        Ok(Self { identity: endpoint.identity, options: endpoint.options, joined: false.into() })
    }

    /// The info that the members need to accept it.
    pub fn info(&self) -> Vec<u8> {
        let info = self.identity.info(&self.options, 0, &LocalSockets::default());
        serde_json::to_vec(&info).unwrap_or_default()
    }

    /// Waits until a member's `reconfigure` names it, and connects. May be called again after an
    /// error, but not after success.
    ///
    /// # Errors
    /// The rank that is missing or does not match.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        self.join_for(timeout, &mut || None)
    }

    /// The same, until `watch` returns a reason.
    pub fn join_for(
        &self,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<Communicator, CollectiveError> {
        if self.joined.load(Ordering::SeqCst) {
            let detail = "this newcomer is in a group: use its reconfigure".to_owned();
            return Err(refused(&self.options, ErrorKind::Invalid, "being called", detail));
        }
        let deadline = Deadline::after(timeout);
        let place = (self.identity.clone(), self.options.clone());
        let communicator = go(place, None, (Vec::new(), String::new()), None, deadline, watch)
            .map_err(|why| why.into_error(&self.options, &|_| None))?;
        self.joined.store(true, Ordering::SeqCst);
        Ok(communicator)
    }

    /// Registered memory of the newcomer.
    pub fn arena(&self) -> io::Result<Arc<Arena>> {
        self.identity.arena(&self.options)
    }
}

impl Communicator {
    /// Ends this epoch and continues with `members`, in this order. Every member calls it with the
    /// same list; the first is a present rank. It also works on a broken communicator, and may be
    /// called again, with fewer members, after an error.
    ///
    /// # Errors
    /// The member that is missing, lost or disagrees, as a rank of the present epoch.
    pub fn reconfigure(
        &self,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let invalid = |detail| self.refused(ErrorKind::Invalid, "reconfigure", detail);
        self.session().map_err(invalid)?.reconfigure(self, members, timeout)
    }

    /// The same for connections of this process, until `watch` returns a reason. `completed`: the
    /// operations completed by the rank, if it runs in another process.
    ///
    /// # Errors
    /// See [`Communicator::reconfigure`].
    pub fn reconfigure_as(
        &self,
        origin: &ReconfigureSource,
        members: &[Member],
        completed: Option<u64>,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<Communicator, CollectiveError> {
        let deadline = Deadline::after(timeout);
        let next = choose(members, &origin.infos, self.rank())
            .map_err(|detail| self.refused(ErrorKind::Invalid, "reconfigure", detail))?;
        self.close(CLOSE.min(timeout));
        self.release();
        let place = (origin.identity.clone(), origin.options.clone());
        let rank_of = |member: usize| match members.get(member) {
            Some(Member::Rank(rank)) => Some(*rank),
            _ => None,
        };
        let previous_epoch = Some((origin.epoch, completed.unwrap_or_else(|| self.completed())));
        let list = (next.list, next.description);
        go(place, Some(next.own), list, previous_epoch, deadline, watch)
            .map_err(|why| why.into_error(&origin.options, &rank_of))
    }
}

impl Session for ReconfigureSource {
    fn arena(&self) -> io::Result<Arc<Arena>> {
        self.identity.arena(&self.options)
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn previous_epochs(&self) -> Vec<Option<(u32, u64)>> {
        self.infos.iter().map(|info| info.previous_epoch).collect()
    }

    fn refused_connections(&self) -> Option<u64> {
        Some(self.identity.refused())
    }

    fn reconfigure(
        &self,
        communicator: &Communicator,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        communicator.reconfigure_as(self, members, None, timeout, &mut || None)
    }
}

/// Why the new epoch did not start.
enum Trouble {
    Refused(Rejection),
    /// Failed to connect: ranks are those of the new epoch.
    Failed(CollectiveError),
}

impl Trouble {
    /// Converts ranks in the error to those of the caller.
    fn into_error(
        self,
        options: &Options,
        rank_of: &dyn Fn(usize) -> Option<u32>,
    ) -> CollectiveError {
        let own = refused(options, ErrorKind::Io, "agreeing on the members", String::new());
        match self {
            Self::Refused(Rejection { kind, member, detail }) => {
                let mut cause = AbortReason::new(kind, options.rank, detail);
                cause.peer = member.and_then(rank_of);
                let node = cause.peer.and_then(|rank| options.placement.get(rank as usize));
                cause.peer_node = node.map(|(node, _)| node.clone());
                let operation = "reconfigure".to_owned();
                CollectiveError { operation, cause: Box::new(cause), ..own }
            }
            Self::Failed(mut error) => {
                error.rank = options.rank;
                let mapped = |rank: u32| rank_of(rank as usize);
                error.cause.peer = error.cause.peer.and_then(mapped);
                error.cause.seen_by = mapped(error.cause.seen_by).unwrap_or(options.rank);
                CollectiveError { operation: "reconfigure".into(), ..error }
            }
        }
    }
}

fn go(
    (identity, options): (Arc<EndpointIdentity>, Options),
    own: Option<usize>,
    (list, messages): (Vec<Info>, String),
    previous_epoch: Option<(u32, u64)>,
    deadline: Deadline,
    watch: Watch<'_>,
) -> Result<Communicator, Trouble> {
    let trouble = |phase: &str, error: std::io::Error| {
        Trouble::Failed(refused(&options, ErrorKind::Io, phase, error.to_string()))
    };
    let nonce = nonce().map_err(|error| trouble("reading random bytes", error))?;
    let local_sockets = LocalSockets::open(true, options.peer_memory)
        .map_err(|error| trouble("listening on a local socket", error))?;
    let info = Info { previous_epoch, ..identity.info(&options, 0, &local_sockets) };
    let start = Start {
        id: identity.id,
        attempt: u64::from(identity.attempts.fetch_add(1, Ordering::Relaxed)),
        own,
        size: list.len(),
        list_digest: list_digest(&list),
        list: messages,
        epoch: previous_epoch.map_or(0, |(epoch, _)| epoch),
        info: serde_json::to_string(&info).unwrap_or_default(),
        nonce: u64::from_le_bytes(first_eight(&nonce)),
        rejected: identity.rejected(),
    };
    let list_digest = start.list_digest;
    identity.inbox.between(list.len());
    let recorder = record::for_reconfiguration(&options, &start);
    let agreement = AgreementDriver::new(&identity, list, start, deadline);
    let agreed = match agreement.run(&recorder, watch) {
        Ok(agreed) => agreed,
        Err(why) => {
            if own == Some(0) {
                identity.reject(RejectedList { list_digest, why: why.clone() });
            }
            return Err(Trouble::Refused(why));
        }
    };
    identity.forget_rejected();
    let ids: Vec<u8> = [agreed.nonce, u64::from(agreed.epoch)].map(u64::to_le_bytes).concat();
    let (endpoint, infos) = next_epoch(identity, options, &agreed, local_sockets)?;
    let group = infos.iter().flat_map(|info| info.id.to_le_bytes()).chain(ids).collect::<Vec<_>>();
    endpoint.enter(infos, digest(&group), agreed.epoch, deadline).map_err(Trouble::Failed)
}

/// The endpoint of this rank in the agreed epoch: a pure function of the infos.
fn next_epoch(
    identity: Arc<EndpointIdentity>,
    options: Options,
    agreed: &Agreement,
    local_sockets: LocalSockets,
) -> Result<(Endpoint, Vec<Info>), Trouble> {
    let fail = |detail: String| {
        Trouble::Failed(refused(&options, ErrorKind::Protocol, "reading the infos", detail))
    };
    let infos = agreed.infos.iter().enumerate().map(|(rank, info)| {
        let info: Result<Info, _> = serde_json::from_str(info);
        info.map(|info| Info { rank: rank as u32, ..info })
    });
    let infos: Vec<Info> =
        infos.collect::<Result<_, _>>().map_err(|error| fail(error.to_string()))?;
    let rank = infos.iter().position(|info| info.id == identity.id);
    let rank = rank.ok_or_else(|| fail("this rank is missing in the agreement".to_owned()))?;
    let options = options.of_epoch(&infos, rank);
    let endpoint = Endpoint::of_epoch(identity, options, infos[rank].clone(), local_sockets);
    let endpoint = endpoint.map_err(Trouble::Failed)?;
    let encoded: Vec<Vec<u8>> =
        infos.iter().map(|info| serde_json::to_vec(info).unwrap_or_default()).collect();
    let infos = endpoint.read_infos(&encoded).map_err(Trouble::Failed)?;
    Ok((endpoint, infos))
}

impl Options {
    /// The options of the same process as rank `rank` of an epoch with these infos.
    pub fn of_epoch(self, infos: &[Info], rank: usize) -> Self {
        Self {
            rank: rank as u32,
            placement: infos.iter().map(|info| (info.node.clone(), info.zone.clone())).collect(),
            // The bridge, if both ends are still members; equal on all ranks, since all use the
            // first info.
            bridge: infos.first().and_then(|info| info.bridge.clone()).filter(|(a, b)| {
                [a, b].iter().all(|end| infos.iter().any(|info| info.node == **end))
            }),
            ..self
        }
    }
}

/// For fuzz tests: the number of infos and ranks of the epoch, if there is one.
#[cfg(test)]
pub(super) fn fuzzed_epoch(
    identity: Arc<EndpointIdentity>,
    options: Options,
    agreed: &Agreement,
) -> Option<(usize, usize)> {
    let (endpoint, infos) = next_epoch(identity, options, agreed, LocalSockets::default()).ok()?;
    Some((infos.len(), endpoint.placement.world_size()))
}
