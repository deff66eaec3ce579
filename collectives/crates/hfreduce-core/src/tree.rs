//! State machine of one node: chunks of several operations on their way through two trees.
//!
//! Call the event methods and drain [`TreeCore::poll`] after each one. The life cycle of a chunk at
//! a node:
//!
//! ```text
//! activate ─▶ local inputs ready ─┐
//!             partial sums arrive ┴▶ Reduce ─▶ Send up ─▶ result arrives ─▶ Publish, Send down ─▶ Done
//!                                        └──── at the root: is the result ────────▲
//! ```

mod arrivals;
mod progress;

use std::collections::{BTreeMap, VecDeque};

use super::OUTSTANDING_MAX;
pub use super::action::*;
use super::credit::{CLASSES, Key, ReceiveWindow, SendWindow, class};
use super::fingerprint::Fingerprint;
use super::flow::{Flow, Flows, NEIGHBOURS_MAX, Stage};
use super::geometry::Chunk;
use crate::error::AbortReason;

/// Where the result of a chunk is forwarded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Onward {
    /// The result does not pass this node.
    Nowhere,
    /// To all nodes further away from the root.
    Away,
    /// To one node, over this link; none: the result has arrived.
    To(Option<usize>),
}

#[derive(Debug)]
struct ChunkState {
    key: Key,
    chunk: Chunk,
    /// The root of the tree for this chunk.
    rooted_at: Option<usize>,
    onward: Onward,
    needs_local: bool,
    local_ready: bool,
    partials: [Option<u32>; NEIGHBOURS_MAX],
    missing: usize,
    reduced: bool,
    receiving: bool,
    result: bool,
    sends_left: usize,
}

#[derive(Debug)]
struct Link {
    send: [SendWindow; CLASSES],
    receive: [ReceiveWindow; CLASSES],
    returns: [u8; CLASSES],
}

#[derive(Debug)]
struct Early {
    link: usize,
    head: DataHead,
    slot: u32,
}

impl Onward {
    fn links<'a>(&'a self, flow: &'a Flow) -> &'a [usize] {
        match self {
            Self::Nowhere => &[],
            Self::Away => &flow.away,
            Self::To(link) => link.as_slice(),
        }
    }
}

/// Fingerprints that are kept for comparison: of every operation that has not ended here, and of
/// those that a rank elsewhere may still be in. The node of that rank, and a node that waits for
/// it, each have at most [`OUTSTANDING_MAX`] outstanding operations, so it is fewer than two
/// windows behind.
const HISTORY: usize = 3 * OUTSTANDING_MAX;

/// See the module's text.
#[derive(Debug)]
pub struct TreeCore {
    flows: Flows,
    channel: (usize, usize),
    links: Vec<Link>,
    window: u32,
    fingerprints: VecDeque<(u64, Fingerprint)>,
    chunks: VecDeque<ChunkState>,
    activated: Option<Key>,
    early: BTreeMap<(Key, Stage), Vec<Early>>,
    actions: VecDeque<Action>,
    broken: bool,
}

impl TreeCore {
    /// Creates the state machine of the node of `flows`. This owner handles the chunks whose pair
    /// number modulo `channel.1` is `channel.0`; every (tree, stage) of a link has a window of
    /// `window` chunks.
    pub fn new(flows: Flows, channel: (usize, usize), window: u32) -> Self {
        let links = flows
            .peers()
            .iter()
            .map(|_| Link {
                send: std::array::from_fn(|_| SendWindow::new(window)),
                receive: std::array::from_fn(|_| ReceiveWindow::new(window)),
                returns: [0; CLASSES],
            })
            .collect();
        Self {
            flows,
            channel,
            links,
            window,
            fingerprints: VecDeque::new(),
            chunks: VecDeque::new(),
            activated: None,
            early: BTreeMap::new(),
            actions: VecDeque::new(),
            broken: false,
        }
    }

    /// Returns the next action.
    #[inline]
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The routes.
    #[inline]
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// True if this owner handles chunk `index` of an operation.
    #[inline]
    pub fn owns(channel: (usize, usize), index: u32) -> bool {
        (index as usize / 2) % channel.1 == channel.0
    }

