//! Messages between two ranks: who may send what when. Pure, like everything here.
//!
//! ```text
//! sender    Offer(tag, length) ──▶          with the bytes, where they are few (eager)
//! receiver          ◀── Grant               once a receive of that tag is posted
//! sender    Piece, Piece, … ──▶             straight into the receiver's memory
//! ```
//! A send is complete once it was granted and its last byte has left. A receiver holds at most
//! [`EAGER_WINDOW_BYTES`] of each peer that no receive has asked for; the sender counts them.
//!
//! Offers and receives of one tag pair up in order. Lengths and fingerprints must be equal. A receive
//! from [`ANY_RANK`] takes the oldest offer of its tag, whoever made it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::fingerprint::{Fingerprint, Kind};
use super::tree::Violation;

/// Offers without a grant that one rank may have at another: more than a program has messages under
/// way, so that none waits behind others that are received later. They take about 100 bytes each.
pub const OFFERS_MAX: usize = 1 << 17;

/// The longest message that goes with its offer, in bytes.
pub const EAGER_BYTES_MAX: u64 = 8 << 10;
/// Bytes of such messages that one rank may have at another before they are granted.
pub const EAGER_WINDOW_BYTES: u64 = 64 << 10;

/// In place of a peer: a receive from whoever sends first.
pub const ANY_RANK: u32 = u32::MAX;

/// Names one transfer of one operation on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransferId {
    /// The operation, as this rank counts them.
    pub operation: u64,
    /// Which of its transfers.
    pub transfer: usize,
}

/// What is said about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// What pairs it.
    pub tag: u64,
    /// Its length.
    pub bytes: u64,
    /// What the operation is.
    pub fingerprint: Fingerprint,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairAction {
    /// Tell the peer.
    Offer {
        /// To whom.
        peer: u32,
        /// The message's number.
        message: u64,
        /// What it is.
        envelope: Envelope,
        /// The send whose bytes go with it, if they do.
        eager: Option<TransferId>,
    },
    /// Tell the peer.
    Grant {
        /// To whom.
        peer: u32,
        /// The peer's number for it.
        message: u64,
        /// The receive that takes it.
        ticket: TransferId,
    },
    /// Copy the bytes that came with an offer.
    Take {
        /// Whose.
        peer: u32,
        /// The peer's number for the message.
        message: u64,
        /// The receive that takes them.
        ticket: TransferId,
    },
    /// Send the bytes.
    Stream {
        /// To whom.
        peer: u32,
        /// The message's number.
        message: u64,
        /// What it is.
        ticket: TransferId,
    },
    /// This transfer is complete.
    Complete {
        /// Which.
        ticket: TransferId,
    },
}

/// A receive that waits for an offer. Of one peer and of any, the one posted first goes first.
#[derive(Clone, Copy, Debug)]
struct Posted {
    order: u64,
    ticket: TransferId,
    envelope: Envelope,
}

/// An offer that waits for a receive.
#[derive(Clone, Copy, Debug)]
struct Offered {
    order: u64,
    message: u64,
    envelope: Envelope,
    /// Its bytes are here.
    eager: bool,
}

/// What waits for its counterpart: of one tag in order, each tag by itself, so that a program with
/// many messages under way looks at one of them for each.
#[derive(Debug)]
struct ByTag<T> {
    queues: BTreeMap<u64, VecDeque<T>>,
    len: usize,
}

impl<T> ByTag<T> {
    fn push(&mut self, tag: u64, item: T) {
        self.queues.entry(tag).or_default().push_back(item);
        self.len += 1;
    }

    fn first(&self, tag: u64) -> Option<&T> {
        self.queues.get(&tag)?.front()
    }

    fn pop(&mut self, tag: u64) -> Option<T> {
        let queue = self.queues.get_mut(&tag)?;
        let item = queue.pop_front()?;
        self.len -= 1;
        if queue.is_empty() {
            self.queues.remove(&tag);
        }
        Some(item)
    }
}

impl<T> Default for ByTag<T> {
    fn default() -> Self {
        Self { queues: BTreeMap::new(), len: 0 }
    }
}

