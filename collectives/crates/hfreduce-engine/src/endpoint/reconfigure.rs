//! A communicator with other members: the driver of [`Reconfiguration`], and what comes before and after.
//!
//! The coordinator dials every member at the port that it has had since its first epoch. Then all
//! connect anew: new segment, new connections, new plan. Nothing of the epoch before is used, and a
//! connection that was made for it is refused because it names another group.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fabric::arena::Arena;
use fabric::auth::nonce;
use fabric::deadline::Deadline;

use super::agreement::AgreementDriver;
use super::identity::{EndpointIdentity, ReconfigureSource};
use super::info::{Info, LocalSockets, digest, first_eight, refused};
use super::members::{Member, choose, list_digest};
use super::record;
use super::{Endpoint, Options};
use crate::communicator::{Communicator, SessionHandle};
use crate::core::reconfigure::{Agreement, Rejection, Start};
use crate::error::{AbortReason, CollectiveError, ErrorKind};

/// How long operations under way in the epoch before may take to end.
pub(crate) const CLOSE: Duration = Duration::from_secs(2);
/// Looked at while members agree: why whoever this is done for is no more.
pub(crate) type Watch<'a> = &'a mut dyn FnMut() -> Option<String>;

/// One who waits to be taken into a communicator that exists.
pub struct Newcomer {
    identity: Arc<EndpointIdentity>,
    options: Options,
    /// Its connections are a group's.
    joined: AtomicBool,
}

impl Newcomer {
    /// Opens its port. The placement in `options` is its own place alone.
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

    /// What the members need to know to take it in.
    pub fn info(&self) -> Vec<u8> {
        let info = self.options.info(&self.identity, 0, &LocalSockets::default());
        serde_json::to_vec(&info).unwrap_or_default()
    }

    /// Waits until a member's `reconfigure` names it, and connects. May be called again after an
    /// error, and not after that.
    ///
    /// # Errors
    /// Who is missing or does not fit.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        self.join_for(timeout, &mut || None)
    }

    /// The same as long as `watch` has nothing to say.
    pub(crate) fn join_for(
        &self,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<Communicator, CollectiveError> {
        if self.joined.load(Ordering::SeqCst) {
            let detail = "this newcomer is in a group: go on from that by reconfigure".to_owned();
            return Err(refused(&self.options, ErrorKind::Invalid, "being called", detail));
        }
        let deadline = Deadline::after(timeout);
        let place = (self.identity.clone(), self.options.clone());
        let communicator = go(place, None, (Vec::new(), String::new()), None, deadline, watch)
            .map_err(|why| why.into_error(&self.options, &|_| None))?;
        self.joined.store(true, Ordering::SeqCst);
        Ok(communicator)
    }

    /// Where its registered memory will be.
    pub(crate) fn arena(&self) -> io::Result<Arc<Arena>> {
        self.identity.arena(&self.options)
    }
}

impl Communicator {
    /// Ends this epoch and goes on with `members`, in this order. Every member calls it with the
    /// same list; the first is a present rank. Works on a broken communicator and on a whole one,
    /// and may be called again, with fewer members, after an error.
    ///
    /// # Errors
    /// Who is missing, gone or of another opinion, as ranks of the present epoch.
    pub fn reconfigure(
        &self,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let invalid = |detail| self.refused(ErrorKind::Invalid, "reconfigure", detail);
        match self.session().map_err(invalid)? {
            SessionHandle::Local(origin) => {
                self.reconfigure_as(origin, members, None, timeout, &mut || None)
            }
            SessionHandle::Daemon(daemon_session) => {
                daemon_session.reconfigure(self, members, timeout)
            }
        }
    }