    /// Starts operation `sequence`; called in order.
    ///
    /// # Errors
    /// A [`Violation`] and its link, if a peer that is ahead runs another operation.
    pub fn start(
        &mut self,
        sequence: u64,
        fingerprint: Fingerprint,
    ) -> Result<(), (usize, Violation)> {
        if self.fingerprints.len() == HISTORY {
            self.fingerprints.pop_front();
        }
        self.fingerprints.push_back((sequence, fingerprint));
        let range = ((sequence, 0), Stage::Up)..((sequence + 1, 0), Stage::Up);
        for early in self.early.range(range).flat_map(|(_, early)| early) {
            if early.head.fingerprint != fingerprint {
                let peer_fingerprint = early.head.fingerprint;
                return Err((
                    early.link,
                    Violation::Mismatch { sequence, fingerprint, peer_fingerprint },
                ));
            }
        }
        Ok(())
    }

    /// Compares the operation that a peer runs as `sequence` with that of this rank.
    ///
    /// # Errors
    /// [`Violation::Mismatch`].
    #[inline]
    pub fn compare(&self, sequence: u64, peer_fingerprint: Fingerprint) -> Result<(), Violation> {
        match self.fingerprint_of(sequence) {
            Some(fingerprint) if fingerprint != peer_fingerprint => {
                Err(Violation::Mismatch { sequence, fingerprint, peer_fingerprint })
            }
            _ => Ok(()),
        }
    }

    /// Activates a chunk of a started operation: its result buffer is free. Called in order of age;
    /// `root` is the node of its root rank ([`Chunk::root`]).
    ///
    /// # Errors
    /// A [`Violation`] and its link, if a frame that arrived early does not match.
    pub fn activate(
        &mut self,
        sequence: u64,
        chunk: Chunk,
        root: Option<usize>,
    ) -> Result<(), (usize, Violation)> {
        if self.broken {
            return Ok(());
        }
        let key = (sequence, chunk.index);
        let rooted_at = chunk.rooted_at(root);
        let onward = self.onward(&chunk, root);
        let flow = self.flows.flow(chunk.tree, rooted_at);
        let (is_root, away) = (flow.toward.is_none(), flow.away.len());
        let mut sends_left = 0;
        if let (true, Some(link)) = (chunk.reduces(), flow.toward) {
            self.links[link].send[class(chunk.tree, Stage::Up)].expect(key);
            sends_left += 1;
        }
        for link in onward.links(flow) {
            self.links[*link].send[class(chunk.tree, Stage::Down)].expect(key);
            sends_left += 1;
        }
        self.chunks.push_back(ChunkState {
            key,
            chunk,
            rooted_at,
            onward,
            needs_local: chunk.reduces() || is_root,
            local_ready: false,
            partials: [None; NEIGHBOURS_MAX],
            missing: if chunk.reduces() { away } else { 0 },
            reduced: false,
            receiving: false,
            result: false,
            sends_left,
        });
        self.activated = Some(key);
        for stage in [Stage::Up, Stage::Down] {
            for early in self.early.remove(&(key, stage)).unwrap_or_default() {
                let at = self.chunks.len() - 1;
                self.admit(at, early.link, &early.head).map_err(|why| (early.link, why))?;
                self.accept(at, early.link, &early.head, Place::Slot(early.slot));
            }
        }
        Ok(())
    }

    /// The inputs of all local contributors to this chunk are ready.
    #[inline]
    pub fn local_ready(&mut self, key: Key) {
        if self.wants_local(key)
            && let Some(at) = self.find(key)
        {
            self.chunks[at].local_ready = true;
            self.advance(at);
        }
    }

    /// True while this chunk waits for local inputs.
    #[inline]
    pub fn wants_local(&self, key: Key) -> bool {
        self.find(key).is_some_and(|at| {
            let state = &self.chunks[at];
            state.needs_local && !state.local_ready
        })
    }