#[derive(Debug, Default)]
struct Pair {
    next_message: u64,
    /// Sends that wait for their turn to be offered.
    queued: VecDeque<(TransferId, Envelope)>,
    offered: BTreeMap<u64, (TransferId, Envelope)>,
    /// Of those, the ones whose bytes went with the offer.
    eager: BTreeSet<u64>,
    eager_bytes: u64,
    offers: ByTag<Offered>,
    /// Bytes that came with these.
    held_bytes: u64,
    posted: ByTag<Posted>,
    arriving: BTreeMap<u64, (TransferId, u64, u64)>,
}

/// All pairs of one rank.
#[derive(Debug, Default)]
pub struct Pairs {
    pairs: BTreeMap<u32, Pair>,
    /// Receives from whoever comes.
    posted_to_any: ByTag<Posted>,
    /// Counts receives and offers in the order in which they came.
    order: u64,
    actions: VecDeque<PairAction>,
}

impl Pairs {
    /// The next thing to do.
    pub fn poll(&mut self) -> Option<PairAction> {
        self.actions.pop_front()
    }

    /// We want to send.
    pub fn send(&mut self, peer: u32, ticket: TransferId, envelope: Envelope) {
        self.pairs.entry(peer).or_default().queued.push_back((ticket, envelope));
        self.offer(peer);
    }

    /// We want to receive, from `peer` or from [`ANY_RANK`].
    ///
    /// # Errors
    /// The peer whose offer does not fit, and why.
    pub fn receive(
        &mut self,
        peer: u32,
        ticket: TransferId,
        envelope: Envelope,
    ) -> Result<(), (u32, Violation)> {
        let posted = Posted { order: self.next_order(), ticket, envelope };
        if let Some((peer, offer)) = self.take_offer(peer, envelope.tag) {
            return self.grant(peer, offer, posted).map_err(|why| (peer, why));
        }
        match peer {
            ANY_RANK => self.posted_to_any.push(envelope.tag, posted),
            peer => self.pairs.entry(peer).or_default().posted.push(envelope.tag, posted),
        }
        Ok(())
    }

    /// The peer wants to send; `eager`: the bytes are here.
    ///
    /// # Errors
    /// [`Violation`] if it does not fit, or the peer offers too much.
    pub fn offered(
        &mut self,
        peer: u32,
        message: u64,
        envelope: Envelope,
        eager: bool,
    ) -> Result<(), Violation> {
        let offer = Offered { order: self.next_order(), message, envelope, eager };
        if let Some(posted) = self.take_posted(peer, envelope.tag) {
            return self.grant(peer, offer, posted);
        }
        let pair = self.pairs.entry(peer).or_default();
        if pair.offers.len >= OFFERS_MAX {
            return Err(Violation::Protocol(format!("more than {OFFERS_MAX} offers wait here")));
        }
        if eager {
            pair.held_bytes = pair.held_bytes.saturating_add(envelope.bytes);
            if pair.held_bytes > EAGER_WINDOW_BYTES {
                let most = EAGER_WINDOW_BYTES;
                return Err(Violation::Protocol(format!("over {most} bytes came unasked")));
            }
        }
        pair.offers.push(envelope.tag, offer);
        Ok(())
    }

    /// The oldest offer of this tag that `peer` has made; of all peers', for any.
    fn take_offer(&mut self, peer: u32, tag: u64) -> Option<(u32, Offered)> {
        let peer = if peer == ANY_RANK {
            let first = |pair: &Pair| pair.offers.first(tag).map(|offer| offer.order);
            let all = self.pairs.iter().filter_map(|(peer, pair)| Some((first(pair)?, *peer)));
            all.min()?.1
        } else {
            peer
        };
        let pair = self.pairs.get_mut(&peer)?;
        let offer = pair.offers.pop(tag)?;
        if offer.eager {
            pair.held_bytes -= offer.envelope.bytes;
        }
        Some((peer, offer))
    }