    /// The same from connections of this process, as long as `watch` has nothing to say.
    /// `completed`: how many operations ended for whom this is done, if that is somebody else.
    pub(crate) fn reconfigure_as(
        &self,
        origin: &ReconfigureSource,
        members: &[Member],
        completed: Option<u64>,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<Communicator, CollectiveError> {
        let deadline = Deadline::after(timeout);
        let chosen = choose(members, &origin.infos, self.rank())
            .map_err(|detail| self.refused(ErrorKind::Invalid, "reconfigure", detail))?;
        self.close(CLOSE.min(timeout));
        self.release();
        let place = (origin.identity.clone(), origin.options.clone());
        let rank_of = |member: usize| match members.get(member) {
            Some(Member::Rank(rank)) => Some(*rank),
            _ => None,
        };
        let previous_epoch = Some((origin.epoch, completed.unwrap_or_else(|| self.completed())));
        let list = (chosen.list, chosen.words);
        go(place, Some(chosen.own), list, previous_epoch, deadline, watch)
            .map_err(|why| why.into_error(&origin.options, &rank_of))
    }
}

/// Why there is no new epoch.
enum Trouble {
    Refused(Rejection),
    /// While connecting: ranks are those of the new epoch.
    Failed(CollectiveError),
}

impl Trouble {
    /// As the caller knows the ranks.
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
                let known = |rank: u32| rank_of(rank as usize);
                error.cause.peer = error.cause.peer.and_then(known);
                error.cause.seen_by = known(error.cause.seen_by).unwrap_or(options.rank);
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
    let nonce = nonce().map_err(|error| trouble("asking the system for chance", error))?;
    let local_sockets = LocalSockets::open(true, options.peer_memory)
        .map_err(|error| trouble("listening on a local socket", error))?;
    let info = Info { previous_epoch, ..options.info(&identity, 0, &local_sockets) };
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
    };
    identity.inbox.between(list.len());
    let recorder = record::agreeing(&options, &start);
    let agreement = AgreementDriver::new(&identity, list, start, deadline);
    let agreed = agreement.run(&recorder, watch).map_err(Trouble::Refused)?;
    let ids: Vec<u8> = [agreed.nonce, u64::from(agreed.epoch)].map(u64::to_le_bytes).concat();
    let (endpoint, infos) = next_epoch(identity, options, &agreed, local_sockets)?;
    let group = infos.iter().flat_map(|info| info.id.to_le_bytes()).chain(ids).collect::<Vec<_>>();
    endpoint.enter(infos, digest(&group), agreed.epoch, deadline).map_err(Trouble::Failed)
}

/// The endpoint of this rank in the epoch that all agreed on: a pure function of the cards.
fn next_epoch(
    identity: Arc<EndpointIdentity>,
    options: Options,
    agreed: &Agreement,
    local_sockets: LocalSockets,
) -> Result<(Endpoint, Vec<Info>), Trouble> {
    let fail = |detail: String| {
        Trouble::Failed(refused(&options, ErrorKind::Protocol, "reading the cards", detail))
    };
    let infos = agreed.infos.iter().enumerate().map(|(rank, info)| {
        let info: Result<Info, _> = serde_json::from_str(info);
        info.map(|info| Info { rank: rank as u32, ..info })
    });
    let infos: Vec<Info> =
        infos.collect::<Result<_, _>>().map_err(|error| fail(error.to_string()))?;
    let rank = infos.iter().position(|info| info.id == identity.id);
    let rank = rank.ok_or_else(|| fail("the coordinator left us out".to_owned()))?;
    let options = options.of_epoch(&infos, rank);
    let endpoint = Endpoint::of_epoch(identity, options, infos[rank].clone(), local_sockets);
    let endpoint = endpoint.map_err(Trouble::Failed)?;
    let told: Vec<Vec<u8>> =
        infos.iter().map(|info| serde_json::to_vec(info).unwrap_or_default()).collect();
    let infos = endpoint.read_infos(&told).map_err(Trouble::Failed)?;
    Ok((endpoint, infos))
}

impl Options {
    /// Those of the same process as rank `rank` of an epoch that begins with these infos.
    pub(crate) fn of_epoch(self, infos: &[Info], rank: usize) -> Self {
        Self {
            rank: rank as u32,
            placement: infos.iter().map(|info| (info.node.clone(), info.zone.clone())).collect(),
            // A bridge that is still one; the same on all ranks, because all ask the first card.
            bridge: infos.first().and_then(|info| info.bridge.clone()).filter(|(one, other)| {
                [one, other].iter().all(|end| infos.iter().any(|info| info.node == **end))
            }),
            ..self
        }
    }
}

/// For tests of strangers' cards: how many infos and places the epoch has, if there is one.
#[cfg(test)]
pub(super) fn fuzzed_epoch(
    identity: Arc<EndpointIdentity>,
    options: Options,
    agreed: &Agreement,
) -> Option<(usize, usize)> {
    let (endpoint, infos) = next_epoch(identity, options, agreed, LocalSockets::default()).ok()?;
    Some((infos.len(), endpoint.placement.world_size()))
}