    /// The last byte of an [`Action::Send`] has left.
    #[inline]
    pub fn sent(&mut self, key: Key) {
        if let Some(at) = self.find(key) {
            self.chunks[at].sends_left = self.chunks[at].sends_left.saturating_sub(1);
            self.finish(at);
        }
    }

    /// Handles returned credits.
    ///
    /// # Errors
    /// [`Violation::Protocol`] if more are returned than were given.
    #[inline]
    pub fn credits(&mut self, link: usize, counts: [u8; CLASSES]) -> Result<(), Violation> {
        for (class, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            if !self.links[link].send[class].give_back(u32::from(count)) {
                return Err(Violation::Protocol("more credits were returned than given".into()));
            }
            self.pump(link, class);
        }
        Ok(())
    }

    /// Takes the credits to be returned on this link.
    #[inline]
    pub fn take_returns(&mut self, link: usize) -> [u8; CLASSES] {
        std::mem::take(&mut self.links[link].returns)
    }

    /// True once enough credits are to be returned for a separate frame, or the peer has no other
    /// credit: its oldest chunk may wait for one, and no other frame may be due on this link.
    #[inline]
    pub fn should_return(&self, link: usize) -> bool {
        let Link { returns, receive, .. } = &self.links[link];
        returns.iter().zip(receive).any(|(count, receive)| {
            let count = u32::from(*count);
            count > 0 && (count * 2 >= self.window || receive.outstanding() + count >= self.window)
        })
    }

    /// Ends all operations and sends the reason to every neighbor but `from`. False if they had
    /// ended before.
    pub fn fail(&mut self, cause: &AbortReason, from: Option<usize>) -> bool {
        if std::mem::replace(&mut self.broken, true) {
            return false;
        }
        self.actions.clear();
        self.chunks.clear();
        self.early.clear();
        for link in (0..self.links.len()).filter(|link| Some(*link) != from) {
            self.actions.push_back(Action::Abort { link, cause: cause.clone() });
        }
        true
    }

    /// True after [`TreeCore::fail`].
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Chunks that are active.
    #[inline]
    pub fn active(&self) -> usize {
        self.chunks.len()
    }

    /// What the oldest unfinished chunk waits for.
    pub fn waiting(&self) -> Option<Waiting> {
        let state = self.chunks.front()?;
        let flow = self.flow(state);
        if state.needs_local && !state.local_ready {
            return Some(Waiting::Local(state.key));
        }
        if state.chunk.reduces() && state.missing > 0 {
            let link = flow.away.iter().zip(&state.partials).find(|(_, slot)| slot.is_none());
            return link.map(|(link, _)| Waiting::Frame(state.key, *link, Stage::Up));
        }
        match flow.toward {
            Some(link) if state.onward != Onward::Nowhere && !state.result => {
                Some(Waiting::Frame(state.key, link, Stage::Down))
            }
            Some(link) if state.onward == Onward::Nowhere => Some(Waiting::Peer(state.key, link)),
            _ => flow.away.first().map(|link| Waiting::Peer(state.key, *link)),
        }
    }

    fn onward(&self, chunk: &Chunk, root: Option<usize>) -> Onward {
        if chunk.spreads() {
            return Onward::Away;
        }
        let (true, Some(node)) = (chunk.anchored, root) else { return Onward::Nowhere };
        // From the tree's root to that node: the result passes this node unless the route leads
        // back up.
        let up = self.flows.flow(chunk.tree, None).toward;
        match self.flows.flow(chunk.tree, Some(node)).toward {
            Some(link) if up == Some(link) => Onward::Nowhere,
            link => Onward::To(link),
        }
    }

    fn fingerprint_of(&self, sequence: u64) -> Option<Fingerprint> {
        let at = self.fingerprints.binary_search_by_key(&sequence, |(seq, _)| *seq).ok()?;
        Some(self.fingerprints[at].1)
    }

    fn find(&self, key: Key) -> Option<usize> {
        self.chunks.binary_search_by_key(&key, |state| state.key).ok()
    }

    fn flow(&self, state: &ChunkState) -> &Flow {
        self.flows.flow(state.chunk.tree, state.rooted_at)
    }
}

#[cfg(test)]
mod tests;