    /// The oldest receive that takes an offer of this tag from `peer`.
    fn take_posted(&mut self, peer: u32, tag: u64) -> Option<Posted> {
        let own = &mut self.pairs.entry(peer).or_default().posted;
        let order = |queue: &ByTag<Posted>| queue.first(tag).map_or(u64::MAX, |first| first.order);
        match order(own) <= order(&self.posted_to_any) {
            true => own.pop(tag),
            false => self.posted_to_any.pop(tag),
        }
    }

    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// The peer wants our message now.
    ///
    /// # Errors
    /// [`Violation`] if we did not offer it.
    pub fn granted(&mut self, peer: u32, message: u64) -> Result<(), Violation> {
        let pair = self.pairs.entry(peer).or_default();
        let Some((ticket, envelope)) = pair.offered.remove(&message) else {
            return Err(Violation::Protocol(format!("message {message} was granted, not offered")));
        };
        let eager = pair.eager.remove(&message);
        if eager {
            pair.eager_bytes -= envelope.bytes;
        }
        self.actions.push_back(if envelope.bytes == 0 || eager {
            PairAction::Complete { ticket }
        } else {
            PairAction::Stream { peer, message, ticket }
        });
        self.offer(peer);
        Ok(())
    }

    /// A piece of the peer's message begins: which transfer it belongs to and where in it.
    ///
    /// # Errors
    /// [`Violation`] if it was not granted or is too long.
    pub fn piece(
        &mut self,
        peer: u32,
        message: u64,
        bytes: u64,
    ) -> Result<(TransferId, u64), Violation> {
        let arriving = self.pairs.get(&peer).and_then(|pair| pair.arriving.get(&message));
        match arriving {
            Some((ticket, have, all)) if bytes > 0 && have + bytes <= *all => Ok((*ticket, *have)),
            _ => {
                Err(Violation::Protocol(format!("{bytes} bytes of message {message} came unasked")))
            }
        }
    }

    /// The piece is in its place.
    pub fn arrived(&mut self, peer: u32, message: u64, bytes: u64) {
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        let Some((ticket, have, all)) = pair.arriving.get_mut(&message) else { return };
        *have += bytes;
        if have == all {
            self.actions.push_back(PairAction::Complete { ticket: *ticket });
            pair.arriving.remove(&message);
        }
    }

    fn offer(&mut self, peer: u32) {
        let pair = self.pairs.entry(peer).or_default();
        while pair.offered.len() < OFFERS_MAX {
            let Some((ticket, envelope)) = pair.queued.pop_front() else { return };
            let message = pair.next_message;
            pair.next_message += 1;
            pair.offered.insert(message, (ticket, envelope));
            let eager = (1..=EAGER_BYTES_MAX).contains(&envelope.bytes)
                && pair.eager_bytes + envelope.bytes <= EAGER_WINDOW_BYTES;
            if eager {
                pair.eager.insert(message);
                pair.eager_bytes += envelope.bytes;
            }
            let eager = eager.then_some(ticket);
            self.actions.push_back(PairAction::Offer { peer, message, envelope, eager });
        }
    }

    fn grant(&mut self, peer: u32, offered: Offered, posted: Posted) -> Result<(), Violation> {
        let Offered { message, envelope: offer, eager, .. } = offered;
        let Posted { ticket, envelope, .. } = posted;
        // Ranks may give an operation different lengths for each other: then both sides of a pair
        // have to agree on that of their message.
        if !same(&offer.fingerprint, &envelope.fingerprint) || offer.bytes != envelope.bytes {
            return Err(Violation::Mismatch {
                sequence: envelope.tag & (u64::MAX >> 1),
                ours: of_length(envelope),
                theirs: of_length(offer),
            });
        }
        self.actions.push_back(PairAction::Grant { peer, message, ticket });
        if eager {
            self.actions.push_back(PairAction::Take { peer, message, ticket });
        }
        if envelope.bytes == 0 || eager {
            self.actions.push_back(PairAction::Complete { ticket });
        } else {
            let pair = self.pairs.entry(peer).or_default();
            pair.arriving.insert(message, (ticket, 0, envelope.bytes));
        }
        Ok(())
    }
}

/// A send fits a receive of the same type and count; everything else fits its like.
fn same(theirs: &Fingerprint, ours: &Fingerprint) -> bool {
    match (theirs.kind, ours.kind) {
        (Kind::Send, Kind::Recv) => theirs.dtype == ours.dtype && theirs.count == ours.count,
        _ => theirs == ours,
    }
}

/// For messages: what was called, with the length of this message where it has none of its own.
fn of_length(envelope: Envelope) -> Fingerprint {
    let Envelope { bytes, fingerprint, .. } = envelope;
    match fingerprint.kind {
        Kind::Alltoall => Fingerprint {
            count: bytes / u64::from(fingerprint.element_bytes.max(1)),
            ..fingerprint
        },
        _ => fingerprint,
    }
}
